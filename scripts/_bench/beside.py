"""What an evaluator that works all the time costs a training on the same machine: slices with it, and slices in which it is stopped."""

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import towers
from scripts import _flags, _measure, _zoo
from scripts._bench import running
from towers.jobs import program

_SLICE_SECS, _SETTLE_SECS, _START_SECS = 0.6, 0.05, 300.0
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def measure(values: object, argv: list[str], *, rounds: int) -> dict[str, str]:
    """The training's rates without and with an evaluator and their ratio, as rows of a table.

    Args:
      values: the flags of a training.
      argv: the command line that they came from, for the evaluator's process.
      rounds: slices of each kind.

    Raises:
      ValueError: there is nothing to evaluate on.
    """
    work = _zoo.load(values)
    if work.eval_dataset is None:
        raise ValueError('--measure=evaluator needs an evaluation dataset, got none; give --eval_dataset.')
    with tempfile.TemporaryDirectory(prefix='towers-benchmark-') as folder, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, 'w'))))  # the progress lines
        config = dataclasses.replace(_flags.to_config(values, work.recipe), model_dir=os.path.join(folder, 'evaluated'), train_steps=1)
        towers.train(work.model, work.dataset, config)
        config = dataclasses.replace(config, model_dir=os.path.join(folder, 'measured'), train_steps=10**9)
        made = program.make(work.model, work.dataset, config)
        _, step = stack.enter_context(running.opened(made, config))
        beside = stack.enter_context(_evaluator([*argv, f'--model_dir={folder}/evaluated']))
        return _table(_in_turn(step, beside, rounds))


def _in_turn(step: Callable[[], object], beside: int, rounds: int) -> list[tuple[float, float]]:
    """Steps per second without and with the evaluator, round by round, after a first round that isn't counted."""
    steps = _measure.steps_in(_SLICE_SECS, lambda count: _timed(step, count))
    rates = []
    for _ in range(rounds + 1):
        pair = []
        for wanted in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(beside, wanted)
            time.sleep(_SETTLE_SECS)
            pair.append(steps / _timed(step, steps))
        rates.append((pair[0], pair[1]))
    return rates[1:]


def _timed(step: Callable[[], object], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


@contextlib.contextmanager
def _evaluator(argv: list[str]) -> Iterator[int]:
    """The number of an evaluator's process at work, which is gone after the `with` block."""
    command = [sys.executable, '-m', 'scripts._bench.evaluating', *argv[1:]]
    path = os.pathsep.join([_ROOT, os.environ.get('PYTHONPATH', '')])
    with subprocess.Popen(command, env={**os.environ, 'PYTHONPATH': path}, stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(_START_SECS, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != 'ready':
                raise RuntimeError(f'The evaluator ended with {process.wait(_START_SECS)} before it worked; see above.')
            late.cancel()
            yield process.pid
        finally:
            late.cancel()
            process.kill()


def _table(rates: list[tuple[float, float]]) -> dict[str, str]:
    ratios = [beside / alone for alone, beside in rates]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        'training alone, steps/s (median)': f'{statistics.median(alone for alone, _ in rates):.1f}',
        'with an evaluator, steps/s (median)': f'{statistics.median(beside for _, beside in rates):.1f}',
        'with / alone (median, quartiles)': f'{middle:.3f} ({low:.3f} to {high:.3f})',
    }
