"""The table of scripts/simulate.py: a step for each number of machines and strategy."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from scripts import _network, _timeline
from towers import config as config_lib

_STRATEGIES = ('parameter_server', 'mirrored')
_SHOWN = 0.05  # parts of a step that are smaller aren't
_UNITS = {'b': 1 / 8, 'B': 1.0}
_SCALES = {'': 1.0, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'T': 1e12}


def lines(model: Callable[..., Any], dataset: Callable[..., Any], config: config_lib.Config, values: flags.FlagValues) -> Iterator[str]:
    """The table, a line at a time: of the strategy that is asked for, or of all.

    Raises:
      ValueError: a strategy that is not simulated, a rate that is none, or no machine; before anything is measured.
    """
    strategies = _strategies(values)
    setting = _network.Setting(
        machines=1,
        towers=values.num_gpus,
        strategy=values.strategy,
        ps=values.ps,
        network=rate('bandwidth', values.bandwidth),
        bus=rate('bus', values.bus),
        memory=rate('memory', values.memory),
        message=values.message_us / 1e6,
    )
    batch = config.batch_size or 32
    counts = _counts(values.machines)
    alone = dataclasses.replace(config, num_gpus=1, batch_size=batch, global_batch_size=None, device='cpu', visible_gpus=())
    weights, work = _timeline.measure(model, dataset, alone)
    size = sum(weight.bytes for weight in weights)
    yield f'One tower: {work * 1e3:.1f} ms for {batch} examples here, {len(weights)} gradients, {size / 1e6:.1f} MB.'
    if values.tower_ms is not None:
        weights, work = scaled(weights, values.tower_ms / 1e3 / work), values.tower_ms / 1e3
        yield f'Taken as {values.tower_ms:g} ms, all of its moments by the same factor.'
    yield f'{"machines":>8} {"towers":>7}  {"strategy":17} {"step ms":>9} {"efficiency":>10} {"examples/s":>11}  bottleneck, and the rest'
    for machines in counts:
        for strategy in strategies:
            step = _network.simulate(weights, work, dataclasses.replace(setting, machines=machines, strategy=strategy))
            towers = machines * setting.towers
            waits = sorted(step.waits.items(), key=lambda each: -each[1])  # the bottleneck comes first
            what = ', '.join(f'{what} {share:.0%}' for what, share in waits if share >= _SHOWN)
            row = f'{machines:8} {towers:7}  {strategy:17} {step.secs * 1e3:9.1f} {step.efficiency:10.1%}'
            yield f'{row} {towers * batch / step.secs:11.0f}  {what}'


def _strategies(values: flags.FlagValues) -> list[str]:
    found = [strategy for strategy in _STRATEGIES if strategy != 'mirrored' or not values.ps]  # each tower holds the parameters
    if values['strategy'].using_default_value:
        return found
    if values.strategy not in found:
        raise ValueError(f'--strategy wants {" or ".join(found)} with --ps={values.ps} here, got {values.strategy}; leave it out for all.')
    return [values.strategy]


def rate(flag: str, text: str) -> float:
    """Bytes a second from '100Gb' or '12GB'.

    Raises:
      ValueError: it is neither.
    """
    found = re.fullmatch(r'(\d+(?:\.\d+)?)([KMGT]?)([bB])', text)
    if found is None or not float(found[1]):
        raise ValueError(f'--{flag} wants bits or bytes a second, got {text!r}; give e.g. --{flag}=100Gb or --{flag}=12GB.')
    return float(found[1]) * _SCALES[found[2]] * _UNITS[found[3]]


def scaled(weights: list[_network.Weight], factor: float) -> list[_network.Weight]:
    """The same weights of a tower that is so many times as slow."""
    return [dataclasses.replace(weight, needed=weight.needed * factor, ready=weight.ready * factor) for weight in weights]


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and the last."""
    if most < 1:
        raise ValueError(f'--machines wants at least 1, got {most}; give the largest number of machines to show.')
    return sorted({*[2**power for power in range(most.bit_length()) if 2**power <= most], most})
