"""The zoo's datasets: single examples {'image': float32 [H, W, C], 'label': int64 []}, checked before anything trains.

`DATASETS` says which there are; `load` reads one. All pipelines are free of Python, of stateful maps and of unseeded
shuffles, so that their position can be saved and restored exactly.
"""

from collections.abc import Callable

from models import names
from models.data import cifar, digits, idx, splits, synthetic

__all__ = ['DATASETS', 'Splits', 'load']

Splits = splits.Splits

DATASETS: dict[str, Callable[..., splits.Splits]] = {
    'digits': digits.load,
    'idx': idx.load,
    'cifar10': cifar.cifar10,
    'cifar100': cifar.cifar100,
    'synthetic': synthetic.load,
}


def load(name: str, data_dir: str | None = None, *, seed: int = 1) -> Splits:
    """The dataset `name` with its files checked.

    Args:
      name: a key of `DATASETS`.
      data_dir: folder with its files; `digits` and `synthetic` need none.
      seed: of the training examples' order.

    Raises:
      ValueError: unknown dataset, or a damaged file.
      FileNotFoundError: a missing file.
    """
    return names.look_up('dataset', name, DATASETS)(data_dir, seed=seed)
