"""Finding and reading dataset files, with errors that name the file and the way out."""

import dataclasses
import gzip
import pathlib
import zlib
from collections.abc import Sequence

import tensorflow.compat.v1 as tf


@dataclasses.dataclass(frozen=True)
class Content:
    """A file's bytes, uncompressed.

    Attributes:
      path: the file.
      data: all that could be read.
      damage: what ended the reading early, '' where the file is whole as far as its container tells.
    """

    path: pathlib.Path
    data: bytes
    damage: str = ''


def folder(data_dir: str | None, dataset: str, *, holds: str) -> pathlib.Path:
    """`data_dir` as a path; `holds` says what belongs there.

    Raises:
      ValueError: no folder was given.
      FileNotFoundError: it does not exist or is a file.
    """
    if data_dir is None:
        raise ValueError(f'Dataset {dataset!r} reads files, got no folder; give --data_dir, a folder with {holds}.')
    path = pathlib.Path(data_dir).expanduser()
    if not path.is_dir():
        found = 'a file' if path.exists() else 'nothing there'
        raise FileNotFoundError(f'Dataset {dataset!r} expected a folder at {path}, found {found}; --data_dir is a folder with {holds}.')
    return path


def find(place: pathlib.Path, names: Sequence[str], *, remedy: str) -> pathlib.Path:
    """The first of `names` that is a file in `place`.

    Raises:
      FileNotFoundError: none is.
    """
    for name in names:
        if (place / name).is_file():
            return place / name
    raise FileNotFoundError(f'Expected {" or ".join(names)} in {place}, found none; {remedy}.')


def read(path: pathlib.Path) -> Content:
    """All of a file; a name that ends in .gz is uncompressed. A cut or broken stream is told by `damage`."""
    if path.suffix != '.gz':
        return Content(path, path.read_bytes())
    data = bytearray()
    with gzip.open(path) as stream:
        try:
            while chunk := stream.read1(1 << 20):  # read1 keeps what came before the damage
                data += chunk
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            return Content(path, bytes(data), f'{type(error).__name__}: {error}'.rstrip('.'))
    return Content(path, bytes(data))


def check(content: Content, good: bool, *, expected: str, remedy: str = 'fetch this file again') -> None:
    """Raises ValueError with the file's name unless `good` and undamaged; `expected` says how many bytes."""
    if not good or content.damage:
        damage = f' before the stream broke ({content.damage})' if content.damage else ''
        packed = ' uncompressed' if content.path.suffix == '.gz' else ''
        raise ValueError(f'{content.path}: expected {expected}{packed}, got {len(content.data)} bytes{damage}; {remedy}.')


def check_labels(path: pathlib.Path, largest: int, classes: int) -> None:
    """Raises ValueError where a label is no class."""
    if largest >= classes:
        raise ValueError(f'{path}: expected labels 0..{classes - 1}, got {largest}; it is damaged or not the file of this dataset.')


def in_graph(path: str | pathlib.Path, *, record: int, skip: int = 0) -> tf.Tensor:
    """A file of records as uint8 [records, record], read once by each iterator whose dataset uses it, and held in memory.

    Args:
      path: a name that ends in .gz is uncompressed.
      record: bytes of a record.
      skip: bytes before the first one.
    """
    with tf.name_scope('file'):
        content = tf.io.read_file(str(path))
        if str(path).endswith('.gz'):
            content = tf.io.decode_compressed(content, 'GZIP')
        return tf.reshape(tf.io.decode_raw(content, tf.uint8)[skip:], [-1, record])
