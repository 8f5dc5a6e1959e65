"""Measuring two or more ways to do one thing: in turn, in one process, so the machine's mood cancels."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def in_turn(sides: Mapping[str, Callable[..., object]], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Steps per second of each side, one figure a round, after a first round that isn't counted.

    Args:
      sides: name -> what makes a step, or as many as it is given.
      rounds: in each, every side has its turn.
      steps: of one turn.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        for name, step in sides.items():
            start = time.perf_counter()
            make(step, steps)
            if round_number:
                rates[name].append(steps / (time.perf_counter() - start))
    return rates


def takes_many(step: Callable[..., object]) -> bool:
    """Whether what makes a step makes as many as it is given."""
    return bool(getattr(step, '__defaults__', None))


def make(step: Callable[..., object], steps: int) -> float | None:
    """Makes some steps, and returns how many seconds they took where who makes them says so."""
    if takes_many(step):
        told = step(steps)
        return told if isinstance(told, float) else None
    for _ in range(steps):
        step()
    return None


def steps_in(secs: float, run: Callable[[int], float]) -> int:
    """How many steps take about `secs` seconds, at least half of it; what is run for it warms up.

    Args:
      secs: of a slice.
      run: makes so many steps and returns the seconds that they took.
    """
    steps = 1
    while (taken := run(steps)) < secs / 2:
        steps = max(steps + 1, int(steps * min(10.0, secs / max(taken, 1e-4))))
    return steps


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile, which lie between values that were measured however few there are."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method='inclusive')
    return low, median, high


def table(rates: Mapping[str, list[float]]) -> dict[str, str]:
    """Median rates, and each side's ratio to the last side, pair by pair: median and quartiles."""
    rows = {f'{name}, steps/s (median)': f'{statistics.median(found):.1f}' for name, found in rates.items()}
    *others, base = rates
    for name in others:
        ratios = [ours / theirs for ours, theirs in zip(rates[name], rates[base], strict=True)]
        low, median, high = quartiles(ratios)
        rows[f'{name} / {base} (median, quartiles)'] = f'{median:.3f} ({low:.3f} to {high:.3f})'
    return rows
