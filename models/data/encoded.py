"""Encoded images (JPEG, PNG, ...) in files of their own or as records of TFRecord files, read by number.

Only the index is in memory: where each image is. The order of a pass is one of its numbers, so a position holds no images.
An image that can't be read or decoded is an error that names its file and record.
"""

import dataclasses
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from . import headers, splits

_AT_ONCE = 16  # images being read at a time
_TRIED = 100  # images looked at for their size
_SHOWN = 20  # bad records that are named in the log
_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """Where the images of one split are.

    Attributes:
      paths: files.
      file: int64 [n], place in `paths` of each image.
      labels: int64 [n]; None where the records hold them.
      offsets: int64 [n], first byte of each image's record; None where each file is one image.
      records: int64 [n], number of each record in its file; None as `offsets`.
      keys: features of a record that hold the image and the label.
    """

    paths: tuple[str, ...]
    file: np.ndarray
    labels: np.ndarray | None = None
    offsets: np.ndarray | None = None
    records: np.ndarray | None = None
    keys: tuple[str, str] = ('', '')

    def __len__(self) -> int:
        return len(self.file)

    def name(self, number: int) -> str:
        """What an image is called in messages."""
        path = self.paths[self.file[number]]
        return path if self.records is None else f'{path}: record {self.records[number]}'

    def without(self, numbers: Mapping[int, str]) -> 'Index':
        """The index of the other images."""
        kept = np.setdiff1d(np.arange(len(self)), list(numbers))
        arrays = {key: value[kept] for key, value in vars(self).items() if isinstance(value, np.ndarray)}
        return dataclasses.replace(self, **arrays)


@dataclasses.dataclass(frozen=True)
class Form:
    """What images are made into.

    Attributes:
      shape: height, width and channels of an example.
      classes: number of classes; labels are below it.
      fitted: whether images of other sizes are scaled and cropped to `shape`; else they are an error.
    """

    shape: tuple[int, int, int]
    classes: int
    fitted: bool


def check_sizes(size: int | None, channels: int) -> None:
    """Raises ValueError for sizes that no image has."""
    if size is not None and size < 1:
        raise ValueError(f'Images need --data_args=size=... of 1 or more, got {size}.')
    if channels not in (1, 3):
        raise ValueError(f'Images need --data_args=channels=3 (colours) or 1 (grey), got {channels}.')


def shape(images: Iterable[tuple[str, bytes]], size: int | None, channels: int) -> tuple[int, int, int]:
    """The shape of all examples: as asked for, or as the first of some (name, encoded image) has it whose size can be told."""
    if size is not None:
        return size, size, channels
    names = []
    for name, content in itertools.islice(images, _TRIED):
        names.append(name)
        found = headers.size(content)
        if found is not None:
            return (*found, channels)
    raise ValueError(f'{names[:1]}: expected a PNG, JPEG, GIF or BMP image, whose size can be told; give --data_args=size=...')


def dataset(index: Index, form: Form, *, seed: int | None) -> tf.data.Dataset:
    """Examples {'image': float32 [H, W, C] in [-1, 1], 'label': int64 []}, shuffled by `seed`; None = in order."""
    read = reader(index, form)
    name = _namer(index)

    @splits.as_it_is
    def one(number: tf.Tensor) -> tf.data.Dataset:
        failed = (number, tf.zeros([0, 0, form.shape[2]], tf.uint8), tf.constant(-1, tf.int64))
        return read(number).ignore_errors().concatenate(tf.data.Dataset.from_tensors(failed)).take(1)

    @splits.as_it_is
    def example(number: tf.Tensor, image: tf.Tensor, label: tf.Tensor) -> dict[str, tf.Tensor]:
        in_range = tf.logical_and(label >= 0, label < form.classes)
        good = tf.logical_and(tf.reduce_all(tf.equal(tf.shape(image), form.shape)), in_range)
        with tf.control_dependencies([tf.debugging.Assert(good, [_complaint(name(number), image, label, form)])]):
            return {'image': splits.scaled(tf.ensure_shape(image, form.shape)), 'label': tf.identity(label)}

    numbers = splits.order(len(index), seed=seed)
    found = numbers.interleave(one, cycle_length=_AT_ONCE, block_length=1, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return found.map(example).apply(tf.data.experimental.assert_cardinality(len(index)))


def faults(indices: Sequence[Index], form: Form) -> list[dict[int, str]]:
    """Reads and decodes every image: of each index, number -> what is wrong, for those that can't be used.

    A process of its own does it, since TensorFlow's first session decides how many threads all later ones have.

    Raises:
      RuntimeError: that process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, found = os.path.join(folder, 'given'), os.path.join(folder, 'found')
        with open(given, 'wb') as file:
            pickle.dump((indices, form), file)
        settings = {**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'TF_CPP_MIN_LOG_LEVEL': '3', 'PYTHONPATH': str(_ROOT)}
        # -P: a folder `models` in the current one is somebody else's.
        command = [sys.executable, '-P', '-m', f'{__package__}.trial', given, found]
        done = subprocess.run(command, env=settings, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f'Reading all images once failed with exit code {done.returncode}: {done.stderr[-2000:]}')
        with open(found, 'rb') as file:
            return pickle.load(file)


def checked(indices: Sequence[Index], form: Form, bad: Mapping[str, str], *, most: int) -> tuple[list[Index], tuple[str, ...]]:
    """Leaves out what can't be used, if that is not too much.

    Args:
      indices: of the splits.
      form: what images are made into.
      bad: name -> what is wrong, for what is already known and not in the indices.
      most: how many images may be left out; above 0 every image is read and decoded once to find them.

    Returns:
      the indices of what is left, and the names of what is not.

    Raises:
      ValueError: there are more bad images, or a split has no good one.
    """
    bad, left = dict(bad), list(indices)
    for place, found in enumerate(faults(indices, form) if most else ()):
        bad.update({indices[place].name(number): reason for number, reason in found.items()})
        left[place] = indices[place].without(found)
    refuse(bad, most=most)
    for name, reason in list(bad.items())[:_SHOWN]:
        logging.warning('Left out %s: %s.', name, reason)
    if bad:
        logging.warning('Left out %d of %d images, at most %d by --max_bad_records.', len(bad), sum(map(len, left)) + len(bad), most)
    for before, after in zip(indices, left, strict=True):
        if not len(after):
            raise ValueError(f'Expected good images in {before.paths[:1]} and its like, found none; look at these files.')
    return left, tuple(bad)


def refuse(bad: Mapping[str, str], *, most: int) -> None:
    """Raises ValueError, which names the first, where more images are bad than may be left out."""
    if len(bad) > most:
        name, reason = next(iter(bad.items()))
        others = f' So are {len(bad) - 1} more.' if len(bad) > 1 else ''
        remedy = f'Restore the file, or leave bad ones out with --max_bad_records={len(bad)} or more.'
        raise ValueError(f'{name} is bad: {reason}.{others} {remedy}')


def misfit(shape: Sequence[int], label: int, form: Form) -> str | None:
    """Why an image of this shape and label can't be an example, or None."""
    if tuple(shape) != form.shape:
        return f'it is {shape[0]} x {shape[1]} pixels, expected {form.shape[0]} x {form.shape[1]}; --data_args=size=... makes all alike'
    return None if 0 <= label < form.classes else f'its label is {label}, expected 0..{form.classes - 1}'


def reader(index: Index, form: Form) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """A function from a number to a dataset of (number, image uint8 [h, w, C], label), of one element or of an error."""
    paths, files = tf.constant(index.paths), tf.constant(index.file)
    labels = tf.constant(np.zeros([0], np.int64) if index.labels is None else index.labels)
    offsets = tf.constant(np.zeros([0], np.int64) if index.offsets is None else index.offsets)

    def whole_file(number: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(number).map(
            lambda number: (number, _image(tf.io.read_file(paths[files[number]]), form), labels[number])
        )

    def record(number: tf.Tensor) -> tf.data.Dataset:
        no_bytes = tf.constant(0, tf.int64)  # no buffer: it would be filled for each record anew
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=[paths[files[number]]], compression_type='', buffer_size=no_bytes, byte_offsets=[offsets[number]]
        )
        read = tf.data.experimental.from_variant(records, tf.TensorSpec([], tf.string))
        # zip goes on behind an error, and so makes one try only; ignore_errors would open a missing file for ever.
        return tf.data.Dataset.zip((tf.data.Dataset.range(1), read)).map(lambda _, content: parsed(content))

    def parsed(content: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        kinds = {index.keys[0]: tf.io.FixedLenFeature([], tf.string), index.keys[1]: tf.io.FixedLenFeature([], tf.int64)}
        found = tf.io.parse_single_example(content, kinds)
        return _image(found[index.keys[0]], form), found[index.keys[1]]

    if index.offsets is None:
        return whole_file
    return lambda number: record(number).map(lambda image, label: (number, image, label))


def _image(content: tf.Tensor, form: Form) -> tf.Tensor:
    """uint8 [h, w, C]; where it is fitted, the shorter side is scaled to the form and the middle cut out."""
    image = tf.io.decode_image(content, channels=form.shape[2], expand_animations=False)
    image = tf.ensure_shape(image, [None, None, form.shape[2]])
    if not form.fitted:
        return image
    wanted, size = tf.constant(form.shape[:2], tf.float32), tf.cast(tf.shape(image)[:2], tf.float32)
    scaled = tf.maximum(tf.cast(tf.round(size * tf.reduce_max(wanted / size)), tf.int32), form.shape[:2])
    image = tf.compat.v2.image.resize(image, scaled, antialias=True)
    first = (scaled - form.shape[:2]) // 2
    image = tf.slice(image, tf.concat([first, [0]], 0), form.shape)
    return tf.cast(tf.clip_by_value(tf.round(image), 0.0, 255.0), tf.uint8)


def _namer(index: Index) -> Callable[[tf.Tensor], tf.Tensor]:
    """`Index.name` in a graph."""
    paths, files = tf.constant(index.paths), tf.constant(index.file)
    if index.records is None:
        return lambda number: paths[files[number]]
    records = tf.constant(index.records)
    return lambda number: tf.strings.join([paths[files[number]], ': record ', tf.strings.as_string(records[number])])


def _complaint(name: tf.Tensor, image: tf.Tensor, label: tf.Tensor, form: Form) -> tf.Tensor:
    """What is wrong with an example that is not of the form."""
    size = tf.strings.reduce_join(tf.strings.as_string(tf.shape(image)[:2]), separator=' x ')
    number = tf.strings.as_string(label)
    unread = 'cannot be read or decoded: it is damaged, or has changed since the start; --max_bad_records=1 looks for such at the start'
    reasons = tf.stack([
        tf.constant(unread),
        tf.strings.join(['has label ', number, f', expected 0..{form.classes - 1}']),
        tf.strings.join(['is ', size, f' pixels, expected {form.shape[0]} x {form.shape[1]}; --data_args=size=... makes all alike']),
    ])  # fmt: skip
    which = tf.where(tf.equal(tf.size(image), 0), 0, tf.where(label < form.classes, 2, 1))
    return tf.strings.join([name, ' ', reasons[which], '.'])
