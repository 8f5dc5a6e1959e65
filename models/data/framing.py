"""The frame of TFRecord files, read without a session; TensorFlow's reader ends quietly in an empty file or a cut header.

A record is its length (uint64, little-endian), the masked CRC of these 8 bytes (uint32), the data, and the masked CRC of
the data. The CRC is CRC-32C (Castagnoli, reflected polynomial 0x82f63b78); masking rotates it right by 15 bits and adds
0xa282ead8, as TensorFlow's lib/hash/crc32c.h describes.
"""

import dataclasses
import functools
import logging
import mmap
import pathlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

_HEADER, _FOOTER = 12, 4
_POLYNOMIAL = np.uint32(0x82F63B78)
_SEARCHED, _CHECKED = 1 << 20, 1 << 24  # bytes looked at in one go


@dataclasses.dataclass(frozen=True)
class Frames:
    """Where the records of a file are.

    Attributes:
      offsets: int64 [n], first byte of each record's header.
      lengths: int64 [n], bytes of each record's data.
      numbers: int64 [n], each record's number in the file, counted from 0; damaged ones count too.
      damaged: number -> what is wrong with a record that has no whole frame.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    damaged: dict[int, str]


def read(path: pathlib.Path) -> Frames:
    """The frames of a file, their headers checked; where one is damaged the next whole one is looked for.

    All that lies between counts as one record. What the records hold is not looked at.
    """
    data = _mapped(path)
    found, damaged = [], {} if data else {0: 'the file is empty'}
    position = number = 0
    while position < len(data):
        length = _length(data, position)
        end = position + _HEADER + (length or 0) + _FOOTER
        if length is not None and end <= len(data):
            found.append((position, length, number))
            position = end
        elif length is not None or position + _HEADER > len(data):
            damaged[number] = f'it is cut: it begins at byte {position} and the file ends at byte {len(data)}'
            break
        else:
            damaged[number] = f'its length, at byte {position}, does not match its checksum'
            position = _next(data, position + 1)
        number += 1
    table = np.array(found, np.int64).reshape(-1, 3)
    return Frames(table[:, 0], table[:, 1], table[:, 2], damaged)


def contents(path: pathlib.Path, frames: Frames) -> Iterator[bytes | None]:
    """The data of each record in turn; None where it does not match its checksum."""
    done = 0
    if not frames.damaged:  # TensorFlow's own reader is ten times as fast as this one, but can't go on behind damage
        try:
            for record in _records(path):
                yield record
                done += 1
        except tf.errors.DataLossError:
            pass
    yield from _checked(path, frames, done)


def _records(path: pathlib.Path) -> Iterator[bytes]:
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says that it is old; what is new needs a session
    try:
        return tf.io.tf_record_iterator(str(path))
    finally:
        logger.setLevel(level)


def _checked(path: pathlib.Path, frames: Frames, start: int) -> Iterator[bytes | None]:
    """The same from record `start` on, by this file's own means."""
    begins = frames.offsets + _HEADER
    data = np.frombuffer(_mapped(path) or bytes(1), np.uint8)
    while start < len(begins):
        room = np.maximum.accumulate(frames.lengths[start:]) * np.arange(1, len(begins) - start + 1)  # the longest, so many times
        stop = start + max(int(np.searchsorted(room, _CHECKED, side='right')), 1)
        rows = [data[begin : begin + length] for begin, length in zip(begins[start:stop], frames.lengths[start:stop], strict=True)]
        stored = [_number(data[begin + len(row) :][:_FOOTER]) for begin, row in zip(begins[start:stop], rows, strict=True)]
        for row, whole in zip(rows, _masked(checksums(rows)) == stored, strict=True):
            yield row.tobytes() if whole else None
        start = stop


def checksums(rows: Sequence[np.ndarray]) -> np.ndarray:
    """CRC-32C of each row of bytes, as uint32; 4 bytes of all rows at a time.

    The register starts as all ones, which is the same as a register of zeros and the row's first 4 bytes inverted; and
    zeros before a row don't change a register of zeros, so rows of all lengths can end together.
    """
    width = -(-max(map(len, rows), default=0) // 4) * 4
    words = np.zeros([len(rows), width], np.uint8)
    for line, row in zip(words, rows, strict=True):
        line[width - len(row) :] = row
        line[width - len(row) :][:4] ^= 0xFF
    low, high = _tables()
    register = np.zeros(len(rows), np.uint32)
    for column in np.ascontiguousarray(words.view('<u4').T):
        register = register ^ column
        register = low[register & 0xFFFF] ^ high[register >> 16]
    for index, row in enumerate(rows):
        if len(row) < 4:
            register[index] = _short(row.tobytes())
    return ~register


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
    with path.open('rb') as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b''


def _length(data: mmap.mmap | bytes, position: int) -> int | None:
    """The length in the header at `position`; None where it does not match its checksum."""
    if position + _HEADER > len(data):
        return None
    length, stored = struct.unpack_from('<QI', data, position)
    return length if _mask(~_short(data[position : position + 8]) & 0xFFFFFFFF) == stored else None


def _next(data: mmap.mmap | bytes, position: int) -> int:
    """The first position from `position` on with a header that matches its checksum and lies in the file; its end if there is none."""
    while position + _HEADER <= len(data):
        part = np.frombuffer(data[position : position + _SEARCHED + _HEADER - 1], np.uint8)
        places = len(part) - _HEADER + 1
        register = np.full(places, 0xFFFFFFFF, np.uint32)
        for byte in range(8):
            register = _table()[(register ^ part[byte : byte + places]) & 0xFF] ^ (register >> 8)
        stored = sum(part[8 + byte : 8 + byte + places].astype(np.uint32) << np.uint32(8 * byte) for byte in range(4))
        for place in np.flatnonzero(_masked(~register) == stored):
            length = _length(data, position + int(place))
            if length is not None and position + place + _HEADER + length + _FOOTER <= len(data):
                return position + int(place)
        position += places
    return len(data)


def _number(data: np.ndarray) -> int:
    return int.from_bytes(data.tobytes(), 'little')


def _short(data: bytes) -> int:
    """The register after a few bytes."""
    table, register = _table_entries(), 0xFFFFFFFF
    for byte in data:
        register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def _mask(value: int) -> int:
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _masked(values: np.ndarray) -> np.ndarray:
    return (values >> np.uint32(15) | values << np.uint32(17)) + np.uint32(0xA282EAD8)


@functools.cache
def _table() -> np.ndarray:
    """What a byte does to the register: uint32 [256]."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ _POLYNOMIAL, values >> 1)
    return values


@functools.cache
def _table_entries() -> tuple[int, ...]:
    return tuple(_table().tolist())


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """What 4 bytes do to the register, for its lower and its upper half: uint32 [65536] each."""
    both = []
    for shift in (0, 16):
        register = np.arange(1 << 16, dtype=np.uint32) << np.uint32(shift)
        for _ in range(4):
            register = _table()[register & 0xFF] ^ (register >> 8)
        both.append(register)
    return both[0], both[1]
