"""TFRecord files of encoded images, as TensorFlow's own converters write them.

A record is a tf.train.Example with the features image/encoded (bytes: JPEG, PNG, ...) and image/class/label (one
integer), as those for ImageNet and Flowers have them; image and label, as in TensorFlow Datasets, will do too.
"""

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import message

from . import encoded, files, framing, splits

_KEYS = (('image/encoded', 'image/class/label'), ('image', 'label'))
_SHARD = re.compile(r'^(.*)-(\d{5})-of-(\d{5})$')
_SPLITS = {'train': re.compile('train', re.IGNORECASE), 'test': re.compile('test|val', re.IGNORECASE)}


def load(
    data_dir: str | None,
    *,
    seed: int = 1,
    classes: int | None = None,
    size: int | None = None,
    max_bad_records: int = 0,
) -> splits.Splits:
    """Colour images from all files whose names hold `train`, and `test` or `validation`.

    Every record's length and place is checked before anything trains. What the records hold is checked then too where
    the number of classes isn't known or bad records may be left out, and otherwise when they are read.

    Args:
      data_dir: folder with *.tfrecord files or shards such as train-00000-of-00128.
      seed: of the training examples' order.
      classes: number of classes; None = the lines of labels.txt in the folder, or else the largest label and 1.
      size: images are scaled and cropped to size x size; None = all have the size of the first.
      max_bad_records: so many records that are damaged or can't be decoded are left out.

    Raises:
      ValueError, FileNotFoundError: a file or shard is missing, or more records are bad than may be left out.
    """
    encoded.check_sizes(size, 3)
    place = files.folder(data_dir, 'tfrecord', holds='.tfrecord files for train and for test or validation')
    if classes is None and (place / 'labels.txt').is_file():
        classes = len([line for line in (place / 'labels.txt').read_text(encoding='utf-8').splitlines() if line.strip()])
    bad: dict[str, str] = {}
    paths, missing = splits.found(_paths, place)
    found = [_frames(each, bad) for each in paths]
    encoded.refuse(bad, most=max_bad_records)
    keys = _keys(found[0])
    labels = [_labels(split, keys, bad) if classes is None or max_bad_records else None for split in found]
    encoded.refuse(bad, most=max_bad_records)
    if classes is None:
        classes = 1 + max(int(values.max(initial=0)) for split in labels for values in split or ())
    images = ((name, b''.join(features[keys[0]].bytes_list.value[:1])) for name, features in _examples(found[0]))
    form = encoded.Form(encoded.shape(images, size, 3), classes, size is not None)
    indices = [_index(split, values, keys) for split, values in zip(found, labels, strict=True)]
    (train, *test), left_out = encoded.checked(indices, form, bad, most=max_bad_records)
    return splits.Splits(
        train=functools.partial(encoded.dataset, train, form, seed=seed),
        test=functools.partial(encoded.dataset, test[0], form, seed=None) if test else None,
        shape=form.shape,
        classes=classes,
        train_examples=len(train),
        test_examples=sum(map(len, test)),
        left_out=left_out,
        missing=missing,
    )


_Files = list[tuple[pathlib.Path, framing.Frames]]


def _paths(place: pathlib.Path, split: str) -> list[pathlib.Path]:
    """The files of train or of test, all shards of a set among them."""
    names = sorted(path.name for path in place.iterdir() if path.is_file() and ('.tfrecord' in path.name or _SHARD.match(path.name)))
    mine = [name for name in names if _SPLITS[split].search(name)]
    if not mine:
        raise FileNotFoundError(f'Expected TFRecord files with {split!r} in their names in {place}, found {names[:3]}; put them there.')
    for stem, _, count in [match.groups() for match in map(_SHARD.match, mine) if match]:
        missing = [name for name in (f'{stem}-{number:05d}-of-{count}' for number in range(int(count))) if name not in mine]
        if missing:
            raise FileNotFoundError(f'Expected {count.lstrip("0")} shards {stem} in {place}, {missing[0]} is missing; fetch it again.')
    return [place / name for name in mine]


def _frames(paths: list[pathlib.Path], bad: dict[str, str]) -> _Files:
    """Where the records are; damaged frames go to `bad`."""
    found = [(path, framing.read(path)) for path in paths]
    bad.update({f'{path}: record {number}': reason for path, frames in found for number, reason in frames.damaged.items()})
    return found


def _examples(found: _Files) -> Iterator[tuple[str, Any]]:
    """Name and features of each whole record."""
    for path, frames in found:
        for number, content in zip(frames.numbers, framing.contents(path, frames), strict=True):
            features = _features(content)
            if features is not None:
                yield f'{path}: record {number}', features


def _keys(found: _Files) -> tuple[str, str]:
    """The names of the features that hold image and label, by the first record that has them."""
    names: list[str] = []
    for _, features in _examples(found):
        for keys in _KEYS:
            if set(keys).issubset(features):
                return keys
        names = names or sorted(features)
    raise ValueError(
        f'{found[0][0]}: expected records with the features {" and ".join(_KEYS[0])} (or {" and ".join(_KEYS[1])}), '
        f'found {names}; write them so, or give a dataset function of your own.'
    )


def _features(content: bytes | None) -> Any:
    """The features of a record by name; None where it is damaged."""
    try:
        return None if content is None else tf.train.Example.FromString(content).features.feature
    except message.DecodeError:
        return None


def _labels(found: _Files, keys: tuple[str, str], bad: dict[str, str]) -> list[np.ndarray]:
    """The labels of each file's records, -1 for bad ones, which go to `bad`; this reads all there is."""
    every = []
    for path, frames in found:
        labels = np.full(len(frames.numbers), -1, np.int64)
        for place, content in enumerate(framing.contents(path, frames)):
            problem, labels[place] = _label(content, keys)
            if problem:
                bad[f'{path}: record {frames.numbers[place]}'] = problem
        every.append(labels)
    return every


def _label(content: bytes | None, keys: tuple[str, str]) -> tuple[str | None, int]:
    """What is wrong with a record, and its label, -1 where something is."""
    if content is None:
        return 'its data does not match its checksum', -1
    features = _features(content)
    if features is None:
        return 'it is no tf.train.Example', -1
    missing = [key for key in keys if key not in features]
    if missing:
        return f'it has no feature {missing[0]}', -1
    values = features[keys[1]].int64_list.value
    if len(values) != 1 or values[0] < 0:
        return f'its label is {list(values)}, expected one number from 0 on', -1
    return None, values[0]


def _index(found: _Files, labels: list[np.ndarray] | None, keys: tuple[str, str]) -> encoded.Index:
    kept = [np.arange(len(frames.numbers)) for _, frames in found] if labels is None else [np.flatnonzero(each >= 0) for each in labels]
    return encoded.Index(
        tuple(str(path) for path, _ in found),
        np.repeat(np.arange(len(found)), [len(places) for places in kept]),
        offsets=np.concatenate([frames.offsets[places] for (_, frames), places in zip(found, kept, strict=True)]),
        records=np.concatenate([frames.numbers[places] for (_, frames), places in zip(found, kept, strict=True)]),
        keys=keys,
    )
