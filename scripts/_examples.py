"""Examples in files, one after the other, as name -> value."""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

_IMAGES = ('.png', '.jpg', '.jpeg', '.bmp', '.gif')


def read(files: Sequence[str], feature: str) -> Iterator[Mapping[str, Any]]:
    """The examples of the files in their order.

    Args:
      files: .npz, .npy, .jsonl or images.
      feature: the name of what an .npy file or an image holds.

    Raises:
      ValueError: a file is of another kind, or damaged; it is named, with the line where there is one.
      FileNotFoundError: there is no such file.
    """
    kinds = {'.npz': _arrays, '.npy': _array, '.jsonl': _lines, **dict.fromkeys(_IMAGES, _image)}
    for path in files:
        kind = os.path.splitext(path)[1].lower()
        if kind not in kinds:
            raise ValueError(f'--files={path}: expected one of {", ".join(kinds)}; give it the ending of what it is.')
        if not os.path.exists(path):
            raise FileNotFoundError(f'--files={path}: there is no such file in {os.getcwd()}.')
        try:
            yield from kinds[kind](path, feature)
        except (zipfile.BadZipFile, EOFError, OSError, KeyError, tf.errors.OpError) as error:
            raise ValueError(f'--files={path} can not be read ({str(error).splitlines()[0]}); make it again.') from error


def _arrays(path: str, feature: str) -> Iterator[Mapping[str, Any]]:
    found = _load(path)
    if isinstance(found, np.ndarray):
        raise ValueError(f'--files={path} holds one array, without a name; give it the ending .npy.')
    with found:
        arrays = {name: found[name] for name in found.files}
    counts = {name: len(array) for name, array in arrays.items() if array.ndim}
    if len(set(counts.values())) != 1 or len(counts) != len(arrays):
        shapes = ', '.join(f'{name} {list(array.shape)}' for name, array in arrays.items())
        raise ValueError(f'--files={path}: the first axis of all arrays must be the example, got {shapes or "none"}; cut them alike.')
    for row in range(next(iter(counts.values()))):
        yield {name: array[row] for name, array in arrays.items()}


def _array(path: str, feature: str) -> Iterator[Mapping[str, Any]]:
    for value in _load(path):
        yield {feature: value}


def _load(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:  # it takes what it does not know for Python objects
        raise ValueError(f'--files={path} can not be read as an array of numbers; make it again.') from error


def _lines(path: str, feature: str) -> Iterator[Mapping[str, Any]]:
    with open(path, encoding='utf-8') as file:
        for number, line in enumerate(file, start=1):
            try:
                example = json.loads(line)
            except ValueError as error:
                raise ValueError(f'--files={path}: line {number} is no JSON ({error}); correct it.') from error
            if not isinstance(example, dict):
                raise ValueError(f'--files={path}: line {number} must be an object of features, got {line.strip()[:40]!r}.')
            yield example


def _image(path: str, feature: str) -> Iterator[Mapping[str, Any]]:
    with open(path, 'rb') as file, tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
        pixels = tf.io.decode_image(file.read(), expand_animations=False)
        value = session.run(tf.image.convert_image_dtype(pixels, tf.float32))
    yield {feature: value}  # graph and session are not its taker's
