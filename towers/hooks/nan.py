"""Stops a training whose loss is not a finite number."""

import math
from collections.abc import Mapping

import tensorflow.compat.v1 as tf

from towers import errors


class NanHook(tf.train.SessionRunHook):
    """Fails at the first step whose loss or penalty is not finite.

    It must stand before the hook that saves, so that no checkpoint is made of that step's variables.
    """

    def __init__(self, report: Mapping[str, tf.Tensor]) -> None:
        """Looks at each step's `report`: step, loss, total_loss (loss and penalty)."""
        self._request = tf.train.SessionRunArgs((report['total_loss'], report['step'], report['loss']))

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs:
        """Asks for the loss."""
        return self._request

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Raises `errors.Diverged` where the loss is not finite."""
        total, step, loss = run_values.results
        if not math.isfinite(total):
            raise errors.Diverged(
                f'The loss of step {step} is {loss}, and {total} with the penalty, but must be finite; '
                'use a lower --learning_rate, --clip_norm or --warmup, or look for bad values in the data.'
            )
