"""Measuring several sides in turn, each a process of its own, in slices of equal length; slices that others disturbed are left out."""

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scripts import _measure
from scripts._bench import pipes

SLICE_SECS, DIRTY = 0.6, 0.1  # length of a slice; processor share of others that spoils it
_FEWEST = 3  # clean slices, below which those of a side are counted that others disturbed
ANSWER_SECS = 600.0  # in which a side must have started, or made its slice
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def measure(
    case: tuple[str, int, str], names: Sequence[str], *, rounds: int, checkouts: Mapping[str, str] = types.MappingProxyType({})
) -> list[dict[str, Any]]:
    """One row for each side; one whose process ends, as for want of memory, or hangs is told of and left out; none without the first.

    Args:
      case: workload, number of towers, source of the data.
      names: the sides, the first of which the others are compared with.
      rounds: slices of each side.
      checkouts: the folders of those sides that come from one.

    Returns:
      rows with workload, towers, source, side, examples_per_sec (median of the clean slices), ratio to the first side and its quartiles
      (round by round), start_secs, peak_mb, slices, clean, and is_disturbed, where so few are clean that all count.
    """
    with contextlib.ExitStack() as stack:
        started = (stack.enter_context(_process(name, case, checkouts.get(name))) for name in names)
        children = _going(_going(started, _Child.start), _Child.calibrate)
        for _ in range(rounds):
            children = _going(children, _Child.slice)
        rows = [_row(case, child, children[0]) for child in children] if children and children[0].name == names[0] else []
    for row in rows:
        with contextlib.suppress(ChildProcessError):  # then the start beside the others stands
            row['start_secs'] = _start_secs(row['side'], case, checkouts.get(row['side']))
    return rows


class _Child:
    """A side's process and what was measured of it."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.rates: list[float] = []  # steps per second
        self.clean: list[bool] = []
        self.peak_mb = self.started = 0.0
        self._process = process
        self._steps = 1

    def start(self) -> None:
        """Waits until its first step has been made."""
        self.started = self._answer()['started']

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
        with contextlib.suppress(BrokenPipeError):  # who has ended gives no answer either
            self._process.stdin.write(f'{steps}\n')
            self._process.stdin.flush()
        answer = self._answer()
        self._cpu, self.peak_mb = answer['cpu'], answer['peak_mb']
        return answer['secs']

    def _answer(self) -> dict[str, float]:
        line = pipes.line(self._process, ANSWER_SECS)
        if not line:
            why = f'gave no answer in {ANSWER_SECS:g} s' if line is None else f'has ended with {self._process.wait()}'
            command = shlex.join(map(str, self._process.args))  # type: ignore[arg-type]
            raise ChildProcessError(f'{self.name} is left out: its process {why}; see why by: {command}')
        return json.loads(line)


def _going(children: Iterable[_Child], work: Callable[[_Child], None]) -> list[_Child]:
    """Those that have done the work; of the others it is said that they have ended."""
    going = []
    for child in children:
        try:
            work(child)
        except ChildProcessError as error:
            print(error, file=sys.stderr)
        else:
            going.append(child)
    return going


@contextlib.contextmanager
def _process(name: str, case: tuple[str, int, str], checkout: str | None) -> Iterator[_Child]:
    command = [sys.executable, '-m', 'scripts._bench.child', name, *map(str, case), *([checkout] if checkout else [])]
    ends = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=_ROOT, text=True, **ends) as process:  # type: ignore[call-overload]
        try:
            yield _Child(name, process)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _start_secs(name: str, case: tuple[str, int, str], checkout: str | None) -> float:
    """How long a side takes to build and make its first step where no other holds memory.

    A virtual machine may get memory from its host on demand: whoever starts while others hold theirs waits for new pages.
    """
    with _process(name, case, checkout) as child:
        child.start()
        return child.started


def _row(case: tuple[str, int, str], child: _Child, base: _Child) -> dict[str, Any]:
    rounds = [place for place in range(len(child.rates)) if child.clean[place] and base.clean[place]]
    is_disturbed = len(rounds) < min(_FEWEST, len(child.rates))
    if is_disturbed:  # the machine is busy all the time
        rounds = list(range(len(child.rates)))
    ratios = [child.rates[place] / base.rates[place] for place in rounds]
    low, middle, high = _measure.quartiles(ratios)
    workload, towers, source = case
    return {
        'workload': workload,
        'towers': towers,
        'source': source,
        'side': child.name,
        'base': base.name,
        'steps_per_sec': statistics.median(child.rates[place] for place in rounds),
        'ratio': middle,
        'low': low,
        'high': high,
        'start_secs': child.started,
        'peak_mb': child.peak_mb,
        'slices': len(child.rates),
        'clean': sum(child.clean),
        'is_disturbed': is_disturbed,
    }


def _busy_secs() -> float:
    """Seconds that all processors together have worked since the machine started."""
    with open('/proc/stat') as lines:
        user, nice, system, _, _, irq, softirq, *_ = (int(part) for part in lines.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf('SC_CLK_TCK')
