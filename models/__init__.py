"""The zoo: models as pure functions, each with one frozen dataclass of sizes.

    model(batch, *, training, hparams) -> towers.ModelOutput

`MODELS` says which there are; `build` binds one to its sizes. `models.data` holds the datasets. The zoo knows only
towers' public names and its own layers and losses; a model of yours needs nothing from here.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

import towers

from . import lenet, mlp, names, resnet, resnet50

__all__ = ['MODELS', 'RECIPES', 'build']

MODELS: dict[str, tuple[Callable[..., towers.ModelOutput], type[Any]]] = {
    'mlp': (mlp.model, mlp.Hparams),
    'lenet': (lenet.model, lenet.Hparams),
    'resnet20': (resnet.model, resnet.Hparams),
    'resnet56': (resnet.model, resnet.Hparams56),
    'resnet50': (resnet50.model, resnet50.Hparams),
}

# Fields of towers.Config that suit a model; commands take those that are not given, unless the optimizer is another.
RECIPES: dict[str, Mapping[str, Any]] = {
    'lenet': lenet.RECIPE,
    'resnet20': resnet.RECIPE,
    'resnet56': resnet.RECIPE,
    'resnet50': resnet50.RECIPE,
}


def build(name: str, **model_args: Any) -> Callable[..., towers.ModelOutput]:
    """The model `name` with its sizes bound: a picklable function `model(batch, *, training)`.

    Args:
      name: a key of `MODELS`.
      **model_args: fields of the model's dataclass of sizes; the others keep their defaults.

    Raises:
      ValueError: unknown model or argument, or a value of the wrong type or below 1 where a size is wanted.
    """
    function, hparams = names.look_up('model', name, MODELS)
    types = typing.get_type_hints(hparams)
    defaults = {field.name: field.default for field in dataclasses.fields(hparams)}
    for key, value in model_args.items():
        if key not in defaults:
            takes = ', '.join(f'{k}={v!r}' for k, v in defaults.items())
            raise ValueError(f'Model {name!r} has no argument {key!r}{names.hint(key, defaults)} It takes {takes}.')
        if not _fits(value, types[key]):
            raise ValueError(f'Model {name!r} wants {key} as {_WANTED[types[key]]}, got {value!r}; its default is {defaults[key]!r}.')
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in model_args.items()}
    return functools.partial(function, hparams=hparams(**values))


_WANTED = {
    bool: 'true or false',
    int: 'a whole number of at least 1',
    float: 'a number',
    tuple[int, ...]: 'a list of whole numbers of at least 1',
}


def _fits(value: Any, kind: Any) -> bool:
    if kind == tuple[int, ...]:
        return isinstance(value, tuple | list) and all(_fits(entry, int) for entry in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int) and value >= 1 if kind is int else isinstance(value, int | float)
