"""The section of the configuration that says how checkpoints are evaluated."""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from towers.config import options

NO_METRICS = ('step', 'examples', 'seconds', 'checkpoint', 'saved', 'evaluated')  # in a row of results.jsonl beside them


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(options.Section):
    """Evaluation: the evaluator beside or after the training."""

    evaluate: bool = options.option(False, 'run an evaluator beside the training, in a process of its own')
    eval_name: str = options.option('test', 'name of the evaluator; it writes under eval/<name>')
    eval_cadence: str = options.option(
        'every', 'checkpoints an evaluator takes: every, newest, or those 100steps or 600secs after the last taken; the final one always'
    )
    eval_every_steps: int | None = options.option(
        None, 'evaluate in the training itself, between its steps and on its towers, at multiples of so many steps and at its end'
    )
    serve_snapshots: int | None = options.option(
        None,
        'serve the variables to evaluate.py --live on this machine every so many steps, from memory; any user of it can reach the port',
    )
    eval_batch_size: int = options.option(256, 'examples for each tower and evaluation step')
    eval_num_gpus: int = options.option(1, 'towers of the evaluator')
    eval_device: Literal['auto', 'gpu', 'cpu'] = options.option('cpu', "where the evaluator's towers run")
    eval_gpu_memory_fraction: float | None = options.option(None, "the evaluator's share of each of its GPUs, as --gpu_memory_fraction")
    use_ema: bool = options.option(False, 'evaluate, export and predict with the moving averages that --ema_decay made')
    eval_idle_secs: float = options.option(
        600.0, 'seconds without a new checkpoint, and without a trainer at work, after which a continuous evaluator ends'
    )
    eval_parts: int = options.option(
        1, 'into so many parts the dataset is split, which any number of evaluators of one name share; those of dead ones are redone'
    )
    eval_threads: int = options.option(1, 'threads in each pool of an evaluator beside the training')
    eval_nice: int = options.option(19, 'nice level of an evaluator beside the training: 0 as the training, 19 whatever is left over')
    eval_max_slowdown: float = options.option(
        0.03, "part of the training's speed that the evaluators on its machine may cost; they pause to keep to it; 1 = they never pause"
    )
    eval_restarts: int = options.option(5, 'so often in a row an evaluator beside the training is started again after a crash')
    evaluator: tuple[str, ...] = options.option(
        (), 'an evaluator beside the training: name:dataset=...,cadence=...,device=...,threads=...; may be given again', repeated=True
    )

    def __post_init__(self) -> None:
        for name in ('evaluate', 'evaluator'):
            options.require(
                self.eval_every_steps is None or not getattr(self, name),
                f'--eval_every_steps={self.eval_every_steps} evaluates in the training, --{name} is for processes beside it; give one.',
            )
        options.require(
            0 < self.eval_max_slowdown <= 1,
            f'--eval_max_slowdown is a part of the speed, above 0 and at most 1, got {self.eval_max_slowdown}; give e.g. 0.05, or 1.',
        )
        share = self.eval_gpu_memory_fraction
        options.require(share is None or 0 < share <= 1, f'--eval_gpu_memory_fraction must be above 0 and at most 1, got {share!r}.')
        options.at_least(self, 1, 'eval_every_steps', 'serve_snapshots', 'eval_batch_size', 'eval_num_gpus', 'eval_threads', 'eval_parts')
        options.at_least(self, 0, 'eval_idle_secs', 'eval_nice', 'eval_restarts')
        options.require(self.eval_nice <= 19, f'--eval_nice goes from 0 to 19, got {self.eval_nice}; give one of them.')
        specs(self.evaluator)
        options.require(
            re.fullmatch(r'[\w-][\w.-]*', self.eval_name) is not None,
            f'--eval_name must be the name of a folder, got {self.eval_name!r}; use letters, digits, dots, - and _.',
        )
        cadence(self.eval_cadence)


def specs(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What --evaluator declares: name -> fields of `EvalConfig` for that evaluator, and 'dataset' where it is named.

    Raises:
      ValueError: an entry is not name:key=value,..., or its values can't be right.
    """
    hints = typing.get_type_hints(EvalConfig)
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, rest = text.partition(':')
        options.require(name not in found, f'--evaluator={text}: there is one of the name {name!r} already; give each its own.')
        fields: dict[str, Any] = {'eval_name': name}
        for entry in filter(None, rest.split(',')):
            key, equals, value = entry.partition('=')
            known = key in _KEYS and bool(equals)
            options.require(known, f'--evaluator={text}: expected {", ".join(_KEYS)} as key=value, got {entry!r}; correct it.')
            fields['dataset' if key == 'dataset' else f'eval_{key}'] = _value(text, key, value, hints.get(f'eval_{key}', str))
        try:
            EvalConfig(**{key: value for key, value in fields.items() if key != 'dataset'})
        except ValueError as error:
            raise ValueError(f'--evaluator={text}: {str(error).replace("--eval_", "")}') from error
        found[name] = fields
    return found


_KEYS = (
    'dataset',
    'cadence',
    'device',
    'num_gpus',
    'batch_size',
    'parts',
    'gpu_memory_fraction',
    'threads',
    'nice',
    'max_slowdown',
    'restarts',
)


def _value(text: str, key: str, value: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        options.require(value in allowed, f'--evaluator={text}: {key} is one of {", ".join(allowed)}, got {value!r}; correct it.')
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    try:
        return next(each(value) for each in (int, float) if each in kinds) if {int, float} & set(kinds) else value
    except ValueError:
        raise ValueError(f'--evaluator={text}: {key} wants a number, got {value!r}; correct it.') from None


def cadence(text: str) -> tuple[str, float]:
    """How an evaluator chooses checkpoints: ('every' | 'newest' | 'steps' | 'secs', how many of the last two).

    Raises:
      ValueError: `text` is none of 'every', 'newest', '100steps' and '60secs'.
    """
    if text in ('every', 'newest'):
        return text, 0.0
    found = re.fullmatch(r'(\d+(?:\.\d+)?)(steps|secs)', text)
    if not found or not float(found[1]):
        raise ValueError(f'--eval_cadence must be every, newest, or such as 100steps or 60secs, got {text!r}; correct it.')
    return found[2], float(found[1])
