"""The master's sign of life, written on every server of its run, and what it learns of them by the way."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers.cluster import board, spec

BEAT_SECS = 1.0
SILENT_SECS = 7.0  # without a beat a worker takes the master for gone
_TRY_SECS = 3.0
_LATELY_SECS = 30.0
_LAST_SECS = 120.0  # for a task to take the message that the run is over, after it found its server broken and began anew too
_NEW_SECS = 10.0  # for one that never answered, as it has only just come
_GONE_SECS = 20.0  # in which one that begins anew listens again
MASTER, BEAT, OVER = 'master', 'beat', 'over'


class Pulse(contextlib.AbstractContextManager):
    """Beats on every task from `start` to the end of the `with` block, and then tells them if the run is over.

    Args:
      tasks: all but the master.
    """

    def __init__(self, tasks: Sequence[spec.Task]):
        self._tasks = tuple(tasks)
        self._life = uuid.uuid4().hex
        self._ends = threading.Event()
        self._over = False
        self._answers: dict[spec.Task, bool] = {}
        self._answered: dict[spec.Task, float] = {}  # when a task last did
        self._threads = [threading.Thread(target=self._beat, args=(task,), name=f'towers-pulse-{task}', daemon=True) for task in tasks]

    def __exit__(self, *error: Any) -> None:
        self._ends.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_LAST_SECS + 2 * _TRY_SECS)

    def start(self) -> None:
        """Begins to beat."""
        for thread in self._threads:
            thread.start()

    def answers(self, task: spec.Task) -> bool:
        """Whether a task took the last beat."""
        return self._answers.get(task, False)

    def finish(self) -> None:
        """Says that the run is over, so that the servers shall end with the block."""
        self._over = True

    def _beat(self, task: spec.Task) -> None:
        number = 0
        with board.Board(task, timeout_secs=_TRY_SECS) as writer:
            while not self._ends.is_set():
                number += 1
                started = time.monotonic()
                try:
                    writer.write(board.ORDERS, self._orders(number))
                    self._answers[task] = True
                    self._answered[task] = time.monotonic()
                except tf.errors.OpError:  # gone, frozen, or another one by now
                    self._answers[task] = False
                    writer.connect_anew()
                self._ends.wait(max(0.05, BEAT_SECS - (time.monotonic() - started)))
            # One that answered lately may be too busy for each beat, or find its server broken and begin anew.
            is_there = time.monotonic() - self._answered.get(task, float('-inf')) < _LATELY_SECS
            if self._over and (is_there or _listens(task)):
                _tell(task, writer, {**self._orders(number + 1), OVER: True}, _LAST_SECS if is_there else _NEW_SECS)

    def _orders(self, number: int) -> Mapping[str, Any]:
        return {MASTER: self._life, BEAT: number}


def _tell(task: spec.Task, writer: board.Board, orders: Mapping[str, Any], secs: float) -> None:
    """Gives a task its last orders, until it takes them, nobody has listened at its address for a while, or `secs` are over."""
    began = listened = time.monotonic()
    while time.monotonic() < min(began + secs, listened + _GONE_SECS):
        with contextlib.suppress(tf.errors.OpError):
            return writer.write(board.ORDERS, orders)
        listened = time.monotonic() if _listens(task) else listened
        writer.connect_anew()
        time.sleep(BEAT_SECS)


def _listens(task: spec.Task) -> bool:
    """Whether there is somebody at a task's address, who may not answer; a host that says nothing may have one."""
    try:
        socket.create_connection((task.host, task.port), _TRY_SECS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
