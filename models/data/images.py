"""Folders of images: one folder for each class, with JPEG, PNG, GIF, BMP, WebP or JPEG XL files in it."""

import functools
import os
import pathlib

import numpy as np

from . import encoded, files, splits

_ENDINGS = ('.jpg', '.jpeg', '.png', '.gif', '.bmp', '.webp', '.jxl')
_NAMES = {'train': ('train', 'training'), 'test': ('test', 'val', 'validation', 'valid')}


def load(data_dir: str | None, *, seed: int = 1, size: int | None = None, channels: int = 3, max_bad_records: int = 0) -> splits.Splits:
    """Images of any number of classes, whose labels are the places of their folders' names in the order of the alphabet.

    Args:
      data_dir: folder with train/<class>/*.jpg and test/<class>/*.jpg; test may be called val or validation.
      seed: of the training examples' order.
      size: images are scaled and cropped to size x size; None = all have the size of the first.
      channels: 3 for colours, 1 for grey.
      max_bad_records: so many images that can't be decoded are left out; every image is read once to find them.

    Raises:
      ValueError, FileNotFoundError: a folder is missing or empty, or more images are bad than may be left out.
    """
    encoded.check_sizes(size, channels)
    place = files.folder(data_dir, 'images', holds='train/<class>/ and test/<class>/, images in each')
    folders, missing = splits.found(_folder, place)
    classes = sorted(entry.name for entry in folders[0].iterdir() if entry.is_dir())
    bad: dict[str, str] = {}
    indices = [_index(folder, classes, bad) for folder in folders]
    encoded.refuse(bad, most=max_bad_records)
    first = ((path, pathlib.Path(path).read_bytes()) for path in indices[0].paths)
    form = encoded.Form(encoded.shape(first, size, channels), len(classes), size is not None)
    (train, *test), left_out = encoded.checked(indices, form, bad, most=max_bad_records)
    return splits.Splits(
        train=functools.partial(encoded.dataset, train, form, seed=seed),
        test=functools.partial(encoded.dataset, test[0], form, seed=None) if test else None,
        shape=form.shape,
        classes=form.classes,
        train_examples=len(train),
        test_examples=sum(map(len, test)),
        left_out=left_out,
        missing=missing,
    )


def _folder(place: pathlib.Path, split: str) -> pathlib.Path:
    names = _NAMES[split]
    for name in names:
        if (place / name).is_dir():
            return place / name
    raise FileNotFoundError(f'Expected a folder {" or ".join(names)} in {place}, found none; put a folder for each class there.')


def _index(folder: pathlib.Path, classes: list[str], bad: dict[str, str]) -> encoded.Index:
    """The images of a split; empty files go to `bad`."""
    unknown = sorted({entry.name for entry in folder.iterdir() if entry.is_dir()} - set(classes))
    if unknown:
        raise ValueError(f'{folder / unknown[0]}: expected classes that train has too ({", ".join(classes[:5])}, ...); add it there.')
    images = [(entry, label) for label, name in enumerate(classes) for entry in _entries(folder / name)]
    bad.update({entry.path: 'the file is empty' for entry, _ in images if not entry.stat().st_size})
    good = [(entry.path, label) for entry, label in images if entry.path not in bad]
    if not images:
        raise ValueError(f'{folder}: expected images ({", ".join(_ENDINGS)}) in folders for their classes, found none; put them there.')
    paths, labels = zip(*good, strict=True) if good else ((), ())
    return encoded.Index(paths, np.arange(len(paths)), labels=np.array(labels, np.int64))


def _entries(folder: pathlib.Path) -> list[os.DirEntry[str]]:
    """The images of one class, by name; the test set need not have all classes."""
    found = [entry for entry in os.scandir(folder) if entry.name.lower().endswith(_ENDINGS)] if folder.is_dir() else []
    return sorted((entry for entry in found if not entry.name.startswith('.')), key=lambda entry: entry.name)
