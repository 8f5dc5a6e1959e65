"""Going on after a task of the cluster was lost: wait for it, connect anew, and train on where the variables are whole."""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors
from towers.checkpoint import manifest
from towers.cluster import spec
from towers.hooks import rejoin
from towers.jobs import connecting
from towers.run import writers

T = TypeVar('T')

# What a session raises where another task is gone, frozen, or another process than before.
_OF_TASKS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.CancelledError)
_ANY = (tf.errors.OpError, errors.Stalled, manifest.CheckpointError)
_LONGEST_PAUSE_SECS = 30.0


@dataclasses.dataclass
class Reached:
    """How far the loop came; kept outside it, since the end of data leaves the loop as an exception."""

    first_step: int
    step: int
    examples: int
    loss: float = math.nan
    stopped_by: str = 'steps'
    examples_per_sec: float = 0.0


def start(found: manifest.Checkpoint | None) -> Reached:
    """Where a run stands that goes on from a checkpoint; None = a new one."""
    return Reached(0, 0, 0) if found is None else Reached(found.step, found.step, found.manifest.examples)


@dataclasses.dataclass
class Progress:
    """How far a run has come, for those who ask after the step has failed.

    Attributes:
      step: gives the last whole step.
      first: step at which the first attempt began; None before.
      told: is given the step at which the next attempt begins, once.
    """

    step: Callable[[], int] = lambda: 0
    first: int | None = None
    told: Callable[[int], None] | None = None

    def begins(self, step: int) -> None:
        """An attempt's variables are set, to a step."""
        self.first = step if self.first is None else self.first
        told, self.told = self.told, None
        if told is not None:
            told(step)


def lasting(
    attempt: Callable[[connecting.Site], T],
    link: connecting.Link | None,
    config: config_lib.Config,
    progress: Progress,
    stop: threading.Event,
) -> T:
    """Trains, and again where a task was lost meanwhile.

    Args:
      attempt: trains on a site, and says to `progress` from which step on.
      link: to the other tasks; None = there are none, and `attempt` is called once on this machine.
      config: `max_recoveries` and `model_dir`.
      progress: of the attempt.
      stop: ends the waits when set.

    Returns:
      What `attempt` returned.

    Raises:
      ClusterError: a task did not come back, or too many recoveries led no further.
      Exception: what `attempt` raised for another reason.
    """
    if link is None:
        return attempt(connecting.local(config))
    count, in_a_row, furthest = 0, 0, -1
    while True:
        try:
            return attempt(link.site(config))
        except rejoin.Rejoin:
            link.rejoin()
            continue
        except _ANY as error:
            step, known = progress.step(), isinstance(error, _OF_TASKS) and not stop.is_set()
            if known:
                _say(error, step)  # at once, since whoever is frozen takes its time not to answer
            lost = link.lost()
            if stop.is_set() or not (lost or known):
                raise
            if not known:
                _say(error, step)
            logging.warning(
                'Lost: %s. Waiting for all tasks.', '; '.join(f'{task} ({why})' for task, why in lost.items()) or 'no task for now'
            )
            in_a_row = 1 if step > furthest else in_a_row + 1
            furthest, count = max(step, furthest), count + 1
            if in_a_row > config.max_recoveries:
                raise spec.ClusterError(
                    f'{config.max_recoveries} recoveries in a row came no further than step {furthest} (--max_recoveries); the last '
                    f'error: {_line(error)}'
                ) from error
        stop.wait(min(_LONGEST_PAUSE_SECS, 2.0 ** (in_a_row - 2)) if in_a_row > 1 else 0)
        link.back()
        progress.told = functools.partial(_count, config, count, step)


def _say(error: Exception, step: int) -> None:
    logging.warning('After step %d the cluster failed (%s).', step, _line(error))


def _count(config: config_lib.Config, count: int, old: int, new: int) -> None:
    """Says where the run goes on, in the log and in TensorBoard."""
    logging.warning('Recovery %d: from step %d the run goes on at step %d.', count, old, new)
    events = writers.EventWriter(str(config.model_dir))
    events.scalars(new, {'cluster/recoveries': count})
    events.close()


def _line(error: Any) -> str:
    text = ' '.join(str(getattr(error, 'message', error)).replace('=', ' ').split())
    return text.partition(' Additional GRPC')[0][:200]
