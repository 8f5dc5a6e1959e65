"""What a run is trained under, so that a resume can say whether it would mean something else.

Two kinds of facts: those that decide what a step means and which numbers it gives (the global batch, the optimizer, the
model), and those that only say how it was made (the strategy, the number of towers), in which a resume is free.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from towers import config as config_lib
from towers import structs

_FREE = ('strategy', 'towers', 'input_pipeline')  # the numbers are the same, but for the order of sums
_SHARD_EXAMPLES = 'shard_examples'
_NO_FLAGS = ('lr_scaling', 'epoch_examples', _SHARD_EXAMPLES, 'variables', 'operations', 'model', 'dataset')
_FEW = 16  # entries of a list that a message shows
# What a model computes with. What only arranges shapes differs between numbers of towers.
_COMPUTES = re.compile(
    r'.*(MatMul|Conv|Pool|Norm|CrossEntropy|LSTM|GRU|RNN).*|Einsum|ResourceGather|(Log)?Soft(max|plus|sign)|(Leaky)?Relu6?|S?Elu|Tanh|Sigmoid|Erf|LRN'
)


def of(
    config: config_lib.Config, step: structs.TrainStep, *, towers: int, total_steps: int | None, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """The facts as JSON values.

    Args:
      config: what was asked.
      step: the training step, which holds the variables and the input.
      towers: how many there are.
      total_steps: where the run ends; polynomial and cosine schedules end there too, unless `decay_over` says otherwise.
      functions: 'model', 'dataset' and, where the user brings one, 'optimizer'.
    """
    facts = {
        'strategy': config.strategy,
        'towers': towers,
        'input_pipeline': config.input_pipeline,
        'global_batch_size': config.examples_per_step(towers),
        'batch_norm': config.batch_norm,
        'seed': config.seed,
        'epoch_examples': step.input.epoch_examples,
        'input_shards': len(step.input.shards),
        **({_SHARD_EXAMPLES: step.input.shards} if step.input.shards else {}),
        'variables': _variables(step),
        'operations': _operations(step),
        **_optimizer(config, total_steps, own='optimizer' in functions),
        **{name: described(function) for name, function in functions.items()},
    }
    if config.lr_scaling != 'none':
        facts['lr_scaling'] = f'{config.lr_scaling} by {towers} towers'
    # The order and the size of a dataset are told by other facts, and its files may lie elsewhere today.
    facts['dataset'] = described(_innermost(functions['dataset']))
    return json.loads(json.dumps(facts))


def shard_examples(facts: Mapping[str, Any], config: config_lib.Config) -> Sequence[int] | None:
    """The examples of each shard under these facts; None where there are none, or others may be meant now."""
    found = facts.get(_SHARD_EXAMPLES)
    is_meant = found is not None and len(found) == config.input_shards and not {'dataset', _SHARD_EXAMPLES} & set(config.allow_changed)
    return found if is_meant else None


def require_same(now: Mapping[str, Any], before: Mapping[str, Any], config: config_lib.Config, *, place: str) -> None:
    """Refuses to go on under other facts than before, but for those that `config.allow_changed` names.

    Args:
      now: what `of` says today.
      before: what it said then; a fact that one of the two doesn't have is let be.
      config: `allow_changed`, and what the message's remedies depend on.
      place: the checkpoint to go on from; empty where there is none, so that only the names are looked at.

    Raises:
      ValueError: a fact has changed, or `allow_changed` names what isn't one.
    """
    fields = [field.name for field in dataclasses.fields(config_lib.OptimizerConfig)]
    known = sorted({*fields, *now} - set(_FREE))
    unknown = [name for name in config.allow_changed if name not in known]
    config_lib.require(not unknown, f'--allow_changed={",".join(unknown)} names no fact of a run; expected some of {", ".join(known)}.')
    changed = differing(now, before)
    accepted = [name for name in changed if name in config.allow_changed]
    refused = [name for name in changed if name not in config.allow_changed]
    if refused:
        remedies = ' '.join(remedy for remedy in (_remedy(name, before[name], config) for name in refused) if remedy)
        raise ValueError(
            f'Going on from {place} would change what this run is trained under: {_listed(refused, before, now)}. '
            + (f'As before: {remedies}. ' if remedies else '')
            + f'To accept it: --allow_changed={",".join(refused)}. To keep both: another --model_dir.'
        )
    if accepted:
        logging.warning('Going on from %s with changes that --allow_changed accepts: %s.', place, _listed(accepted, before, now))


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The facts that both have and that are not the same, but for those in which a resume is free."""
    return [name for name in now if name not in _FREE and name in before and before[name] != now[name]]


def described(value: Any) -> str:
    """A function as module:name, with what is bound to it, equal in every process.

    Fields of a dataclass at their default are left out, so that a new one changes nothing.
    """
    if isinstance(value, functools.partial):
        bound = [*map(described, value.args), *(f'{name}={described(part)}' for name, part in sorted(value.keywords.items()))]
        return f'{described(value.func)}({", ".join(bound)})'
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if not _is_default(getattr(value, field.name), field.default)]
        return f'{type(value).__name__}({", ".join(f"{field.name}={described(getattr(value, field.name))}" for field in fields)})'
    if isinstance(value, tuple | list):
        return f'({", ".join(map(described, value))})'
    if isinstance(value, Mapping):
        return f'({", ".join(f"{key}={described(part)}" for key, part in value.items())})'
    if isinstance(value, np.ndarray):
        return f'array {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}'
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    named = value if hasattr(value, '__qualname__') else type(value)
    return f'{_module(named)}:{named.__qualname__}'


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and described(value) == described(default)


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _module(named: Any) -> str:
    """Where something is defined; a script has the name of its file, as when it is imported."""
    if named.__module__ != '__main__':
        return named.__module__
    return pathlib.Path(getattr(sys.modules['__main__'], '__file__', None) or '__main__').stem


def _variables(step: structs.TrainStep) -> str:
    lines = [f'{name} {variable.dtype.base_dtype.name} {variable.shape}' for name, variable in sorted(step.saved.items())]
    digest = hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:8]
    return f'{len(lines)} with {sum(variable.shape.num_elements() or 0 for variable in step.saved.values())} values in all ({digest})'


def _operations(step: structs.TrainStep) -> str:
    """How many operations of each kind the model of one tower has."""
    [scope] = step.summary_prefixes
    found = [op for op in step.step.graph.get_operations() if op.name.startswith(scope) and '/gradients/' not in op.name]
    counts = collections.Counter(op.type for op in found if _COMPUTES.fullmatch(op.type))
    return ', '.join(f'{count} {kind}' for kind, count in sorted(counts.items())) or 'none of note'


def _optimizer(config: config_lib.Config, total_steps: int | None, *, own: bool) -> dict[str, Any]:
    """The fields of the optimizer's section that mean something here; of a user's `own` optimizer, those around it."""
    facts = {}
    for field in dataclasses.fields(config_lib.OptimizerConfig):
        chooser, choices = config_lib.ONLY_FOR.get(field.name, ('', ()))
        if not chooser or (getattr(config, chooser) in choices and not (own and chooser == 'optimizer')):
            facts[field.name] = getattr(config, field.name)
    if config.schedule == 'constant' and not config.warmup:
        del facts['schedule_unit']
    if 'decay_over' in facts:
        facts['decay_over'] = f'{total_steps} steps' if config.decay_over is None else f'{config.decay_over:g} {config.schedule_unit}'
    return facts


def _listed(names: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return '; '.join(f'{name} was {_short(before[name])}, is {_short(now[name])}' for name in names)


def _short(value: Any) -> str:
    """A value in a message, of a long list its first entries."""
    return f'{_shown(value[:_FEW])},... ({len(value)} in all)' if isinstance(value, list) and len(value) > _FEW else _shown(value)


def _shown(value: Any) -> str:
    return ','.join(f'{part:g}' for part in value) or 'none' if isinstance(value, list) else 'none' if value is None else str(value)


def _remedy(name: str, old: Any, config: config_lib.Config) -> str:
    """The flag that makes a fact what it was; empty where there is none."""
    if name in _NO_FLAGS or (name == 'optimizer' and ':' in old):
        return ''
    if name == 'global_batch_size' and config.batch_size is not None:
        return f'--global_batch_size={old} in place of --batch_size={config.batch_size}'
    if name == 'decay_over':
        length, unit = old.split()
        return f'--decay_over={length}' if unit == config.schedule_unit else ''
    if old is None or old == []:
        return f'no --{name}'
    return f'--{"" if old else "no"}{name}' if isinstance(old, bool) else f'--{name}={_shown(old)}'
