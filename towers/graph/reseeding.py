"""An initial value that a model has made of random operations, made again with other seeds. Part of the stage `variables`.

TensorFlow seeds such an operation by how many were made before it, so the value would depend on everything that stands
before it in the graph, the number of towers included.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

_SEEDS = ('seed', 'seed2')


def reseeded(value: tf.Tensor, seed: int) -> tf.Tensor:
    """A value whose draws depend on `seed` alone; `value` itself where it draws nothing.

    Only what depends on a draw is made again. A draw inside a function is left as it is, and so is a value taken from another
    variable, such as a moving average's first one: that variable's own draws have been seen to.

    Args:
      value: a tensor of the current graph.
      seed: what the draws shall depend on, besides their order.
    """
    copied = _drawn(value)
    if value.op not in copied:
        return value
    definition = tf.GraphDef(versions=value.graph.graph_def_versions)
    given: dict[str, tf.Tensor] = {}
    for order, op in enumerate(copied):
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop('_class', None)
        if _draws(op):
            node.attr['seed'].i, node.attr['seed2'].i = seed, order
        node.input[:] = [tensor.name for tensor in op.inputs]
        given.update({tensor.name: tensor for tensor in op.inputs if tensor.op not in copied})
    [made] = tf.import_graph_def(definition, given, [value.name], name='initial')
    return made


def _draws(op: tf.Operation) -> bool:
    return all(name in op.node_def.attr for name in _SEEDS)


def _drawn(value: tf.Tensor) -> Sequence[tf.Operation]:
    """The draws that `value` is made of and what lies between them and `value`, in an order in which they can be made."""
    found: dict[tf.Operation, bool] = {}
    waiting = [value.op]
    while waiting:
        op = waiting[-1]
        open_inputs = [tensor.op for tensor in op.inputs if tensor.op not in found]
        if open_inputs:
            waiting.extend(open_inputs)
            continue
        waiting.pop()
        found[op] = _draws(op) or any(found[tensor.op] for tensor in op.inputs)
    if any(op.type == 'VarHandleOp' for op in found):
        return []
    return [op for op, drawn in found.items() if drawn]
