"""Models and datasets by name: the zoo's, or a user's own as package.module:function."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from absl import flags

from scripts import _flags, _own, models
from scripts.models import data
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
      record: values of flags with which the same is found from any folder.
    """

    model: structs.Model
    dataset: structs.Dataset
    eval_dataset: structs.Dataset | None
    recipe: Mapping[str, Any]
    left_out: tuple[str, ...] = ()
    record: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)


def load(values: flags.FlagValues) -> Work:
    """Finds what --model, --model_args, --dataset, --eval_dataset, --data_dir and --data_args name.

    A model of the zoo that takes `classes` gets the dataset's number of them unless --model_args says otherwise.

    Raises:
      ValueError, FileNotFoundError: something is unknown, missing, damaged or takes other arguments.
    """
    _own.prefer(values.code_dir)
    args = _flags.arguments(values, 'model_args')
    datasets = _datasets(values)
    name = values.model
    if _own.is_own('--model', name):
        model = _own.bound(_own.find('--model', name, values.code_dir), name, args)
    else:
        sizes = [field.name for field in dataclasses.fields(models.MODELS[name][1])] if name in models.MODELS else []
        if datasets.classes is not None and 'classes' in sizes:
            args.setdefault('classes', datasets.classes)
        model = models.build(name, **args)
    record = {'code_dir': _own.folders((values.eval_dataset, values.dataset, name))}
    if values.data_dir is not None:
        record['data_dir'] = [os.path.abspath(values.data_dir)]
    return Work(model, datasets.train, datasets.test, models.RECIPES.get(name, {}), datasets.left_out, record)


@dataclasses.dataclass(frozen=True)
class _Datasets:
    """What is trained and evaluated on; `classes` is None where only the user knows it."""

    train: structs.Dataset
    test: structs.Dataset | None
    classes: int | None = None
    left_out: tuple[str, ...] = ()


def _datasets(values: flags.FlagValues) -> _Datasets:
    name, eval_name = values.dataset, values.eval_dataset
    own = _own.is_own('--dataset', name)
    if own:
        for flag in ('data_dir', 'data_args', 'max_bad_records'):
            if values[flag].value:
                raise ValueError(f'--{flag} is for datasets of the zoo, got it with --dataset={name}; let your function see to that.')
        found = _Datasets(_own.find('--dataset', name, values.code_dir), None)
    else:
        splits = _zoo_splits(values, name)
        found = _Datasets(splits.train, splits.test, splits.classes, splits.left_out)
    if eval_name is None or (not own and eval_name == name):
        return found
    if eval_name == 'none':
        return dataclasses.replace(found, test=None)
    is_own = _own.is_own('--eval_dataset', eval_name)
    return dataclasses.replace(
        found, test=_own.find('--eval_dataset', eval_name, values.code_dir) if is_own else _zoo_splits(values, eval_name).test
    )


def _zoo_splits(values: flags.FlagValues, name: str) -> data.Splits:
    args = _flags.arguments(values, 'data_args')
    return data.load(name, values.data_dir, seed=values.seed, max_bad_records=values.max_bad_records, **args)
