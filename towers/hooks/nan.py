"""What a step that is not finite does to the training; the gate has held it back, so it changed nothing."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors

_REMEDY = 'Use a lower --learning_rate, --clip_norm or --warmup, mend the data, or go past it with --nan_policy=skip.'


class NanHook(tf.train.SessionRunHook):
    """Stops at a step that is not finite, or goes on with the next batch, from here or from a checkpoint.

    It goes past `nan_limit` such steps in a row. A row ends with a step further than any before, so neither one step nor
    one checkpoint is tried for ever. It must stand before the hooks that report and save.

    Args:
      report: each step's: step, and skipped, the number of steps held back.
      counters: the variables behind `skipped` and `step`.
      config: `nan_policy` and `nan_limit`.
      explain: (session, number of the step) -> what was not finite, in a sentence or two.
      rollback: sets the variables as in the newest checkpoint and returns its step; for that policy.
    """

    def __init__(
        self,
        report: Mapping[str, tf.Tensor],
        counters: Sequence[tf.Variable],
        config: config_lib.RunConfig,
        *,
        explain: Callable[[tf.Session, int], str],
        rollback: Callable[[tf.Session], int] | None = None,
    ) -> None:
        self.steady_request = tf.train.SessionRunArgs((report['skipped'], report['step']))
        self._counters = counters
        self._config = config
        self._explain = explain
        self._rollback = rollback
        self._skipped = 0
        self._furthest = 0  # the last step tried at which something was not finite
        self._in_a_row = 0

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads how many were held back before."""
        self._skipped = int(session.run(self._counters)[0])

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Acts where the counter has gone up.

        Raises:
          Diverged: by policy, or above the limit.
        """
        self._look(run_context.session, *run_values.results)

    def held_back(self, session: tf.Session) -> None:
        """Acts where the counter has gone up, after a step of which hooks were not told; raises as `after_run`."""
        self._look(session, *session.run(self._counters))

    def _look(self, session: tf.Session, skipped: int, step: int) -> None:
        if skipped != self._skipped:
            self._skipped = int(skipped)
            self._meet(session, int(step) + 1)

    def _meet(self, session: tf.Session, number: int) -> None:
        self._in_a_row = 1 if number > self._furthest else self._in_a_row + 1
        self._furthest = max(number, self._furthest)
        text = self._explain(session, number)
        if self._config.nan_policy == 'stop':
            raise errors.Diverged(f'{text} {_REMEDY}')
        limit = self._config.nan_limit
        if self._in_a_row > limit:
            raise errors.Diverged(f'{text} That is one more than --nan_limit={limit} in a row. {_REMEDY}')
        how = f'{self._in_a_row} in a row of at most {limit}, {self._skipped} in all'
        if self._rollback is None:
            logging.warning('%s The step is left out and the next batch taken (%s).', text, how)
        else:
            logging.warning('%s Going back to step %d and on with the next batch (%s).', text, self._rollback(session), how)
