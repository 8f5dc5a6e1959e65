"""8 x 8 handwritten digits that the project carries; see README.md in this folder for their source and licence."""

import functools
import pathlib

import numpy as np
import tensorflow.compat.v1 as tf

from . import files, splits

_FILE = 'digits.csv.gz'
_COLUMNS, _CLASSES, _INK = 65, 10, 16  # 64 pixels of 0..16 and the label
_TEST_EVERY = 5


def load(data_dir: str | None = None, *, seed: int = 1) -> splits.Splits:
    """1,437 training and 360 test digits; rows 0, 5, 10, ... of the file are the test set, images are in [0, 1].

    Args:
      data_dir: folder with digits.csv.gz; None = the file that the project carries.
      seed: of the training examples' order.

    Raises:
      ValueError, FileNotFoundError: the file is missing or damaged.
    """
    holds = f'{_FILE} (none is needed: the project carries it)'
    place = pathlib.Path(__file__).parent if data_dir is None else files.folder(data_dir, 'digits', holds=holds)
    path = files.find(place, [_FILE], remedy='it is part of the project, in models/data; restore it from there')
    rows = _rows(path)
    test = len(rows[::_TEST_EVERY])
    return splits.Splits(
        train=functools.partial(_dataset, path, seed=seed),
        test=functools.partial(_dataset, path, seed=None),
        shape=(8, 8, 1),
        classes=_CLASSES,
        train_examples=len(rows) - test,
        test_examples=test,
    )


def _rows(path: pathlib.Path) -> np.ndarray:
    """The file as uint8 [rows, 65]."""
    content = files.read(path)
    lines = content.data.decode('ascii', 'replace').splitlines()
    whole = len(lines) >= _TEST_EVERY and content.data.endswith(b'\n')
    files.check(content, whole, expected=f'at least {_TEST_EVERY} whole lines')
    for number, line in enumerate(lines, start=1):
        values = line.split(',')
        if len(values) != _COLUMNS or not all(v.isdecimal() and int(v) <= _INK for v in values):
            raise ValueError(
                f'{path}: line {number}: expected {_COLUMNS} whole numbers of 0..{_INK}, got {line[:60]!r}; fetch this file again.'
            )
    rows = np.array([line.split(',') for line in lines], np.uint8)
    files.check_labels(path, int(rows[:, -1].max()), _CLASSES)
    return rows


def _dataset(path: pathlib.Path, *, seed: int | None) -> tf.data.Dataset:
    rows = _rows(path)
    is_test = np.arange(len(rows)) % _TEST_EVERY == 0
    bytes_ = tf.constant(rows[is_test] if seed is None else rows[~is_test])  # the graph's constant: 115 KB in all

    def make(numbers: tf.Tensor) -> dict[str, tf.Tensor]:
        chosen = tf.gather(bytes_, numbers)
        images = tf.cast(tf.reshape(chosen[:, :-1], [-1, 8, 8, 1]), tf.float32) / _INK
        return {'image': images, 'label': tf.cast(chosen[:, -1], tf.int64)}

    return splits.made(make, bytes_.shape[0], seed=seed)
