"""What a worker or parameter task does: it serves, and looks after whether there is a master."""

import dataclasses
import enum
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers.cluster import board, pulse, spec

_LOOK_SECS = 1.0
_READ_SECS = 5.0
_BROKEN_SECS, _KEPT_SECS = 30.0, 120.0  # without an answer of its own server a task takes it for broken, later where that loses something
_MOST_SECS, _MOST_SILENT_SECS = 2.0, 15.0  # between two looks of a process that runs, without an answer three limits more


class Ended(enum.Enum):
    """Why a task stopped serving."""

    OVER = 'the run is over'
    LOST = 'the master is gone'
    BROKEN = 'its server does not answer'
    SIGNAL = 'a signal'


@dataclasses.dataclass
class _Master:
    """What is known of the master.

    Attributes:
      life: which process it is; empty = none so far.
      beat: its last one.
      silent: seconds since then, as far as this process ran.
      here: whether it is taken to be there.
    """

    life: str = ''
    beat: int = 0
    silent: float = 0.0
    here: bool = False


def watch(
    task: spec.Task, target: str, stop: threading.Event, *, keeps: bool = False, clock: Callable[[], float] = time.monotonic
) -> Ended:
    """Waits for the end of the run, a signal, or the loss of the master.

    Args:
      task: what this process is.
      target: of its server.
      stop: set by a signal.
      keeps: whether it holds what a next master wants, so that it goes on without one.
      clock: seconds that never go back.
    """
    master, limit, silent = _Master(), _KEPT_SECS if keeps else _BROKEN_SECS, 0.0
    with board.Board(task, target=target, timeout_secs=_READ_SECS) as own:
        looked = clock()
        while not stop.wait(_LOOK_SECS):
            orders = _orders(task, own)
            now = clock()
            secs, looked = now - looked, now  # of which those in which it was stopped itself don't count
            silent = 0.0 if orders is not None else silent + min(secs, _MOST_SILENT_SECS)
            if silent > limit:
                return Ended.BROKEN
            if orders is None:
                continue
            if orders.get(pulse.OVER):
                return Ended.OVER
            _note(task, master, orders, min(secs, _MOST_SECS))
            if _is_lost(task, master) and not keeps:
                return Ended.LOST
    return Ended.SIGNAL


def _orders(task: spec.Task, own: board.Board) -> dict[str, Any] | None:
    """The orders on a task's own server; None where it does not answer, and then the connection is made anew."""
    try:
        return own.read(board.ORDERS)
    except tf.errors.OpError as error:  # so busy that it does not answer itself, or the connection is broken
        logging.warning('%s: its own server does not answer (%s).', task, _reason(error))
    own.connect_anew()
    return None


def _reason(error: tf.errors.OpError) -> str:
    lines = [line.strip() for line in error.message.splitlines() if line.strip() and 'Graph execution error' not in line]
    return lines[0] if lines else type(error).__name__


def _note(task: spec.Task, master: _Master, orders: dict[str, Any], secs: float) -> None:
    """Takes note of the orders, read `secs` after those before."""
    life, beat = orders.get(pulse.MASTER, ''), orders.get(pulse.BEAT, 0)
    if (life, beat) == (master.life, master.beat):
        master.silent += secs
        return
    if not master.here or life != master.life:
        logging.info('%s: serving a master.', task)
    master.life, master.beat, master.silent, master.here = life, beat, 0.0, True


def _is_lost(task: spec.Task, master: _Master) -> bool:
    """Whether the master that was there is not any more; said once."""
    if not master.here or master.silent <= pulse.SILENT_SECS:
        return False
    logging.warning('%s: no sign of life of the master for %.0f s.', task, master.silent)
    master.here = False
    return True
