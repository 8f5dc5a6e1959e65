"""What the evaluator of the flags costs a training in whose run directory it works: slices with it, and slices in which it is held."""

import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import towers
from scripts import _flags, _measure, _zoo
from scripts._bench import pipes, running
from towers import config as config_lib

_SLICE_SECS, _SETTLE_SECS, _START_SECS, _ANSWER_SECS = 9.0, 0.05, 300.0, 120.0
_NO_EVALUATOR = {field.name: field.default for field in dataclasses.fields(config_lib.EvalConfig)}
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Slice(NamedTuple):
    """The training's steps per second, and the evaluator's seconds of processor time per second."""

    rate: float
    used: float


def measure(values: object, argv: list[str], *, rounds: int) -> dict[str, str]:
    """The training's rates without and with an evaluator, their ratio, and how much that worked, as rows of a table.

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
        config = dataclasses.replace(_flags.to_config(values, work.recipe), model_dir=folder, train_steps=1)
        towers.train(work.model, work.dataset, dataclasses.replace(config, **_NO_EVALUATOR))
        step = stack.enter_context(running.gone_on(work, dataclasses.replace(config, train_steps=10**9)))
        tell, pid = stack.enter_context(_evaluator([*argv, f'--model_dir={folder}']))
        return _table(_in_turn(step, tell, pid, rounds))


def _in_turn(step: Callable[[], Any], tell: Callable[[str], None], pid: int, rounds: int) -> list[tuple[Slice, Slice]]:
    """Slices without and with the evaluator, round by round, after a first round that isn't counted."""
    slices = []
    for _ in range(rounds + 1):
        pair = []
        for word in ('hold', 'go'):
            tell(word)
            time.sleep(_SETTLE_SECS)
            pair.append(_slice(step, pid))
        slices.append((pair[0], pair[1]))
    return slices[1:]


def _slice(step: Callable[[], Any], pid: int) -> Slice:
    began, used, steps = time.perf_counter(), _processor_secs(pid), 0
    while (secs := time.perf_counter() - began) < _SLICE_SECS:
        step()
        steps += 1
    return Slice(steps / secs, (_processor_secs(pid) - used) / secs)


def _processor_secs(pid: int) -> float:
    fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


@contextlib.contextmanager
def _evaluator(argv: list[str]) -> Iterator[tuple[Callable[[str], None], int]]:
    """What tells an evaluator's process a word and waits until it has done so, and its number; it is gone after the `with` block."""
    command = [sys.executable, '-m', 'scripts._bench.evaluating', *argv[1:]]
    path = os.pathsep.join([_ROOT, os.environ.get('PYTHONPATH', '')])
    ends = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, 'PYTHONPATH': path}, text=True, bufsize=1, **ends) as process:
        assert process.stdin is not None
        sink = process.stdin

        def answers(word: str, secs: float) -> None:
            if (pipes.line(process, secs) or '').strip() != word:
                raise RuntimeError(f'The evaluator ended with {process.wait(_START_SECS)} in place of {word!r}; see above.')

        def tell(word: str) -> None:
            sink.write(f'{word}\n')
            answers(word, _ANSWER_SECS)

        try:
            answers('ready', _START_SECS)
            yield tell, process.pid
        finally:
            process.kill()


def _table(slices: list[tuple[Slice, Slice]]) -> dict[str, str]:
    ratios = [beside.rate / alone.rate for alone, beside in slices]
    low, middle, high = _measure.quartiles(ratios)
    return {
        'training alone, steps/s (median)': f'{statistics.median(alone.rate for alone, _ in slices):.1f}',
        'with an evaluator, steps/s (median)': f'{statistics.median(beside.rate for _, beside in slices):.1f}',
        'with / alone (median, quartiles)': f'{middle:.3f} ({low:.3f} to {high:.3f})',
        "the evaluator's processor time / time (median)": f'{statistics.median(beside.used for _, beside in slices):.3f}',
    }
