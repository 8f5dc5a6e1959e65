"""Going on after a task of the cluster was lost: wait for it, connect anew, and train on where the variables are whole."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors
from towers.checkpoint import manifest, saver
from towers.cluster import spec
from towers.hooks import rejoin
from towers.jobs import connecting
from towers.run import rescue, signals, writers

_ANY = (tf.errors.OpError, errors.Stalled, manifest.CheckpointError)
_LONGEST_PAUSE_SECS = 30.0
_LOOK_SECS = 0.5
_EXIT_FAILED = 1


class Stopped(Exception):
    """The run is to stop, and this attempt has touched nothing yet that an earlier one has left."""


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
      step, rate: give the last whole step, and the examples per second of the last attempt.
      first: step at which the first attempt began; None before.
      retire: ends what saves in the present attempt, unless a save is under way, which it says.
      saving: held while `save` is called.
      save: saves what the last attempt's lost session has left, and returns where the newest checkpoint stands; None before there is any.
      told: is given the step at which the next attempt begins, once.
    """

    step: Callable[[], int] = lambda: 0
    rate: Callable[[], float] = lambda: 0.0
    first: int | None = None
    save: Callable[[connecting.Link], Reached] | None = None
    retire: Callable[[], bool] = lambda: True
    saving: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    told: Callable[[int], None] | None = None

    def saves_by(self, keeper: saver.Saver) -> None:
        """An attempt has something that saves."""
        self.retire = keeper.retire

    def begins(self, step: int) -> None:
        """An attempt's variables are set, to a step."""
        self.first = step if self.first is None else self.first
        told, self.told = self.told, None
        if told is not None:
            told(step)


def lasting(
    attempt: Callable[[connecting.Site], Reached],
    link: connecting.Link | None,
    config: config_lib.Config,
    progress: Progress,
    stop: threading.Event,
) -> Reached:
    """Trains, and again where a task was lost meanwhile. Where the run is to stop behind a failure, it saves what is left and ends.

    Args:
      attempt: trains on a site, and says to `progress` from which step on.
      link: to the other tasks; None = there are none, and `attempt` is called once on this machine.
      config: `max_recoveries` and `model_dir`.
      progress: of the attempt.
      stop: ends the waits when set.

    Returns:
      What `attempt` returned, or where the newest checkpoint stands.

    Raises:
      ClusterError: a task did not come back, or too many recoveries led no further; what is left is saved.
      ValueError: a task has come back that can't take part; what is left is saved.
      Exception: what `attempt` raised for another reason.
    """
    if link is None:
        return attempt(connecting.local(config))
    with _Leaver(link, config, progress, stop):
        return _attempts(attempt, link, config, progress, stop)


class _Leaver(contextlib.AbstractContextManager):
    """Ends the process, saved, where the run is to stop and the `with` block waits for machines that do not answer.

    After half of the grace period the step in flight is given up: its update, should it come so far, finds the variables taken over.
    """

    def __init__(self, link: connecting.Link, config: config_lib.Config, progress: Progress, stop: threading.Event) -> None:
        self._link, self._progress, self._stop, self._patience = link, progress, stop, config.grace_secs / 2
        self._over = threading.Event()

    def __enter__(self) -> '_Leaver':
        threading.Thread(target=self._watch, name='towers-leaver', daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        with self._progress.saving:  # where the thread has begun it ends the process
            pass

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECS):
            if self._over.is_set():
                return
        if self._over.wait(self._patience):
            return
        while not self._over.wait(_LOOK_SECS):
            if self._progress.save is not None and self._progress.saving.acquire(blocking=False):
                self._leave()
                self._progress.saving.release()

    def _leave(self) -> None:
        """Saves what is left and ends the process; does nothing where the training does so itself."""
        if self._over.is_set() or self._progress.save is None or not self._progress.retire():
            return
        code, text = rescue.EXIT_STOPPED, 'The step in flight is given up. Stopped by a signal {}; run the same command again to go on.'
        try:
            step = self._progress.save(self._link).step
            text = text.format(f'after step {step}, which is saved' if step else 'with nothing saved')
        except Exception as error:  # nobody else can save any more
            code, text = _EXIT_FAILED, line(error)
        signals.within(1.0, lambda: logging.warning('%s', text))
        signals.leave(code)


def _attempts(
    attempt: Callable[[connecting.Site], Reached],
    link: connecting.Link,
    config: config_lib.Config,
    progress: Progress,
    stop: threading.Event,
) -> Reached:
    """As `lasting`, with other tasks."""
    count, in_a_row, furthest = 0, 0, -1
    while True:
        try:
            return attempt(link.site(config))
        except rejoin.Rejoin:
            link.rejoin()
            continue
        except Stopped:
            return _left(progress, link)
        except _ANY as error:
            step, known = progress.step(), isinstance(error, errors.OF_TASKS)
            if known:
                _say(error, step)  # at once, since whoever is frozen takes its time not to answer
            lost = {} if known and stop.is_set() else link.lost()
            if not (lost or known):
                raise
            if not known:
                _say(error, step)
            in_a_row = 1 if step > furthest else in_a_row + 1
            furthest, count, last = max(step, furthest), count + 1, error
        if stop.is_set():
            return _left(progress, link)
        _tell(lost)
        try:
            if in_a_row > config.max_recoveries:
                _give_up(config, furthest, last)
            stop.wait(min(_LONGEST_PAUSE_SECS, 2.0 ** (in_a_row - 2)) if in_a_row > 1 else 0)
            link.back()
        except (spec.ClusterError, ValueError) as error:
            kind = spec.ClusterError if isinstance(error, spec.ClusterError) else ValueError
            raise kind(f'{error} {_saved(progress, link)}') from error
        if stop.is_set():
            return _left(progress, link)
        progress.told = functools.partial(_count, config, count, step)


def _left(progress: Progress, link: connecting.Link) -> Reached:
    """Saves what is left; where the run then stands."""
    with progress.saving:
        return start(None) if progress.save is None else dataclasses.replace(progress.save(link), examples_per_sec=progress.rate())


def _saved(progress: Progress, link: connecting.Link) -> str:
    """Saves what is left, and says what there is."""
    try:
        step = _left(progress, link).step
    except manifest.CheckpointError as error:
        return str(error)
    return f'Step {step} is saved; run the same command again to go on.' if step else 'Nothing is saved.'


def _tell(lost: Mapping[spec.Task, str]) -> None:
    if lost:
        logging.warning('Lost: %s. Waiting for all tasks.', '; '.join(f'{task} ({why})' for task, why in lost.items()))
    else:
        logging.warning('All tasks answer, and are the same as before: making a new session with them.')


def _give_up(config: config_lib.Config, furthest: int, error: Exception) -> NoReturn:
    raise spec.ClusterError(
        f'{config.max_recoveries} recoveries in a row came no further than step {furthest} (--max_recoveries); the last error: '
        f'{line(error)}.'
    ) from error


def _say(error: Exception, step: int) -> None:
    logging.warning('After step %d the cluster failed (%s).', step, line(error))


def _count(config: config_lib.Config, count: int, old: int, new: int) -> None:
    """Says where the run goes on, in the log and in TensorBoard."""
    logging.warning('Recovery %d: from step %d the run goes on at step %d.', count, old, new)
    events = writers.EventWriter(str(config.model_dir))
    events.scalars(new, {'cluster/recoveries': count})
    events.close()


def line(error: Any) -> str:
    """The first sentence of an error, in one line."""
    return errors.brief(str(getattr(error, 'message', error)))[:200].rstrip('.')
