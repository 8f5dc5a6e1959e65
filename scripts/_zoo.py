"""Models and datasets by name: the zoo's, or a user's own as package.module:function."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from absl import flags

from scripts import _flags, _own, models
from scripts.models import data
from towers import structs
from towers.config import evaluation as eval_config


@dataclasses.dataclass(frozen=True)
class Work:
    """What the flags ask to be trained or evaluated; all of it can be pickled, for an evaluator in a process of its own.

    Attributes:
      model: function (batch, *, training) -> ModelOutput.
      dataset: makes the training dataset.
      eval_dataset: makes the evaluation dataset; None = nothing is evaluated.
      recipe: fields of a Config that suit a model of the zoo.
      evaluators: the datasets of several evaluators by their names; empty where there is but one.
      left_out: names of the records that --max_bad_records leaves out.
      record: values of flags with which the same is found from any folder.
    """

    model: structs.Model
    dataset: structs.Dataset
    eval_dataset: structs.Dataset | None
    recipe: Mapping[str, Any]
    evaluators: Mapping[str, structs.Dataset] = dataclasses.field(default_factory=dict)
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
    evaluators = _evaluators(values, datasets)
    named = [fields.get('dataset') for fields in eval_config.specs(values.evaluator).values()]
    record = {'code_dir': _own.folders((*named, values.eval_dataset, values.dataset, name))}
    if values.data_dir is not None:
        record['data_dir'] = [os.path.abspath(values.data_dir)]
    recipe = models.RECIPES.get(name, {})
    return Work(model, datasets.train, datasets.test, recipe, evaluators=evaluators, left_out=datasets.left_out, record=record)


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
        splits = _zoo_splits(values, name, with_test=eval_name in (None, name))
        found = _Datasets(splits.train, splits.test, splits.classes, splits.left_out)
    if eval_name is None or (not own and eval_name == name):
        return found
    return dataclasses.replace(found, test=None if eval_name == 'none' else _test('--eval_dataset', eval_name, values))


def _evaluators(values: flags.FlagValues, datasets: _Datasets) -> dict[str, structs.Dataset]:
    """The datasets of the evaluators that --evaluator declares, and of --evaluate's where it is given too."""
    specs = eval_config.specs(values.evaluator)
    found = {values.eval_name: datasets.test} if specs and values.evaluate else {}
    for name, fields in specs.items():
        chosen = fields.get('dataset', 'test')
        own = {'train': datasets.train, 'test': datasets.test}
        found[name] = own[chosen] if chosen in own else _test(f'--evaluator={name}:dataset', chosen, values)
    for name, dataset in found.items():
        if dataset is None:
            raise ValueError(f'The evaluator {name!r} has nothing to evaluate on, got no --eval_dataset; give one, or dataset=... to it.')
    return found


def _test(flag: str, name: str, values: flags.FlagValues) -> structs.Dataset | None:
    """The examples to evaluate on of a dataset of the zoo, or a user's."""
    if _own.is_own(flag, name):
        return _own.find(flag, name, values.code_dir)
    try:
        return _zoo_splits(values, name).test
    except ValueError as error:
        if name in data.DATASETS:
            raise
        raise ValueError(f'{flag}={name}: {error}') from None


def _zoo_splits(values: flags.FlagValues, name: str, *, with_test: bool = True) -> data.Splits:
    args = _flags.arguments(values, 'data_args')
    return data.load(name, values.data_dir, seed=values.seed, max_bad_records=values.max_bad_records, with_test=with_test, **args)
