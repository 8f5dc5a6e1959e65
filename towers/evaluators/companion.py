"""The evaluator beside a training: `towers.evaluators.evaluation.follow` in a process of its own, with low priority.

Two pipes lead from the parent to it. Over one the parent says that no other checkpoint will follow. The other one stays
silent; when the parent is gone, however that came, its end makes the kernel end the child, whatever that is doing.
"""

import contextlib
import dataclasses
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from multiprocessing import connection, resource_tracker
from typing import Any

from absl import logging

from towers import config as config_lib
from towers import structs
from towers.evaluators import evaluation
from towers.evaluators import results as results_lib

_NAME = 'towers-evaluator'
_NO_MORE = 'no other checkpoint will follow'
_ORPHANED = 1
_SLICE_SECS = 0.1
_STOP_SECS = 5.0
_LOWEST = 19  # priority


class Companion(contextlib.AbstractContextManager):
    """Evaluates the checkpoints of a run while it trains; the `with` block starts the process and leaves none behind.

        with companion.Companion(model, eval_dataset, config) as beside:
            ...train...
            scores = beside.wait(timeout=600)

    Whatever happens to it, the training goes on: a failure is a WARNING.

    Args:
      model: as in `towers.evaluate`; a function of a module, or a functools.partial of one.
      dataset: the evaluation dataset, likewise.
      config: `model_dir`, `eval_*` and `verbose` are used.

    Raises:
      ValueError: model or dataset can't be sent to another process, or the script starts its work when it is imported.
    """

    def __init__(self, model: structs.Model, dataset: structs.Dataset, config: config_lib.Config):
        _check_main()
        _check_sendable('model', model)
        _check_sendable('eval_dataset', dataset)
        # The towers are one process's; a thread each is enough beside a training, and leaves it the cores.
        self._config = dataclasses.replace(config, model_dir=evaluation.run_directory(config), intra_op_threads=1, inter_op_threads=1)
        self._work = (model, dataset, self._config)
        self._process: Any = None
        self._pipes: tuple[Any, ...] = ()

    def __enter__(self) -> 'Companion':
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process, which takes some seconds to import TensorFlow and build its graph, and returns at once."""
        context = multiprocessing.get_context('spawn')
        word, own_word = context.Pipe(duplex=False)
        life, own_life = context.Pipe(duplex=False)
        self._pipes = own_word, own_life
        self._process = context.Process(target=_serve, args=(*self._work, (word, life), os.getpid()), name=_NAME, daemon=True)
        resource_tracker.ensure_running()  # it would lift the block of signals below
        with _environment(_child_environment(self._config)), futures.ThreadPoolExecutor(1) as pool:
            pool.submit(_launch, self._process).result()
        # From its first instruction on, also where it imports or blocks, the end of the pipe is a signal that ends the child.
        fcntl.fcntl(life, fcntl.F_SETOWN, self._process.pid)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        for pipe in (word, life):
            pipe.close()

    def wait(self, timeout: float, *, stop: threading.Event | None = None) -> dict[str, Any]:
        """Tells the evaluator that the newest checkpoint is the last one, and waits until it is evaluated.

        Args:
          timeout: seconds after which the evaluator is stopped.
          stop: ends the wait, and the evaluator, when set.

        Returns:
          The last result, as `towers.evaluate` returns it; empty where the evaluator failed, was late or was stopped.
        """
        if self._process is None:
            return {}
        with contextlib.suppress(OSError):  # it has ended already
            self._pipes[0].send(_NO_MORE)
        end = time.monotonic() + timeout
        while self._process.is_alive() and time.monotonic() < end and not (stop and stop.is_set()):
            self._process.join(_SLICE_SECS)
        late = self._process.is_alive()
        if late:
            logging.warning('The evaluator was stopped before the last checkpoint was evaluated; scripts/evaluate.py does it.')
        code = None if late else self._process.exitcode
        self.stop()
        if code:
            logging.warning('The evaluator beside the training failed with exit code %d; scripts/evaluate.py evaluates again.', code)
        if code != 0:
            return {}
        return results_lib.Results(str(self._config.model_dir), self._config.eval_name).last()

    def stop(self) -> None:
        """Ends the process within some seconds, if it is there; what it has written stays."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.is_alive():
            process.kill()  # it has nothing to tidy up: each line and each event is written at once
            process.join(_STOP_SECS)
        for pipe in self._pipes:
            pipe.close()


def _check_main() -> None:
    if multiprocessing.current_process().name == _NAME:
        raise ValueError(
            'The evaluator beside the training imports this script, which then starts a training of its own; expected none on import. '
            "Put `if __name__ == '__main__':` before the call of towers.train."
        )


def _check_sendable(what: str, function: Any) -> None:
    where = f'evaluate=True sends {what} to another process, got {function!r}'
    remedy = 'give a function of a module or a functools.partial of one, or leave evaluate=False.'
    try:
        sent = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f'{where}, which can not go there ({error}); {remedy}') from error
    if b'__main__' in sent and not hasattr(sys.modules['__main__'], '__file__'):
        raise ValueError(f'{where}, which no file holds; {remedy}')


def _child_environment(config: config_lib.Config) -> dict[str, str]:
    """Variables that have to be there before the child imports TensorFlow."""
    quiet = {} if config.verbose else {'TF_CPP_MIN_LOG_LEVEL': os.environ.get('TF_CPP_MIN_LOG_LEVEL', '2')}
    return {**quiet, 'CUDA_VISIBLE_DEVICES': '-1'} if config.eval_device == 'cpu' else quiet


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment for what is started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _launch(process: Any) -> None:
    """Starts a process that inherits from this thread, which ends then, what no other thread may have.

    That is the lowest priority, for TensorFlow's import too, and that it never sees a Ctrl-C, which a terminal sends to all
    processes of a group: the parent tells it what to do.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == 'linux':  # elsewhere the priority is the whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
    process.start()


def _serve(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    pipes: tuple[connection.Connection, connection.Connection],
    parent: int,
) -> None:
    """The child: follows the checkpoints until the parent says that there will be no more."""
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, whatever the script's own handler does
    word, _ = pipes

    def is_over() -> bool:
        if os.getppid() != parent:  # and something else holds the other end of its pipe
            os._exit(_ORPHANED)
        return word.poll()

    try:
        evaluation.follow(model, dataset, config, done=is_over)
    except Exception as error:
        known = isinstance(error, ValueError) or type(error).__module__.startswith('towers.')
        logging.error('The evaluator failed: %s', error, exc_info=None if known else error)
        sys.exit(1)
