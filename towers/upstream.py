"""Following a graph against its edges."""

from collections.abc import Callable, Iterable

import tensorflow.compat.v1 as tf


def needs(operation: tf.Operation) -> list[tf.Operation]:
    """The operations that one waits for: those of its inputs, then those of its control inputs."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def of(operations: Iterable[tf.Operation], leads_to: Callable[[tf.Operation], Iterable[tf.Operation]] = needs) -> dict[str, tf.Operation]:
    """Operations of one graph and all that they lead to, each once, by name.

    Args:
      operations: where to start.
      leads_to: where to go on from an operation.
    """
    found: dict[str, tf.Operation] = {}
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting.extend(leads_to(operation))
    return found
