"""The flags of benchmark.py, and what they name."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from scripts import _flags
from scripts._bench import checkouts, known, sides, workloads
from towers import config as config_lib

_PARTS = ('overhead', 'sides', 'evaluator', 'machines', 'soak')
_DEFAULT_PARTS = _PARTS[:2]
_DEFAULT_TOWERS = ('1', '2', '4', '8')
_TITLE = 'Benchmark: what is measured, and how much.'


@dataclasses.dataclass(frozen=True)
class Names:
    """What is to be measured."""

    parts: Sequence[str]
    cases: Sequence[tuple[str, int, str]]
    sides: Sequence[str]  # the first is what the others are compared with
    peers: Mapping[str, str]  # those of the sides that come from checkouts, and their folders


def define() -> flags.FlagValues:
    """The flags of a training and those of the measurement."""
    values = _flags.define()
    option, words = _flags.Option, tuple[str, ...]
    _flags.add(
        values, _TITLE,
        option(
            'measure', _DEFAULT_PARTS,
            'overhead: of the product; sides: what else one would use; evaluator: beside one; machines: over two processes; soak: slopes',
            kind=words,
        ),
        option('workloads', tuple(workloads.WORKLOADS), 'w1: perceptron, w2: ResNet-20, w3: ResNet-50, w4: embedding', kind=words),
        option('towers', (), 'numbers of towers, such as 1,4; --num_gpus if not given, 1,2,4,8 without either', kind=words),
        option('sources', sides.SOURCES, 'constants: data in the graph; pipeline: one tf.data pipeline for all', kind=words),
        option('sides', tuple(known.SIDES), 'what is measured; the first is what the others are compared with', kind=words),
        option('rounds', 8, 'slices of each side', kind=int),
        option('slice_steps', 100, 'steps in a slice of --measure=overhead, machines and --input', kind=int),
        option('secs', 3600.0, 'how long --measure=soak trains', kind=float),
        option('out', None, 'file of JSON lines to which the sides are appended'),
        option('compare', None, 'such a file of an earlier run; says which ratios moved by more than their spread'),
        option('profile', False, "where a step's time goes: towers, transfers, reduce, apply, input, host", kind=bool),
        option('input', False, 'the dataset of --dataset alone: through the training input, and bare', kind=bool),
    )  # fmt: skip
    _flags.add_repeated(
        values, _TITLE, 'peer', 'checkout of tensorflow/benchmarks or tensorpack, whose trainers are measured too; may be given again'
    )
    return values


def names(values: Any) -> Names:
    """What the flags ask for.

    Raises:
      ValueError: something that there is not.
    """
    for name, there in (('measure', _PARTS), ('workloads', workloads.WORKLOADS), ('sources', sides.SOURCES), ('sides', known.SIDES)):
        unknown = [word for word in getattr(values, name) if word not in there]
        config_lib.require(not unknown, f'--{name} takes {", ".join(there)}, got {", ".join(unknown)}; give one or more of these.')
        twice = {word for word in getattr(values, name) if list(getattr(values, name)).count(word) > 1}
        config_lib.require(not twice, f'--{name} has {", ".join(sorted(twice))} twice; give each once.')
    towers = list(values.towers) or ([str(values.num_gpus)] if values['num_gpus'].present else _DEFAULT_TOWERS)
    config_lib.require(
        all(number.isdecimal() and int(number) > 0 for number in towers),
        f'--towers takes numbers of at least 1, got {",".join(towers)}; give e.g. --towers=1,4.',
    )
    config_lib.require(values.rounds > 0 and values.slice_steps > 0, '--rounds and --slice_steps must be at least 1; give larger values.')
    config_lib.require(values.secs >= 1, f'--secs must be at least 1, got {values.secs:g}; give e.g. --secs=3600.')
    for name in ('out', 'compare'):
        config_lib.require(
            not getattr(values, name) or not (values.profile or values.input),
            f'--profile and --input give no rows for --{name}; leave one of them out.',
        )
    config_lib.require(not (values.profile and values.input), '--profile and --input are two measurements; give one of them.')
    config_lib.require('sides' in values.measure or not values.peer, '--peer is for --measure=sides; add it there, or leave --peer out.')
    cases = itertools.product(values.workloads, dict.fromkeys(map(int, towers)), values.sources)
    peers = checkouts.named(values.peer)
    parts = ('sides',) if values.profile and not values['measure'].present else values.measure
    return Names(parts, list(cases), (*values.sides, *peers), peers)
