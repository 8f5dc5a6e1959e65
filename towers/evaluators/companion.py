"""The evaluator beside a training: `towers.evaluators.evaluation.follow` in a process of its own, with low priority.

Two pipes lead from the parent to it. Over one the parent says that no other checkpoint will follow. The other one stays
silent; when the parent is gone, however that came, its end makes the kernel end the child, whatever that is doing.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple

from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import leases
from towers.evaluators import evaluation
from towers.sessions import admission, ledger, membership

_NAME = 'towers-evaluator'
_NO_MORE = 'no other checkpoint will follow'
_ORPHANED = 1
_UP_SECS = 120.0  # in which an evaluator looks for checkpoints for the first time
WRONG_USE = 2  # exit code of what will fail again
_STOP_SECS = 5.0
_starting = threading.Lock()  # the environment, which a child inherits, is the whole process's


class _Parent(NamedTuple):
    """What a child knows of its parent: the process, and the file of a lease that pins all checkpoints until the child is up."""

    pid: int
    lease: str


class Companion(contextlib.AbstractContextManager):
    """Evaluates the checkpoints of a run while it trains; the `with` block starts the process and leaves none behind.

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
        _check_sendable(f'eval_dataset of {config.eval_name!r}', dataset)
        # Beside a training a thread or so in each pool is enough, and leaves it the cores.
        folder, threads = evaluation.run_directory(config), config.eval_threads
        self.config = dataclasses.replace(config, model_dir=folder, intra_op_threads=threads, inter_op_threads=threads)
        self._work = (model, dataset, self.config)
        self._process: Any = None
        self._pipes: tuple[Any, ...] = ()
        self._over = False
        self._lock = threading.Lock()
        self._lease = leases.Lease(folder, f'evaluator {config.eval_name}, starting')
        self._unpin: threading.Timer | None = None

    def __enter__(self) -> 'Companion':
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process, which takes some seconds to import TensorFlow and build its graph, and returns at once.

        At the first start all checkpoints are pinned until the process has seen them.
        """
        if self._unpin is None:
            self._lease.__enter__()
            self._unpin = threading.Timer(_UP_SECS, self._lease.__exit__)
            self._unpin.daemon = True
            self._unpin.start()
        context = multiprocessing.get_context('spawn')
        word, own_word = context.Pipe(duplex=False)
        life, own_life = context.Pipe(duplex=False)
        name = f'{_NAME}-{self.config.eval_name}'
        process: Any = context.Process(
            target=_serve, args=(*self._work, (word, life), _Parent(os.getpid(), self._lease.path)), name=name, daemon=True
        )
        resource_tracker.ensure_running()  # it would lift the block of signals below
        with _starting, _environment(_child_environment(self.config)), futures.ThreadPoolExecutor(1) as pool:
            pool.submit(_launch, process, self.config.eval_nice).result()
        _end_with_pipe(process.pid, life)  # also while it imports
        for pipe in (word, life):
            pipe.close()
        with self._lock:
            self._process, self._pipes = process, (own_word, own_life)
            self._tell()

    def say_over(self) -> None:
        """Tells the evaluator, and each that is started later, that the newest checkpoint is the last one."""
        with self._lock:
            self._over = True
            self._tell()

    def join(self, timeout: float) -> bool:
        """Waits until the process has ended; False after `timeout` seconds."""
        process = self._process
        if process is None:
            return True
        process.join(timeout)
        return not process.is_alive()

    @property
    def exitcode(self) -> int | None:
        """How the process ended, as `subprocess` says it; None where it runs or was stopped."""
        process = self._process
        return None if process is None else process.exitcode

    def stop(self) -> None:
        """Ends the process within some seconds, if it is there; what it has written stays."""
        if self._unpin is not None:
            self._unpin.cancel()
            self._lease.__exit__()
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        if process.is_alive():
            process.kill()  # it has nothing to tidy up: each line and each event is written at once
            process.join(_STOP_SECS)
        for pipe in self._pipes:
            pipe.close()
        leases.sweep(str(self.config.model_dir))
        ledger.sweep_here(os.path.join(str(self.config.model_dir), membership.FOLDER))

    def _tell(self) -> None:
        if self._over and self._process is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._pipes[0].send(_NO_MORE)


def _check_main() -> None:
    if multiprocessing.current_process().name.startswith(_NAME):
        raise ValueError(
            'The evaluator beside the training imports this script, which then starts a training of its own; expected none on import. '
            "Put `if __name__ == '__main__':` before the call of towers.train."
        )


def _check_sendable(what: str, function: Any) -> None:
    where = f'An evaluator beside the training takes {what} to a process of its own, got {function!r}'
    remedy = 'give a function of a module or a functools.partial of one, or leave out --evaluate and --evaluator.'
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


def _launch(process: Any, nice: int) -> None:
    """Starts a process that inherits from this thread, which ends then, what no other thread may have.

    That is its priority, for TensorFlow's import too, and that it never sees a Ctrl-C, which a terminal sends to all
    processes of a group: the parent tells it what to do.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == 'linux':  # elsewhere the priority is the whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _priority(nice))
    process.start()


def _end_with_pipe(pid: int, life: connection.Connection) -> None:
    """Makes the end of a pipe a signal that ends a process, also where it imports or blocks."""
    fcntl.fcntl(life, fcntl.F_SETOWN, pid)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def _priority(nice: int) -> int:
    """The nice level asked for, or this process's own where that is higher, which nobody may lower."""
    return max(nice, os.getpriority(os.PRIO_PROCESS, 0))


def _serve(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    pipes: tuple[connection.Connection, connection.Connection],
    parent: _Parent,
) -> None:
    """The child: follows the checkpoints until the parent says that there will be no more."""
    os.setpriority(os.PRIO_PROCESS, 0, _priority(config.eval_nice))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, whatever the script's own handler does
    word, life = pipes
    _end_with_pipe(os.getpid(), life)  # the parent may have been killed before it did so
    looks = itertools.count()

    def is_over() -> bool:
        if next(looks) == 1:  # it has looked for checkpoints once
            with contextlib.suppress(OSError):
                os.unlink(parent.lease)
        _require(parent)  # something else may hold the other end of the pipe
        return word.poll()

    _require(parent)

    try:
        evaluation.follow(model, dataset, config, done=is_over)
    except Exception as error:
        known = isinstance(error, ValueError) or type(error).__module__.startswith('towers.')
        logging.error('The evaluator %s failed: %s', config.eval_name, error, exc_info=None if known else error)
        hopeless = isinstance(error, ValueError) and not isinstance(error, admission.Refused)  # others may end
        sys.exit(WRONG_USE if hopeless else 1)


def _require(parent: _Parent) -> None:
    """Ends this process where its parent is gone."""
    if os.getppid() != parent.pid:
        os._exit(_ORPHANED)
