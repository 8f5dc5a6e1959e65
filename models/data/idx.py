"""Folders of IDX files, the format of MNIST and Fashion-MNIST (described at the MNIST page of Y. LeCun).

A file is a big-endian header, 2 zero bytes, the type (8 = unsigned byte), the number of axes and each axis' size as
int32, then the values row by row.
"""

import dataclasses
import functools
import math
import pathlib

import numpy as np
import tensorflow.compat.v1 as tf

from . import files, splits


@dataclasses.dataclass(frozen=True)
class _Pair:
    """One split: an images file and a labels file that belong together."""

    images: pathlib.Path
    labels: pathlib.Path
    examples: int
    size: tuple[int, int]


def load(data_dir: str | None, *, seed: int = 1, classes: int = 10) -> splits.Splits:
    """Grey images of any size from train-* and t10k-* files, plain or .gz; images are in [-1, 1].

    Args:
      data_dir: folder with {train,t10k}-{images-idx3,labels-idx1}-ubyte, each with or without .gz; a dot before `idx`
        is fine too.
      seed: of the training examples' order.
      classes: number of classes.

    Raises:
      ValueError, FileNotFoundError: a file is missing, cut, of another kind, or does not fit the others.
    """
    place = files.folder(data_dir, 'idx', holds='train-images-idx3-ubyte and three more, plain or .gz')
    train, test = (_pair(place, split, classes) for split in ('train', 't10k'))
    if train.size != test.size:
        raise ValueError(f'{test.images}: expected images of {train.size} as in {train.images}, got {test.size}; take both from one set.')
    return splits.Splits(
        train=functools.partial(_dataset, train, seed=seed),
        test=functools.partial(_dataset, test, seed=None),
        shape=(*train.size, 1),
        classes=classes,
        train_examples=train.examples,
        test_examples=test.examples,
    )


def _pair(place: pathlib.Path, split: str, classes: int) -> _Pair:
    images, (examples, height, width) = _read(place, f'{split}-images', axes=3)
    labels, (count,) = _read(place, f'{split}-labels', axes=1)
    if count != examples:
        raise ValueError(f'{labels.path}: expected {examples} labels as {images.path} has images, got {count}; take both from one set.')
    files.check_labels(labels.path, max(labels.data[_header(1) :]), classes)
    return _Pair(images.path, labels.path, examples, (height, width))


def _header(axes: int) -> int:
    return 4 + 4 * axes


def _read(place: pathlib.Path, stem: str, *, axes: int) -> tuple[files.Content, tuple[int, ...]]:
    """A file's whole content, checked, and the sizes of its axes."""
    names = [f'{stem}{mark}idx{axes}-ubyte{packed}' for packed in ('', '.gz') for mark in '-.']
    content = files.read(files.find(place, names, remedy='put the four files of the set there, with these names'))
    header = np.frombuffer(content.data[: _header(axes)], np.uint8)
    if len(header) < _header(axes):
        files.check(content, False, expected=f'a header of {_header(axes)} bytes and the values')
    magic, *sizes = (int(value) for value in header.view('>u4'))
    if magic != 0x800 + axes:
        raise ValueError(
            f'{content.path}: expected magic number 0x{0x800 + axes:08x} (unsigned bytes, axes: {axes}), got 0x{magic:08x};'
            ' it is another kind of file: fetch it again, or put the right one there.'
        )
    if min(sizes) < 1:
        raise ValueError(f'{content.path}: expected one example or more, got sizes {sizes} in the header; fetch this file again.')
    size = _header(axes) + math.prod(sizes)
    files.check(content, len(content.data) == size, expected=f'{size} bytes (sizes {sizes} in the header)')
    return content, tuple(sizes)


def _dataset(pair: _Pair, *, seed: int | None) -> tf.data.Dataset:
    images = files.in_graph(pair.images, skip=_header(3), record=math.prod(pair.size))
    labels = files.in_graph(pair.labels, skip=_header(1), record=1)

    def make(numbers: tf.Tensor) -> dict[str, tf.Tensor]:
        pixels = tf.reshape(tf.gather(images, numbers), [-1, *pair.size, 1])  # [n, H, W, 1]
        return {'image': splits.scaled(pixels), 'label': tf.cast(tf.gather(labels, numbers)[:, 0], tf.int64)}

    return splits.made(make, pair.examples, seed=seed)
