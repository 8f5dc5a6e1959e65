"""When training ends: at a step, after some time, or when somebody says so.

Each hook says in `stopped_by` why; the session takes it from the first one that asks to stop.
"""

import threading
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf
from absl import logging


class StopAtStep(tf.train.SessionRunHook):
    """Stops when global_step has reached a step; where it has at the start, no step is made."""

    stopped_by = 'steps'

    def __init__(self, last_step: int, *, step: tf.Tensor, global_step: tf.Variable) -> None:
        """Stops after the step numbered `last_step`.

        Args:
          last_step: the step to reach.
          step: int64 scalar, global_step after the step.
          global_step: the step variable, read once at the start.
        """
        self._last_step = last_step
        self._global_step = global_step
        self.steady_request = tf.train.SessionRunArgs(step)

    def steps_until_due(self, step: int) -> int:
        """How many steps are left after `step`."""
        return self._last_step - step

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Stops where the step was reached before."""
        if session.run(self._global_step) >= self._last_step:
            coord.request_stop()

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Stops where the step is reached."""
        if run_values.results >= self._last_step:
            run_context.request_stop()


class StopAfterSecs(tf.train.SessionRunHook):
    """Stops after the step in which the time is over, counted from `begin`."""

    stopped_by = 'time'

    def __init__(self, secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Stops after `secs` seconds of `clock`."""
        self._secs = secs
        self._clock = clock
        self._deadline = float('inf')

    def begin(self) -> None:
        """Starts the time."""
        self._deadline = self._clock() + self._secs

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Stops where the time is over."""
        if self._clock() >= self._deadline:
            run_context.request_stop()


class StopEarly(tf.train.SessionRunHook):
    """Stops where there is a reason that training has done enough, which is asked for now and then."""

    stopped_by = 'early_stop'

    def __init__(self, reason: Callable[[], str], *, every_secs: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Stops when `reason` says something; where it does at the start, no step is made.

        Args:
          reason: why, in words; empty while there is none.
          every_secs: seconds of `clock` between two questions.
          clock: seconds that only grow.
        """
        self._reason = reason
        self._every_secs = every_secs
        self._clock = clock
        self._asked = float('-inf')

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Stops where there was a reason before."""
        if self._is_enough():
            coord.request_stop()

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Stops where there is a reason."""
        if self._clock() - self._asked >= self._every_secs and self._is_enough():
            run_context.request_stop()

    def _is_enough(self) -> bool:
        self._asked = self._clock()
        return is_enough(self._reason)


def is_enough(reason: Callable[[], str]) -> bool:
    """Whether there is a reason that training has done enough, which is logged."""
    text = reason()
    if text:
        logging.info('Training ends early (--early_stop): %s.', text)
    return bool(text)


class StopWhen(tf.train.SessionRunHook):
    """Stops after the step in which an event was set by another thread, such as the one that handles signals."""

    stopped_by = 'signal'

    def __init__(self, event: threading.Event) -> None:
        """Stops when `event` is set; where it is at the start, no step is made."""
        self._event = event

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Stops where the event is set."""
        if self._event.is_set():
            coord.request_stop()

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Stops where the event is set."""
        if self._event.is_set():
            run_context.request_stop()
