"""What the product costs over a bare prepared callable, in one process: the same graph, session, fetches of most steps, and input."""

import contextlib
import dataclasses
import os
import tempfile

from scripts import _flags, _measure, _zoo
from scripts._bench import running
from towers.jobs import program, stepping


def measure(values: object, *, rounds: int, steps: int) -> dict[str, str]:
    """The pair's rates and their ratio, as rows of a table.

    Args:
      values: the flags of a training.
      rounds: slices of each side.
      steps: steps in a slice.
    """
    work = _zoo.load(values)
    with tempfile.TemporaryDirectory(prefix='towers-benchmark-') as folder:
        config = dataclasses.replace(_flags.to_config(values, work.recipe), model_dir=folder, train_steps=10**9)
        made = program.make(work.model, work.dataset, config)
        # The progress lines are written, as in a training, to where nobody reads them.
        with open(os.devnull, 'w') as unread, contextlib.redirect_stdout(unread), running.opened(made, config) as (master, step):
            bare = master.raw_session().make_callable(stepping.bare(made.step))
            rates = _measure.in_turn({'towers': step, 'bare callable': bare}, rounds=rounds, steps=steps)
    return _measure.table(rates)
