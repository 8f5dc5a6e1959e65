"""What an event file begins with: where this session starts, and its graph."""

from collections.abc import Callable

import tensorflow.compat.v1 as tf


class StartHook(tf.train.SessionRunHook):
    """Reports, when the session has been made, the step that it starts from and its graph, each once.

    It must stand before all hooks that write events, since TensorBoard drops what is older in time and later in steps.
    """

    def __init__(self, global_step: tf.Variable, *, start: Callable[[int], None], graph: Callable[[tf.Graph], None]) -> None:
        """Reports to two functions, such as `writers.EventWriter.start` and `writers.EventWriter.graph`."""
        self._global_step = global_step
        self._start = start
        self._graph = graph

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reports the step and the graph."""
        self._start(int(session.run(self._global_step)))
        self._graph(session.graph)
