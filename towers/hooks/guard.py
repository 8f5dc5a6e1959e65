"""Ends a training whose run directory is another trainer's now, before the other hooks write anything of the step."""

from collections.abc import Callable

import tensorflow.compat.v1 as tf

_EVERY_SECS = 1.0


class GuardHook(tf.train.SessionRunHook):
    """Asks after each step, and before the end of the others, whether the run directory may still be written; it comes first.

    Args:
      check: raises where it may not; called with `every_secs`, the time for which an answer is good enough.
    """

    def __init__(self, check: Callable[..., None]):
        self._check = check

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Asks once a second."""
        self._check(every_secs=_EVERY_SECS)

    def end(self, session: tf.Session) -> None:
        """Asks in any case."""
        self._check()
