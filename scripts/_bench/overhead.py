"""What the product costs over a bare prepared callable, in one process: the same graph, session, fetches of most steps, and input."""

from scripts import _measure
from scripts._bench import running
from towers.jobs import stepping


def measure(values: object, *, rounds: int, steps: int) -> dict[str, str]:
    """The pair's rates and their ratio, as rows of a table.

    Args:
      values: the flags of a training.
      rounds: slices of each side.
      steps: steps in a slice.
    """
    with running.asked_for(values) as (made, master, step):
        bare = master.raw_session().make_callable(stepping.bare(made.step))
        rates = _measure.in_turn({'towers': step, 'bare callable': bare}, rounds=rounds, steps=steps)
    return _measure.table(rates)
