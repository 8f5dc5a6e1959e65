"""A session on a server, whose steps have a limit in the runtime's own count."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers.run import signals

_CLOSE_SECS, _LOST_SECS = 30.0, 2.0  # where all machines answered, which a busy one may take long for, and where a call has failed


class RemoteSession(tf.Session):
    """A session whose prepared callables end with a DeadlineExceededError where a machine does not answer.

    The first call of each may take as long as any operation (`operation_timeout_in_ms`), since TensorFlow prepares itself.

    Args:
      target: of the server.
      graph: to run.
      proto: options, with `operation_timeout_in_ms`.
      step_secs: limit of each later call.
    """

    def __init__(self, target: str, graph: tf.Graph, proto: tf.ConfigProto, step_secs: float) -> None:
        super().__init__(target, graph=graph, config=proto)
        self._limit_ms = int(1000 * step_secs)
        self._close_secs = _CLOSE_SECS

    def close(self) -> None:
        """As in TensorFlow, but not waiting for a machine that does not answer."""
        if sys.is_finalizing():  # by the garbage collector: no thread would start any more, and the process's end closes it too
            return
        if not signals.within(self._close_secs, self._close):
            logging.info('The session is left behind, as a machine does not answer.')

    def _close(self) -> None:
        with contextlib.suppress(tf.errors.OpError):  # a machine is gone
            super().close()

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Callable[..., Any]:
        """As in TensorFlow; options given by the caller replace the limit, unless they leave it open."""
        prepared = super().make_callable(fetches, feed_list, accept_options=True)
        usual = tf.RunOptions(timeout_in_ms=self._limit_ms)
        called = False

        def call(*args: Any, options: tf.RunOptions | None = None, run_metadata: tf.RunMetadata | None = None) -> Any:
            nonlocal called
            if called and options is None:
                options = usual
            elif called and options is not None and not options.timeout_in_ms:
                limited = tf.RunOptions()
                limited.CopyFrom(options)
                limited.timeout_in_ms = self._limit_ms
                options = limited
            try:
                result = prepared(*args, options=options, run_metadata=run_metadata)
            except tf.errors.OpError:
                self._close_secs = _LOST_SECS
                raise
            called = True
            return result

        return call
