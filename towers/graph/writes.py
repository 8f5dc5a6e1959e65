"""A model's own writes to its state, found behind UPDATE_OPS: they are read, not run. Part of the stage `build`."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import structs, upstream

_WRITES = {
    'AssignVariableOp': 'assign',
    'AssignAddVariableOp': 'assign_add',
    'AssignSubVariableOp': 'assign_sub',
}
_SPARSE_WRITES = ('ResourceScatter', 'ResourceStridedSliceAssign')
_CALLS = frozenset({'If', 'While', 'Case', 'PartitionedCall', 'StatefulPartitionedCall'})
_PLAIN = 'add a plain assign, assign_add or assign_sub to tf.GraphKeys.UPDATE_OPS that the loss does not need.'


def ancestors(ops: Sequence[tf.Operation], *, through_writes: bool = True) -> set[tf.Operation]:
    """The operations that these need, themselves included.

    Args:
      ops: where to start.
      through_writes: False leaves out what a write needs.
    """
    found = upstream.of(ops, lambda op: upstream.needs(op) if through_writes or op.type not in _WRITES else ())
    return set(found.values())


def read(updates: Sequence[Any], loss_needs: set[tf.Operation]) -> tuple[structs.StateWrite, ...]:
    """The writes behind the entries of UPDATE_OPS, each once.

    Args:
      updates: operations and tensors, as models put them into the collection.
      loss_needs: the ancestors of the loss.

    Raises:
      ValueError: an entry writes nothing, hides its write, or writes something else than state that towers share; or
        the loss depends on a write.
    """
    hiding = _Hiding()
    local = {variable.handle.name for variable in _resources(tf.local_variables())}
    for op in loss_needs:
        if (op.type in _WRITES and op.inputs[0].name not in local) or hiding.holds(op):
            raise ValueError(f'The loss depends on the write {op.name!r}, which N towers would make N times; {_PLAIN}')
    found = dict.fromkeys(write for update in updates for write in _behind(getattr(update, 'op', update), hiding))
    owners = {variable.handle.name: variable for variable in _resources(tf.global_variables())}
    return tuple(_state_write(write, owners.get(write.inputs[0].name)) for write in found)


def _resources(variables: Sequence[tf.Variable]) -> Iterator[tf.Variable]:
    return (variable for variable in variables if hasattr(variable, 'handle'))


def _behind(update: tf.Operation, hiding: '_Hiding') -> list[tf.Operation]:
    """The assign operations that running `update` would run, by name."""
    needs = ancestors([update], through_writes=False)
    hidden = sorted(f'{op.name!r} ({op.type})' for op in needs if hiding.holds(op))
    found = sorted((op for op in needs if op.type in _WRITES), key=lambda op: op.name)
    if hidden:
        raise ValueError(f'The update {update.name!r} holds no write to a variable that Towers can read, hidden in {hidden[0]}; {_PLAIN}')
    if not found:
        raise ValueError(f'The update {update.name!r} holds no write to a variable that Towers can read; {_PLAIN}')
    return found


def _state_write(write: tf.Operation, variable: tf.Variable | None) -> structs.StateWrite:
    if variable is None or variable.trainable:
        what = 'no global variable' if variable is None else f'the trainable variable {variable.op.name!r}'
        raise ValueError(
            f'The update {write.name!r} writes {what}; expected one made with trainable=False that all towers share. '
            'The optimizer alone changes a trainable one; it can be a link that changes its gradient.'
        )
    return structs.StateWrite(variable, _WRITES[write.type], write.inputs[1])


class _Hiding:
    """Which operations write to a variable in a way that can't be read; it looks into functions only where it must."""

    def holds(self, op: tf.Operation) -> bool:
        if op.type.startswith(_SPARSE_WRITES):
            return True
        takes_variable = op.type in _CALLS and any(tensor.dtype == tf.resource for tensor in op.inputs)
        return takes_variable and not self._writers.isdisjoint(_called(op.node_def))

    @functools.cached_property
    def _writers(self) -> set[str]:
        """Names of the graph's functions that write, or call one that does."""
        functions = {function.signature.name: function for function in tf.get_default_graph().as_graph_def().library.function}
        calls = {name: {callee for node in function.node_def for callee in _called(node)} for name, function in functions.items()}
        writers = {name for name, function in functions.items() if any(_is_write(node.op) for node in function.node_def)}
        while more := {name for name, callees in calls.items() if callees & writers} - writers:
            writers |= more
        return writers


def _is_write(kind: str) -> bool:
    return kind in _WRITES or kind.startswith(_SPARSE_WRITES)


def _called(node: tf.NodeDef) -> set[str]:
    """The functions that a node calls."""
    attributes = node.attr.values()
    return {a.func.name for a in attributes if a.func.name} | {f.name for a in attributes for f in a.list.func}
