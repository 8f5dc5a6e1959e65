"""A training that a signal ends while its input gives nothing: the step in flight would never end, so the one before is saved.

A step changes nothing before its batch is there. So another thread can save what the last finished step left, and end
the process; the step that waits is lost and nothing else.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import errors
from towers.run import signals

EXIT_STOPPED = 75
_LOOK_SECS = 0.5
_PATIENCE_SECS = 3.0  # of a step without its batch, after the signal


class Rescue(contextlib.AbstractContextManager):
    """Looks, once `stop` is set, whether the loop in the `with` block waits for its input, and ends the process then.

    Args:
      stop: set by a signal.
      waits: whether the step in flight has no batch yet.
      reached: the last finished step; 0 = there is nothing to save.
      save: saves that step while its argument holds; whether it did.
      begin: called once when `stop` is set.
    """

    def __init__(
        self,
        stop: threading.Event,
        *,
        waits: Callable[[], bool],
        reached: Callable[[], int],
        save: Callable[[Callable[[], bool]], bool],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self._stop, self._waits, self._reached, self._save, self._begin = stop, waits, reached, save, begin
        self._over = threading.Event()

    def __enter__(self) -> 'Rescue':
        threading.Thread(target=self._watch, name='towers-rescue', daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    def _watch(self) -> None:
        waited, has_begun = 0.0, False
        while not self._over.wait(_LOOK_SECS):
            if self._stop.is_set() and not has_begun:
                has_begun = True
                self._tell()
            waited = waited + _LOOK_SECS if has_begun and self._waits() else 0.0
            if waited >= _PATIENCE_SECS:
                waited = 0.0
                self._end()

    def _tell(self) -> None:
        try:
            self._begin()
        except (tf.errors.OpError, RuntimeError) as error:  # the session is closed, or does not answer
            logging.info('The call in flight ends by itself (%s).', errors.brief(str(error)))

    def _end(self) -> None:
        step = self._reached()
        try:
            if step and not self._save(self._waits):
                return  # the batch has come: the training ends by itself
        except Exception as error:  # the step may still end, or the grace period does
            logging.warning('The input gives nothing, and step %d could not be saved (%s).', step, errors.brief(str(error)))
            return
        saved = f'after step {step}, which is saved' if step else 'before the first step: nothing to save'
        text = f'The input gives nothing. Stopped by a signal {saved}; run the same command again to go on.'
        signals.within(1.0, lambda: logging.warning('%s', text))
        signals.leave(EXIT_STOPPED)
