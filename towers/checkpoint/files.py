"""Files that are whole and durable, or as they were."""

import contextlib
import os
import zlib
from typing import BinaryIO

_CHUNK = 4 << 20


def write(path: str, content: bytes) -> None:
    """Replaces a file in one atomic and durable step; where it fails nothing is left of the new one."""
    try:
        with open(path + '.tmp', 'wb') as file:
            write_through(file, content)
        os.replace(path + '.tmp', path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + '.tmp')
        raise
    sync_folder(os.path.dirname(path))


def sync_file(path: str) -> None:
    """Makes the contents of a file that someone else wrote durable."""
    with open(path, 'rb') as file:
        os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Makes the names in a folder durable: a rename survives a power cut only after this."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def measure(path: str) -> dict[str, int]:
    """Size and CRC-32 of a file, which is read once."""
    size = crc = 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, 'rb', buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return {'size': size, 'crc32': crc}


def write_through(file: BinaryIO, content: bytes) -> None:
    """Writes `content` down to the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def names(folder: str) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def unlink(path: str) -> None:
    """Removes a file that someone else may already have removed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
