"""A training for a given time: how its step time, memory, threads and open files move, by the hour."""

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scripts import _measure
from scripts._bench import running

_SAMPLES, _WARM_SHARE, _SHORTEST = 60, 0.2, 0.1  # in a run; what comes first of it and isn't counted; seconds of a sample


class Kind(NamedTuple):
    """What is watched.

    Attributes:
      unit: of its values.
      most: by how many units, or parts of its median where `relative`, it may rise in an hour.
      relative: whether it is a rate.
    """

    unit: str
    most: float
    relative: bool = False


KINDS = {
    'step time': Kind('ms', 0.1, relative=True),
    'resident memory': Kind('MB', 50.0),
    'threads': Kind('', 1.0),
    'open files': Kind('', 1.0),
}


@dataclasses.dataclass(frozen=True)
class Trend:
    """How one kind moved.

    Attributes:
      middle: its median.
      slope: units an hour, the median of the slopes between all pairs of samples.
      spread: the distance of its quartiles.
      hours: from the first sample to the last.
    """

    middle: float
    slope: float
    spread: float
    hours: float

    def exceeds(self, kind: Kind) -> bool:
        """Whether it rises by more than it may, and further than it goes up and down; a steady rise is twice its spread."""
        return self.slope > self.most(kind) and self.slope * self.hours > 1.5 * self.spread

    def most(self, kind: Kind) -> float:
        """By how much it may rise in an hour, in its unit."""
        return kind.most * (self.middle if kind.relative else 1.0)


def measure(values: Any, *, secs: float) -> tuple[dict[str, str], list[str]]:
    """The slopes as rows of a table, and the kinds that rose by more than they may.

    Args:
      values: the flags of a training.
      secs: how long it trains.
    """
    with running.asked_for(values) as (_, _, step):
        return judged(_samples(step, secs))


def judged(samples: Sequence[Mapping[str, float]]) -> tuple[dict[str, str], list[str]]:
    """The table and the kinds that rose too much, from samples of all kinds with their `time` in seconds."""
    counted = samples[int(_WARM_SHARE * len(samples)) :]
    trends = {name: trend([each['time'] / 3600 for each in counted], [each[name] for each in counted]) for name in KINDS}
    rows = {'hours counted': f'{trends["threads"].hours:.3f}'}
    for name, kind in KINDS.items():
        found, unit = trends[name], f' {kind.unit}' if kind.unit else ''
        rows[f'{name} (median)'] = f'{found.middle:.4g}{unit}'
        doubt = ', but no more than it goes up and down' if found.slope > found.most(kind) and not found.exceeds(kind) else ''
        rows[f'{name}, an hour (at most {found.most(kind):.3g}{unit})'] = f'{found.slope:+.3g}{unit}{doubt}'
    return rows, [name for name, kind in KINDS.items() if trends[name].exceeds(kind)]


def trend(hours: Sequence[float], values: Sequence[float]) -> Trend:
    """How values moved that were taken at these times, three or more."""
    pairs = itertools.combinations(zip(hours, values, strict=True), 2)
    slopes = [(after - before) / (end - begin) for (begin, before), (end, after) in pairs]
    low, middle, high = _measure.quartiles(values)
    return Trend(middle, statistics.median(slopes), high - low, hours[-1] - hours[0])


def _samples(step: Callable[[], object], secs: float) -> list[dict[str, float]]:
    step()
    samples, ends = [], time.perf_counter() + secs
    while (began := time.perf_counter()) < ends:
        steps = 0
        while time.perf_counter() < began + max(_SHORTEST, secs / _SAMPLES):
            step()
            steps += 1
        now = time.perf_counter()
        samples.append({'time': now, 'step time': 1000 * (now - began) / steps, **_held()})
    return samples


def _held() -> dict[str, float]:
    """What this process has of its system."""
    with open('/proc/self/status') as lines:
        found = {name: rest.split() for name, _, rest in (line.partition(':') for line in lines)}
    files = len(os.listdir('/proc/self/fd'))
    return {'resident memory': int(found['VmRSS'][0]) / 1024, 'threads': int(found['Threads'][0]), 'open files': files}
