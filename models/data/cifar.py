"""CIFAR-10 and CIFAR-100 in their binary version (A. Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html).

A record is the label byte (CIFAR-100: the coarse, then the fine label) and 3 x 32 x 32 pixels, channels first.
"""

import dataclasses
import functools
import pathlib

import numpy as np
import tensorflow.compat.v1 as tf

from . import files, splits

_SHAPE = (32, 32, 3)
_PIXELS = 32 * 32 * 3


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How one of the two sets is stored; `labels` is the number of label bytes, of which the last counts."""

    name: str
    archive: str
    unpacked: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    classes: int

    @property
    def record(self) -> int:
        return self.labels + _PIXELS


_CIFAR10 = _Layout(
    name='cifar10',
    archive='cifar-10-binary.tar.gz',
    unpacked='cifar-10-batches-bin',
    train=tuple(f'data_batch_{number}.bin' for number in range(1, 6)),
    test=('test_batch.bin',),
    labels=1,
    classes=10,
)
_CIFAR100 = _Layout(
    name='cifar100',
    archive='cifar-100-binary.tar.gz',
    unpacked='cifar-100-binary',
    train=('train.bin',),
    test=('test.bin',),
    labels=2,
    classes=100,
)


def cifar10(data_dir: str | None, *, seed: int = 1) -> splits.Splits:
    """CIFAR-10; images are in [-1, 1].

    Args:
      data_dir: folder with data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or the folder that holds their
        cifar-10-batches-bin.
      seed: of the training examples' order.

    Raises:
      ValueError, FileNotFoundError: a file is missing, cut, or holds labels that are no class.
    """
    return _splits(_CIFAR10, data_dir, seed=seed)


def cifar100(data_dir: str | None, *, seed: int = 1) -> splits.Splits:
    """CIFAR-100 with its 100 fine labels; images are in [-1, 1].

    Args:
      data_dir: folder with train.bin and test.bin, or the folder that holds their cifar-100-binary.
      seed: of the training examples' order.

    Raises:
      ValueError, FileNotFoundError: a file is missing, cut, or holds labels that are no class.
    """
    return _splits(_CIFAR100, data_dir, seed=seed)


def _splits(layout: _Layout, data_dir: str | None, *, seed: int) -> splits.Splits:
    place = files.folder(data_dir, layout.name, holds=f'the .bin files of {layout.archive}')
    if (place / layout.unpacked).is_dir():
        place = place / layout.unpacked
    train, train_examples = _checked(layout, place, layout.train)
    test, test_examples = _checked(layout, place, layout.test)
    return splits.Splits(
        train=functools.partial(_dataset, train, layout.labels, examples=train_examples, seed=seed),
        test=functools.partial(_dataset, test, layout.labels, examples=test_examples, seed=None),
        shape=_SHAPE,
        classes=layout.classes,
        train_examples=train_examples,
        test_examples=test_examples,
    )


def _checked(layout: _Layout, place: pathlib.Path, names: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The files' paths and how many records they have together."""
    remedy = f'unpack {layout.archive} there (tar -xzf {layout.archive})'
    paths, examples = [], 0
    for name in names:
        content = files.read(files.find(place, [name], remedy=remedy))
        size = len(content.data)
        good = size > 0 and size % layout.record == 0
        files.check(content, good, expected=f'a multiple of {layout.record} bytes above 0', remedy=remedy)
        labels = np.frombuffer(content.data, np.uint8)[layout.labels - 1 :: layout.record]
        files.check_labels(content.path, int(labels.max()), layout.classes)
        paths.append(str(content.path))
        examples += size // layout.record
    return tuple(paths), examples


def _dataset(paths: tuple[str, ...], labels: int, *, examples: int, seed: int | None) -> tf.data.Dataset:
    records = tf.concat([files.in_graph(path, record=labels + _PIXELS) for path in paths], 0)

    def make(numbers: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.gather(records, numbers)
        pixels = splits.scaled(tf.reshape(values[:, labels:], [-1, 3, 32, 32]))
        # Floats are moved: oneDNN complains of bytes where the processor has no AVX-512, and takes longer for them.
        return {'image': tf.transpose(pixels, [0, 2, 3, 1]), 'label': tf.cast(values[:, labels - 1], tf.int64)}

    return splits.made(make, examples, seed=seed)
