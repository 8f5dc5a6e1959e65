"""Leaves the loop behind a checkpoint when machines that were lost are there again."""

import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf
from absl import logging

_LOOK_SECS = 1.0


class Rejoin(Exception):
    """Machines are back, and a checkpoint is there to go on from with them."""


class RejoinHook(tf.train.SessionRunHook):
    """Raises `Rejoin` at the first checkpoint that is saved after lost machines have come back.

    Args:
      returned: whether any is back.
      saved: step of the newest checkpoint.
      clock: seconds that never go back.
    """

    def __init__(self, returned: Callable[[], bool], saved: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._returned, self._saved, self._clock = returned, saved, clock
        self._looked = clock()
        self._since: int | None = None

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Looks once a second."""
        now = self._clock()
        if now - self._looked < _LOOK_SECS:
            return
        self._looked = now
        if not self._returned():
            self._since = None
        elif self._since is None:
            self._since = self._saved()
            logging.info('A machine is back; it takes part from the next checkpoint on.')
        elif self._saved() > self._since:
            raise Rejoin
