"""The hook that evaluates between two steps, by steps and at the end."""

from collections.abc import Callable
from typing import Protocol

import tensorflow.compat.v1 as tf

from towers.hooks import every, stop


class Evaluations(Protocol):
    """What the hook needs of what evaluates."""

    def build(self) -> None:
        """Adds to the current graph."""

    def begin(self, session: tf.Session, step: int) -> None:
        """The session is made, its variables are those of `step`, and what was found of later steps is void."""

    def evaluate(self, step: int) -> None:
        """Evaluates the variables of `step`, unless that was done."""

    def go_back(self, step: int) -> None:
        """What was found of steps after `step` is void."""


class EvaluateHook(every.TimedHook):
    """Evaluates at multiples of so many steps, and the last step at a clean end; it comes after the hook that saves.

    A session that starts from such a step evaluates it where that wasn't done, as after a kill.

    Args:
      evaluations: what evaluates.
      steps: so many.
      step: int64 scalar, global_step after the step.
      enough: why training ends early by the results, in words; empty while it goes on.
      final: asked at the end: whether the run is done.
    """

    stopped_by = 'early_stop'

    def __init__(
        self, evaluations: Evaluations, steps: int, *, step: tf.Tensor, enough: Callable[[], str], final: Callable[[], bool]
    ) -> None:
        self._evaluations, self._steps = evaluations, steps
        self._enough, self._final = enough, final
        self.steady_request = tf.train.SessionRunArgs(step)
        self.timer = every.Every(steps)
        self._last: int | None = None
        self._evaluated: int | None = None

    def begin(self) -> None:
        """Adds to the graph."""
        self._evaluations.build()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Evaluates the step that the session starts from where it is due."""
        step = int(session.run(tf.train.get_global_step(session.graph)))
        self._evaluations.begin(session, step)
        if step and step % self._steps == 0 and not coord.should_stop():
            self._evaluations.evaluate(step)

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Evaluates where it is due, and stops where the results say so."""
        self._last = int(run_values.results)
        if self.timer.due(self._last):
            self._evaluated = self._last
            self._evaluations.evaluate(self._last)
            if stop.is_enough(self._enough):
                run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Evaluates the last step of a run that is done."""
        if self._last not in (None, self._evaluated) and self._final():
            self._evaluations.evaluate(self._last or 0)

    def went_back(self, step: int) -> None:
        """Takes the steps after `step` as new ones."""
        super().went_back(step)
        self._evaluations.go_back(step)
