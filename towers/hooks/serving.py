"""The hook that serves a training's variables every so many steps, and at the end."""

from typing import Protocol

import tensorflow.compat.v1 as tf

from towers.hooks import every


class Publisher(Protocol):
    """What the hook needs of what serves."""

    def build(self) -> None:
        """Adds to the current graph."""

    def begin(self, session: tf.Session) -> None:
        """The session is made and its variables are set."""

    def offer(self, step: int) -> None:
        """Serves the variables of this moment."""

    def wait(self) -> None:
        """Waits until they are served."""


class ServeHook(every.TimedHook):
    """Serves the variables at multiples of so many steps, those that the session starts from, and the last ones.

    Args:
      publisher: what serves.
      steps: so many.
      step: int64 scalar, global_step after the step.
    """

    def __init__(self, publisher: Publisher, steps: int, *, step: tf.Tensor) -> None:
        self._publisher = publisher
        self.steady_request = tf.train.SessionRunArgs(step)
        self.timer = every.Every(steps)
        self._last = 0

    def begin(self) -> None:
        """Adds to the graph."""
        self._publisher.build()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Serves what the session starts from."""
        self._publisher.begin(session)
        self._last = int(session.run(tf.train.get_global_step(session.graph)))
        self._publisher.offer(self._last)

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Serves where it is due."""
        self._last = int(run_values.results)
        if self.timer.due(self._last):
            self._publisher.offer(self._last)

    def end(self, session: tf.Session) -> None:
        """Serves the last step."""
        self._publisher.wait()
        self._publisher.offer(self._last)
        self._publisher.wait()
