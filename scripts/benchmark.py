"""What the product costs over a bare prepared callable: python scripts/benchmark.py --num_gpus=4.

Both run the same graph in the same session with the same fetches and input, in turn, so the machine's mood cancels.
"""

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _flags, _main, _zoo
from towers import program, training


def define() -> flags.FlagValues:
    """The flags of a training and how much to measure."""
    values = _flags.define()
    rounds = _flags.Option('rounds', 20, 'slices of each side', kind=int)
    steps = _flags.Option('slice_steps', 100, 'steps in a slice', kind=int)
    _flags.add(values, 'Benchmark: how much is measured.', rounds, steps)
    return values


def main(values: flags.FlagValues) -> int:
    """Measures both sides in turn and prints the pair."""
    work = _zoo.load(values)
    with tempfile.TemporaryDirectory(prefix='towers-benchmark-') as folder:
        config = dataclasses.replace(_flags.to_config(values), model_dir=folder, train_steps=10**9)
        made = program.make(work.model, work.dataset, config)
        with open(os.devnull, 'w') as unread, contextlib.redirect_stdout(unread), training.opened(made, config) as master:
            fetches = (*made.step.ops, *made.step.report.values())
            bare = master.raw_session().make_callable(fetches)
            sides: list[tuple[str, Callable[[], object]]] = [('towers', lambda: master.run(fetches)), ('bare callable', bare)]
            rates: dict[str, list[float]] = {name: [] for name, _ in sides}
            for round_number in range(values.rounds + 1):
                for name, step in sides:
                    start = time.perf_counter()
                    for _ in range(values.slice_steps):
                        step()
                    if round_number:  # the first round prepares both
                        rates[name].append(values.slice_steps / (time.perf_counter() - start))
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    table = {f'{name}, steps/s (median)': round(statistics.median(found), 1) for name, found in rates.items()}
    table['towers / bare callable (median of pairs)'] = f'{statistics.median(ratios):.3f}'
    table['spread of the pairs (quartiles)'] = ' to '.join(f'{q:.3f}' for q in statistics.quantiles(ratios, n=4)[::2])
    _main.print_table(table)
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
