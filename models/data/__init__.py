"""The zoo's datasets: single examples {'image': float32 [H, W, C], 'label': int64 []}, checked before anything trains.

`DATASETS` says which there are; `load` reads one. All pipelines are free of Python, of stateful maps and of unseeded
shuffles, so that their position can be saved and restored exactly.
"""

import inspect
from collections.abc import Callable
from typing import Any

from .. import names
from . import cifar, digits, idx, images, splits, synthetic, tfrecord

__all__ = ['DATASETS', 'Splits', 'load']

Splits = splits.Splits

DATASETS: dict[str, Callable[..., splits.Splits]] = {
    'digits': digits.load,
    'idx': idx.load,
    'cifar10': cifar.cifar10,
    'cifar100': cifar.cifar100,
    'images': images.load,
    'tfrecord': tfrecord.load,
    'synthetic': synthetic.load,
}


def load(
    name: str, data_dir: str | None = None, *, seed: int = 1, max_bad_records: int = 0, with_test: bool = True, **data_args: Any
) -> Splits:
    """The dataset `name` with its files checked.

    Args:
      name: a key of `DATASETS`.
      data_dir: folder with its files; `digits` and `synthetic` need none.
      seed: of the training examples' order.
      max_bad_records: so many records that can't be read are left out; above 0 for those datasets only that can do so.
      with_test: whether there have to be test examples; those of images and tfrecord may be missing.
      **data_args: further arguments of the dataset's function.

    Raises:
      ValueError: unknown dataset or argument, or a damaged file.
      FileNotFoundError: a missing file.
    """
    function = names.look_up('dataset', name, DATASETS)
    known = inspect.signature(function).parameters
    takes = {key: known[key].default for key in known if key not in ('data_dir', 'seed', 'max_bad_records')}
    for key in data_args:
        if key not in takes:
            listed = ', '.join(f'{k}={v!r}' for k, v in takes.items()) or 'none'
            raise ValueError(f'Dataset {name!r} has no argument {key!r}{names.hint(key, takes)} It takes {listed}.')
    if 'max_bad_records' in known:
        data_args['max_bad_records'] = max_bad_records
    elif max_bad_records:
        able = [each for each, made in DATASETS.items() if 'max_bad_records' in inspect.signature(made).parameters]
        raise ValueError(
            f'--max_bad_records is for the datasets {" and ".join(able)}, got it with {name!r}, which is good or bad as a whole.'
        )
    found = function(data_dir, seed=seed, **data_args)
    if with_test and found.missing:
        raise FileNotFoundError(found.missing)
    return found
