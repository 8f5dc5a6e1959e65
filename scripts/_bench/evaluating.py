"""An evaluator that works without end, on the first whole checkpoint that it finds: what a training is measured beside.

`python -m scripts._bench.evaluating FLAGS` takes the flags of a training with a run directory; it has the priority and the threads
of an evaluator beside a training, and says `ready` when it works.
"""

import os
import sys
import threading

from scripts import _start

_start.load_tensorflow(sys.argv)
import dataclasses  # noqa: E402

from scripts import _flags, _zoo  # noqa: E402
from scripts._bench import options  # noqa: E402
from towers.checkpoint import manifest  # noqa: E402
from towers.evaluators import evaluator  # noqa: E402


def main(argv: list[str]) -> None:
    """Evaluates until it is killed, or nobody is there to kill it."""
    values = options.define()
    values(argv)
    work = _zoo.load(values)
    threads = {'intra_op_threads': values.eval_threads, 'inter_op_threads': values.eval_threads}
    config = dataclasses.replace(_flags.to_config(values, work.recipe), **threads)
    os.setpriority(os.PRIO_PROCESS, 0, max(config.eval_nice, os.getpriority(os.PRIO_PROCESS, 0)))
    found = manifest.newest(str(config.model_dir))
    if found is None or work.eval_dataset is None:
        raise ValueError(f'There is no checkpoint in {config.model_dir}, or no evaluation dataset; expected both.')
    parent = os.getppid()
    with evaluator.opened(work.model, work.eval_dataset, config) as session:
        session.load(found)
        print('ready', flush=True)
        while os.getppid() == parent:
            session.run(found, threading.Event())


if __name__ == '__main__':
    main(sys.argv)
