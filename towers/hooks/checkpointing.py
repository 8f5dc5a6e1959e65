"""The hook that saves checkpoints by steps and by seconds."""

import time
from collections.abc import Callable
from typing import Protocol

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.hooks import every

_LONG_SECS = 600.0
_SAVE_STEPS = 100


class Saver(Protocol):
    """What the hook needs of a saver."""

    @property
    def busy(self) -> bool:
        """Whether the last save is still being written."""

    @property
    def spent(self) -> float:
        """Processor seconds that the last write took."""

    def prepare(self, session: tf.Session) -> None:
        """Called once, before the first step."""

    def save(self, session: tf.Session, *, final: bool = False, last: bool = False) -> None:
        """Saves the state of this moment."""


class CheckpointHook(every.TimedHook):
    """Saves at every multiple of `save_steps`, after every `save_secs`, and at the end.

    Where neither is given it saves at multiples of 100 steps, or less often where that would take more than 0.15 % of the time.
    Nothing is saved before a first interval has passed. A save that is due while the last one is still being written is
    put off to the first step after it, so no step waits for the disk.

    Args:
      saver: what saves.
      step: int64 scalar, global_step after the step.
      config: `save_steps` and `save_secs`; 0 = not by that.
      final: asked at the end: whether the run is done, so that its checkpoint is marked as the final one.
      clock: seconds that never go back.
    """

    def __init__(
        self,
        saver: Saver,
        step: tf.Tensor,
        *,
        config: config_lib.CheckpointConfig,
        final: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._saver = saver
        self.steady_request = tf.train.SessionRunArgs(step)
        self._final = final
        by_default = config.save_steps is None and not config.save_secs
        self.timer = every.Every(
            _SAVE_STEPS if by_default else config.save_steps, config.save_secs, clock, share=every.SHARE if by_default else None
        )
        self._clock = clock
        self._owed_since: float | None = None
        self._stepped = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Makes the saver ready."""
        del coord
        self._saver.prepare(session)

    def owes(self) -> None:
        """Says that the session began behind the newest checkpoint, so that there is something to save before any step."""
        self._stepped = True

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Saves when it is due."""
        step = int(run_values.results)
        self._stepped = self._stepped or step > 0  # step 0 again: the first one was held back, so nothing has changed
        if self.timer.due(step) and self._stepped and self._owed_since is None:
            self._owed_since = self._clock()
        if self._owed_since is None:
            return
        if not self._saver.busy:
            started = self._clock()
            self._saver.save(run_context.session)
            self._owed_since = None
            self.timer.took(self._clock() - started + self._saver.spent)  # the write before this one, whose end is known
        elif self._clock() - self._owed_since > _LONG_SECS:
            logging.warning('A checkpoint is due and the one before it has not been written for %.0f s; is the disk slow?', _LONG_SECS)
            self._owed_since = self._clock()

    def end(self, session: tf.Session) -> None:
        """Saves the last step and waits until it is published; a run that made no step and isn't done has nothing to save."""
        final = self._final()
        if self._stepped or final:
            self._saver.save(session, final=final, last=True)
