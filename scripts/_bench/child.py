"""The process of one side: `python -m scripts._bench.child NAME WORKLOAD TOWERS SOURCE [CHECKOUT]`.

It is led by lines on its standard input, and says in JSON how long it took to build and make the first step; then, for each number that
it reads, how long so many steps took, and with which share of the processors' time.
"""

import json
import sys
import time

from scripts import _measure, _start

_start.load_tensorflow([])
from scripts._bench import checkouts, known, sides, workloads  # noqa: E402


def main(name: str, workload: str, towers: str, source: str, checkout: str = '') -> None:
    """Serves until its standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    case = sides.Case(workloads.WORKLOADS[workload], int(towers), source)
    side = checkouts.side(name, checkout) if checkout else known.SIDES[name]
    began = time.perf_counter()
    with side(case) as step:
        step()
        _say(answers, started=time.perf_counter() - began)
        for line in sys.stdin:
            _say(answers, **_slice(step, int(line)))


def _slice(step: sides.Step, steps: int) -> dict[str, float]:
    used, began = time.process_time(), time.perf_counter()
    told = _measure.make(step, steps)
    secs = time.perf_counter() - began if told is None else told
    return {'secs': secs, 'cpu': time.process_time() - used, 'peak_mb': _peak_mb()}


def _peak_mb() -> float:
    """The most memory that this process has had, not that of the one it was forked from."""
    with open('/proc/self/status') as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) / 1024


def _say(stream: object, **answer: float) -> None:
    print(json.dumps(answer), file=stream, flush=True)  # type: ignore[call-overload]


if __name__ == '__main__':
    main(*sys.argv[1:])
