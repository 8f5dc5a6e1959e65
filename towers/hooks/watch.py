"""The two hooks that tell a watch what the loop is doing: one before all others, one between the user's and ours."""

from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from towers.hooks import looks


class Watch(Protocol):
    """What the hooks need of a watch."""

    @property
    def steps(self) -> Any:
        """How many steps have ended as `done`, and the last one's number as `number`, both to be counted up at each quiet step."""

    def step_begins(self) -> None:
        """A step begins, or several quiet ones."""

    def step_ends(self, step: int) -> None:
        """The step ended, and the hooks are called."""

    def steps_end(self, made: int) -> None:
        """So many quiet steps ended."""

    def held_back(self) -> None:
        """The step that ended last was none."""

    def calls_hooks(self) -> None:
        """The hooks are called, the user's first."""

    def saves(self) -> None:
        """The run's own hooks are called, which report and save."""


class StepHook(tf.train.SessionRunHook):
    """Says when a step begins and ends; it must stand before all others."""

    def __init__(self, watch: Watch, step: tf.Tensor, seen: looks.Looks | None = None) -> None:
        """Tells `watch`, and `seen` of what was fetched; `step` is the int64 scalar global_step after the step."""
        self._watch = watch
        self._seen = seen or looks.Looks()
        self._request = tf.train.SessionRunArgs(step)
        self.quiet = watch

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs:
        """Says that a step begins."""
        self._watch.step_begins()
        return self._request

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Says that it ended."""
        self._seen.fetched()
        self._watch.step_ends(int(run_values.results))

    def held_back(self, session: tf.Session) -> None:
        """Takes back that the step before was another one."""
        self._watch.held_back()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Says that the hooks are called."""
        self._watch.calls_hooks()

    def end(self, session: tf.Session) -> None:
        """Says that the hooks are called."""
        self._watch.calls_hooks()


class SavingHook(tf.train.SessionRunHook):
    """Says that the user's hooks are through; it must stand after them and before those that write."""

    def __init__(self, watch: Watch) -> None:
        """Tells `watch`."""
        self._watch = watch

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Says that our own hooks follow."""
        self._watch.saves()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Says that our own hooks follow."""
        self._watch.saves()

    def end(self, session: tf.Session) -> None:
        """Says that our own hooks follow."""
        self._watch.saves()
