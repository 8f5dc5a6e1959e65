"""Measuring several sides in turn, each a process of its own, in slices of equal length; slices that others disturbed are left out."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts import _measure
from scripts._bench import report

SLICE_SECS, DIRTY = 0.6, 0.1  # length of a slice; processor share of others that spoils it
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def measure(
    case: tuple[str, int, str], names: Sequence[str], *, rounds: int, checkouts: Mapping[str, str] = types.MappingProxyType({})
) -> list[dict[str, Any]]:
    """One row for each side that could be started.

    Args:
      case: workload, number of towers, source of the data.
      names: the sides, the first of which the others are compared with.
      rounds: slices of each side.
      checkouts: the folders of those sides that come from one.

    Returns:
      rows with workload, towers, source, side, examples_per_sec (median of the clean slices), ratio to the first side and its quartiles
      (round by round), start_secs, peak_mb, slices and clean.
    """
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(_started(name, case, checkouts.get(name))) for name in names}
        children = {name: child for name, child in children.items() if child.started is not None}
        for child in children.values():
            child.calibrate()
        for _ in range(rounds):
            for child in children.values():
                child.slice()
        base = next(iter(children.values()), None)
        rows = [_row(case, child, base) for child in children.values() if base is not None]
    for row in rows:
        row['start_secs'] = _start_secs(row['side'], case, checkouts.get(row['side'])) or row['start_secs']
    return rows


class _Child:
    """A side's process and what was measured of it."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.rates: list[float] = []  # steps per second
        self.clean: list[bool] = []
        self.peak_mb = 0.0
        self._process = process
        self._steps = 1
        answer = self._answer()
        self.started = None if answer is None else answer['started']

    def calibrate(self) -> None:
        """Finds how many steps a slice has; what is run for it warms up."""
        self._steps = _measure.steps_in(SLICE_SECS, self._run)

    def slice(self) -> None:
        """Measures one slice."""
        busy, began = _busy_secs(), time.monotonic()
        secs = self._run(self._steps)
        others = _busy_secs() - busy - self._cpu
        self.clean.append(others / (os.cpu_count() or 1) < DIRTY * (time.monotonic() - began))
        self.rates.append(self._steps / secs)

    def _run(self, steps: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f'{steps}\n')
        self._process.stdin.flush()
        answer = self._answer()
        if answer is None:
            raise RuntimeError(f'The process of {self.name!r} has ended with {self._process.wait()}; run it alone to see why.')
        self._cpu, self.peak_mb = answer['cpu'], answer['peak_mb']
        return answer['secs']

    def _answer(self) -> dict[str, float] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


@contextlib.contextmanager
def _started(name: str, case: tuple[str, int, str], checkout: str | None) -> Iterator[_Child]:
    command = [sys.executable, '-m', 'scripts._bench.child', name, *map(str, case), *([checkout] if checkout else [])]
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=_ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield _Child(name, process)
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _start_secs(name: str, case: tuple[str, int, str], checkout: str | None) -> float | None:
    """How long a side takes to build and make its first step where no other holds memory.

    A virtual machine may get memory from its host on demand: whoever starts while others hold theirs waits for new pages.
    """
    with _started(name, case, checkout) as child:
        return child.started


def _row(case: tuple[str, int, str], child: _Child, base: _Child) -> dict[str, Any]:
    rounds = [place for place in range(len(child.rates)) if child.clean[place] and base.clean[place]]
    if len(rounds) < report.FEWEST:  # the machine is busy all the time: all slices, which `clean` then tells
        rounds = list(range(len(child.rates)))
    ratios = [child.rates[place] / base.rates[place] for place in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    workload, towers, source = case
    return {
        'workload': workload,
        'towers': towers,
        'source': source,
        'side': child.name,
        'steps_per_sec': statistics.median(child.rates[place] for place in rounds),
        'ratio': middle,
        'low': low,
        'high': high,
        'start_secs': child.started,
        'peak_mb': child.peak_mb,
        'slices': len(child.rates),
        'clean': sum(child.clean),
    }


def _busy_secs() -> float:
    """Seconds that all processors together have worked since the machine started."""
    with open('/proc/stat') as lines:
        user, nice, system, _, _, irq, softirq, *_ = (int(part) for part in lines.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf('SC_CLK_TCK')
