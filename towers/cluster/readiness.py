"""Whether the tasks of a cluster are there and belong to this run, asked with a limit before a session is made."""

import concurrent.futures
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers.cluster import board, server, spec

_TRY_SECS = 2.0  # one attempt
_WHY_SECS = 0.9  # twice, to say why
_PAUSE_SECS = 0.25
_NOTICE_SECS = 5.0

Card = Mapping[str, Any]


def ask(task: spec.Task, secs: float = _TRY_SECS) -> Card:
    """A task's card.

    Raises:
      tf.errors.OpError: it does not answer within `secs`, or is no such task.
    """
    with board.Board(task, timeout_secs=secs) as found:
        return found.read(board.CARD)


def wait(tasks: Sequence[spec.Task], own: Card, secs: float, stop: threading.Event) -> dict[spec.Task, Card]:
    """Waits until every task answers, and makes sure that it belongs to this run.

    Args:
      tasks: all but this process.
      own: the card of this process.
      secs: limit of the wait.
      stop: ends it when set.

    Returns:
      The cards of those that answered; fewer than asked only where `stop` was set.

    Raises:
      ClusterError: a task did not answer in time; it names host, port and task.
      ValueError: a task is of another run, or of other versions.
    """
    found, missing = answers(tasks, secs, stop)
    require(found, own)
    if missing and not stop.is_set():
        lines = '; '.join(f'{task} ({why})' for task, why in missing.items())
        raise spec.ClusterError(
            f'Not there within {secs:g} s (--connect_timeout_secs): {lines}. Start scripts/worker.py there with the same '
            'hosts, or let its port through.'
        )
    return found


def require(found: Mapping[spec.Task, Card], own: Card) -> None:
    """Makes sure that tasks belong to this run.

    Raises:
      ValueError: a task is of another run, or of other versions.
    """
    for task, card in found.items():
        refused = server.problem(own, card)
        if refused:
            raise ValueError(f'{task} can not take part: {refused}.')


def answers(tasks: Sequence[spec.Task], secs: float, stop: threading.Event) -> tuple[dict[spec.Task, Card], dict[spec.Task, str]]:
    """(the cards of the tasks that answer within `secs`, why for the others), all asked at once."""
    end = time.monotonic() + secs
    if not tasks:
        return {}, {}
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        results = list(pool.map(lambda task: _until(task, end, stop), tasks))
    pairs = list(zip(tasks, results, strict=True))
    return {task: card for task, card in pairs if not isinstance(card, str)}, {task: why for task, why in pairs if isinstance(why, str)}


def _until(task: spec.Task, end: float, stop: threading.Event) -> Card | str:
    """A task's card, or why there is none."""
    noticed = time.monotonic() + _NOTICE_SECS
    while True:
        left = end - time.monotonic()
        why: str
        try:
            return ask(task, min(_TRY_SECS, max(left, 0.1)))
        except tf.errors.OpError as error:
            why = _why(task, error)
        if stop.is_set() or time.monotonic() + _PAUSE_SECS >= end:
            return why
        if noticed <= time.monotonic():
            logging.info('Waiting for %s: %s.', task, why)
            noticed = float('inf')
        stop.wait(_PAUSE_SECS)


def _why(task: spec.Task, error: tf.errors.OpError) -> str:
    """In a few words, why a task did not answer."""
    if isinstance(error, tf.errors.FailedPreconditionError):
        return 'it is starting'
    try:
        with socket.create_connection((task.host, task.port), timeout=_WHY_SECS):
            pass
    except socket.gaierror:
        return 'its host is not known'
    except ConnectionRefusedError:
        return 'nothing listens on its port'
    except OSError as failed:
        return f'no connection: {failed}'
    found = _who(task)
    if found is None:
        return 'something listens there, but does not answer as a server of TensorFlow'
    return 'it is starting' if found == task.device else f'what answers there is {found}'


def _who(task: spec.Task) -> str | None:
    """What the server at a task's address takes itself for: '/job:worker/task:0'; None where none answers."""
    proto = tf.ConfigProto(operation_timeout_in_ms=int(1000 * _WHY_SECS), device_filters=['/job:nobody'])  # but itself, always
    try:
        with tf.Graph().as_default() as graph, tf.Session(f'grpc://{task.address}', graph=graph, config=proto) as session:
            found = tf.DeviceSpec.from_string(session.list_devices()[0].name)
            return f'/job:{found.job}/task:{found.task}'
    except tf.errors.OpError:
        return None


def retried(work: Callable[[], Any], secs: float, stop: threading.Event) -> bool:
    """Does `work` until it raises no error of TensorFlow, for `secs` at most; whether it did."""
    end = time.monotonic() + secs
    pause = _PAUSE_SECS
    while not stop.is_set():
        try:
            work()
            return True
        except tf.errors.OpError:
            if time.monotonic() + pause >= end:
                return False
            stop.wait(pause)
            pause = min(2 * pause, _TRY_SECS)
    return False
