"""Models and datasets by name: the zoo's, or a user's own as package.module:function."""

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import flags

import models
from models import data
from scripts import _flags
from towers import structs


@dataclasses.dataclass(frozen=True)
class Work:
    """What the flags ask to be trained or evaluated; all of it can be pickled, for an evaluator in a process of its own.

    Attributes:
      model: function (batch, *, training) -> ModelOutput.
      dataset: makes the training dataset.
      eval_dataset: makes the evaluation dataset; None = nothing is evaluated.
      recipe: fields of a Config that suit a model of the zoo.
      left_out: names of the records that --max_bad_records leaves out.
    """

    model: structs.Model
    dataset: structs.Dataset
    eval_dataset: structs.Dataset | None
    recipe: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


def load(values: flags.FlagValues) -> Work:
    """Finds what --model, --model_args, --dataset, --eval_dataset, --data_dir and --data_args name.

    A model of the zoo that takes `classes` gets the dataset's number of them unless --model_args says otherwise.

    Raises:
      ValueError, FileNotFoundError: something is unknown, missing, damaged or takes other arguments.
    """
    args = _flags.arguments(values, 'model_args')
    datasets = _datasets(values)
    name = values.model
    if _is_own('--model', name):
        model = _bound(find('--model', name), name, args)
    else:
        sizes = [field.name for field in dataclasses.fields(models.MODELS[name][1])] if name in models.MODELS else []
        if datasets.classes is not None and 'classes' in sizes:
            args.setdefault('classes', datasets.classes)
        model = models.build(name, **args)
    return Work(model, datasets.train, datasets.test, models.RECIPES.get(name, {}), datasets.left_out)


def find(flag: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the current folder is on the path.

    Raises:
      ValueError: no such module or function; the message says what was looked for and where.
    """
    module_name, _, attribute = name.partition(':')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and (module_name == error.name or module_name.startswith(f'{error.name}.'))):
            raise  # the module is there and itself imports what is not
        missing = '' if error.name == module_name else f' (no {error.name!r})'
        raise ValueError(f'{flag}={name}: no module {module_name!r}{missing} in {os.getcwd()} or on the Python path.') from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        near = difflib.get_close_matches(attribute, public, n=2) or public[:5]
        hint = f'; it has {", ".join(near)}' if near else ''
        raise ValueError(f'{flag}={name}: no function {attribute!r} in {module.__file__}{hint}.')
    return function


@dataclasses.dataclass(frozen=True)
class _Datasets:
    """What is trained and evaluated on; `classes` is None where only the user knows it."""

    train: structs.Dataset
    test: structs.Dataset | None
    classes: int | None = None
    left_out: tuple[str, ...] = ()


def _datasets(values: flags.FlagValues) -> _Datasets:
    name, eval_name = values.dataset, values.eval_dataset
    own = _is_own('--dataset', name)
    if own:
        for flag in ('data_dir', 'data_args', 'max_bad_records'):
            if values[flag].value:
                raise ValueError(f'--{flag} is for datasets of the zoo, got it with --dataset={name}; let your function see to that.')
        found = _Datasets(find('--dataset', name), None)
    else:
        splits = _zoo_splits(values, name)
        found = _Datasets(splits.train, splits.test, splits.classes, splits.left_out)
    if eval_name is None or (not own and eval_name == name):
        return found
    if eval_name == 'none':
        return dataclasses.replace(found, test=None)
    is_own = _is_own('--eval_dataset', eval_name)
    return dataclasses.replace(found, test=find('--eval_dataset', eval_name) if is_own else _zoo_splits(values, eval_name).test)


def _zoo_splits(values: flags.FlagValues, name: str) -> data.Splits:
    args = _flags.arguments(values, 'data_args')
    return data.load(name, values.data_dir, seed=values.seed, max_bad_records=values.max_bad_records, **args)


def _is_own(flag: str, name: str) -> bool:
    if ':' not in name and '.' in name:
        raise ValueError(f'{flag}={name}: expected a name of the zoo or package.module:function; put a colon before the function.')
    return ':' in name


def _bound(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    """A user's model with its arguments, checked against its signature before anything is built."""
    signature = inspect.signature(function)
    try:
        signature.bind(tf.constant, training=True, **args)
    except TypeError as error:
        raise ValueError(
            f'--model={name}: {function.__name__}{signature} is called with (batch, training=..., and --model_args): {error}.'
        ) from error
    return functools.partial(function, **args)
