"""What the product costs over a bare prepared callable: python scripts/benchmark.py --num_gpus=4.

Both run the same graph in the same session with the same fetches and input, default hooks and checkpoints on one side.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _flags, _main, _measure, _zoo
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
        config = dataclasses.replace(_flags.to_config(values, work.recipe), model_dir=folder, train_steps=10**9)
        made = program.make(work.model, work.dataset, config)
        # The progress lines are written, as in a training, to where nobody reads them.
        with open(os.devnull, 'w') as unread, contextlib.redirect_stdout(unread), training.opened(made, config) as master:
            fetches = (*made.step.ops, *made.step.report.values())
            sides = {'towers': lambda: master.run(fetches), 'bare callable': master.raw_session().make_callable(fetches)}
            rates = _measure.in_turn(sides, rounds=values.rounds, steps=values.slice_steps)
    _main.print_table(_measure.table(rates))
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
