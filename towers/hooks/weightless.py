"""Ends a training whose batches have no weight any more: such a step changes nothing, so its end would never come."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

LIMIT = 100  # steps in a row; one pass or another may well begin with some


class WeightlessHook(tf.train.SessionRunHook):
    """Warns of the first step of weight 0, and stops at the hundredth in a row; steps that were not finite are not meant.

    Args:
      report: each step's: step, and skipped, the number of steps held back for not being finite.
      counters: the variables behind the two.
      limit: how many in a row are too many.
      held_back: whether the last step was held back though the call made others before it.
    """

    def __init__(
        self,
        report: Mapping[str, tf.Tensor],
        counters: Sequence[tf.Variable],
        *,
        limit: int = LIMIT,
        held_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self.steady_request = tf.train.SessionRunArgs((report['step'], report['skipped']))
        self._counters = tuple(counters)
        self._limit, self._held_back = limit, held_back
        self._before: Any = None
        self._in_a_row = 0
        self._warned = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads where the training begins."""
        self._before = session.run(self._counters)

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Counts a step that changed neither counter.

        Raises:
          ValueError: it is one too many.
        """
        self._look(run_values.results)

    def held_back(self, session: tf.Session) -> None:
        """Counts a step of which hooks were not told; raises as `after_run`."""
        self._look(session.run(self._counters))

    def _look(self, now: Any) -> None:
        if now != self._before:
            is_weightless = now[1] == self._before[1] and self._held_back()
            self._before, self._in_a_row = now, 0
            if not is_weightless:
                return
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise ValueError(
                f'The last {self._in_a_row} batches after step {now[0]} had weight 0, so there was nothing to learn from them; expected '
                'a ModelOutput.weight above 0 in some. Look at what the model counts (a mask, an ignored label), and leave such data out.'
            )
        if not self._warned:
            self._warned = True
            logging.warning('The batch after step %d has weight 0: it changes nothing and is no step; the next one is taken.', now[0])
