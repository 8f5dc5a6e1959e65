"""An evaluator that works without end, on the newest whole checkpoint that it finds: what a training is measured beside.

`python -m scripts._bench.evaluating FLAGS` takes the flags of a training with its run directory; it has the priority, the threads
and the pauses of an evaluator beside a training. It says `ready` when it could work, works after the line `go`, not any more
after the line `hold`, says either word when it is so, and ends with its standard input.
"""

import os
import sys
import threading

from scripts import _start

_start.load_tensorflow(sys.argv)
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from concurrent import futures  # noqa: E402

from scripts import _flags, _zoo  # noqa: E402
from scripts._bench import options  # noqa: E402
from towers.checkpoint import manifest  # noqa: E402
from towers.evaluators import evaluator  # noqa: E402


def main(argv: list[str]) -> None:
    """Does as it is told until nobody is there to tell it."""
    values = options.define()
    values(argv)
    work = _zoo.load(values)
    threads = {'intra_op_threads': values.eval_threads, 'inter_op_threads': values.eval_threads}
    config = dataclasses.replace(_flags.to_config(values, work.recipe), **threads)
    os.setpriority(os.PRIO_PROCESS, 0, max(config.eval_nice, os.getpriority(os.PRIO_PROCESS, 0)))
    found = manifest.newest(str(config.model_dir))
    if found is None or work.eval_dataset is None:
        raise ValueError(f'There is no checkpoint in {config.model_dir}, or no evaluation dataset; expected both.')
    with evaluator.opened(work.model, work.eval_dataset, config) as session:
        session.load(found)
        print('ready', flush=True)
        _obey(session, found)


def _obey(session: evaluator.Evaluator, checkpoint: manifest.Checkpoint) -> None:
    with contextlib.ExitStack() as working:
        for line in sys.stdin:
            working.close()
            if line.strip() == 'go':
                working.enter_context(_at_work(session, checkpoint))
            print(line.strip(), flush=True)


@contextlib.contextmanager
def _at_work(session: evaluator.Evaluator, checkpoint: manifest.Checkpoint) -> Iterator[None]:
    """Evaluates beside the `with` block, again and again; raises what that raised."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            session.run(checkpoint, stop)

    with futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            stop.set()
        working.result()


if __name__ == '__main__':
    main(sys.argv)
