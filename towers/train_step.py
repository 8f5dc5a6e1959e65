"""One training step from its updates: what is applied, in which order, and what is reported of it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import structs

# TensorFlow's own hooks read the step through this collection; a read that is ordered with the update keeps theirs right.
_STEP_READS = 'global_step_read_op_cache'

Apply = Callable[[structs.Update, Sequence[tf.Tensor]], tf.Operation]


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a run counts; both variables are in every checkpoint.

    Attributes:
      global_step: int64 variable, updates applied.
      examples_seen: int64 variable, examples in the batches of those updates.
      step: int64 scalar, global_step read before the update.
      examples: int64 scalar, examples_seen read before the update.
    """

    global_step: tf.Variable
    examples_seen: tf.Variable
    step: tf.Tensor
    examples: tf.Tensor


def counters(device: str) -> Counters:
    """Makes the counters and their reads, which come before every model and input."""
    with tf.device(device):
        global_step = tf.train.get_or_create_global_step()
        examples_seen = tf.get_variable(
            'examples_seen', [], tf.int64, initializer=tf.zeros_initializer(), trainable=False, use_resource=True
        )
        with tf.name_scope('counters'):  # A model's variable that is named as an operation outside all scopes would be renamed.
            step = global_step.read_value() + 0
            tf.add_to_collection(_STEP_READS, step)
            return Counters(global_step, examples_seen, step, examples_seen.read_value())


def make(
    total: structs.Sum,
    updates: Sequence[structs.Update],
    count: Counters,
    *,
    apply: Apply,
    report: Mapping[str, tf.Tensor],
) -> tuple[tf.Operation, dict[str, tf.Tensor], tf.Operation]:
    """The operation of one whole step: updates, then state, then the counters, behind one gate.

    Args:
      total: the chained total; a weight that is not known to be above 0 makes the gate.
      updates: one for each copy of the variables.
      count: the run's counters.
      apply: makes one update's operation, after the given readers of the old values.
      report: name -> scalar computed from the old values.

    Returns:
      (the step's operation, `report` with step, examples and examples_seen added, the operation that sets all copies
      from the canonical variables)
    """
    writes = [w for update in updates for w in update.state]
    counts = [count.step, count.examples, tf.get_default_graph().as_graph_element(count.global_step)]
    readers = [*report.values(), *counts, *[w.value for w in writes]]
    made: list[list[tf.Variable]] = []

    def change() -> tf.Operation:
        applied = []
        for update in updates:
            slots: list[tf.Variable] = []
            with contextlib.ExitStack() as scopes:
                with tf.init_scope():  # Slots are made in the outer graph, also from inside a gate.
                    scopes.enter_context(_recording(slots))
                applied.append(apply(update, readers))
            made.append(slots)
        with tf.control_dependencies([*applied, *_written(writes, applied)]), tf.name_scope('count'):
            return tf.group(
                count.global_step.assign_add(1, read_value=False),
                count.examples_seen.assign_add(total.examples, read_value=False),
                name='step',
            )

    gate = _gate(total)
    operation, advanced = (change(), tf.constant(1, tf.int64)) if gate is None else (_gated(gate, change), tf.cast(gate, tf.int64))
    with tf.name_scope('report'):
        counted = {
            'step': count.step + advanced,
            'examples': total.examples,
            'examples_seen': count.examples + total.examples * advanced,
        }
    return operation, {**counted, **report}, _sync(updates, made)


def _written(writes: Sequence[structs.StateWrite], applied: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The writes of moving statistics after the update, each on its variable's device, those of one variable in order."""
    last: dict[str, tf.Operation] = {}
    with tf.name_scope('state'):
        for write in writes:
            variable, name = write.variable, write.variable.handle.name
            before = [last[name]] if name in last else applied
            with tf.device(variable.device), tf.control_dependencies(before):
                last[name] = getattr(variable, write.kind)(write.value, read_value=False)
    return list(last.values())


def saved() -> dict[str, tf.Variable]:
    """The variables of a checkpoint by name: all global ones of the current graph."""
    return {variable.op.name: variable for variable in tf.global_variables()}


def _gate(total: structs.Sum) -> tf.Tensor | None:
    """Whether there is anything to learn from; None where that is known."""
    static = tf.get_static_value(total.weight)
    return None if static is not None and static > 0 else total.weight > 0


def _gated(gate: tf.Tensor, change: Callable[[], tf.Operation]) -> tf.Operation:
    def branch() -> tf.Tensor:
        with tf.control_dependencies([change()]):
            return tf.constant(True)

    with tf.name_scope('gate'):
        return tf.cond(gate, branch, lambda: tf.constant(False)).op


@contextlib.contextmanager
def _recording(made: list[tf.Variable]) -> Iterator[None]:
    """Appends every variable made inside to `made`, in order."""

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        variable = next_creator(**kwargs)
        made.append(variable)
        return variable

    with tf.variable_creator_scope(creator):
        yield


def _sync(updates: Sequence[structs.Update], made: Sequence[Sequence[tf.Variable]]) -> tf.Operation:
    """Copies and their slots set from the canonical ones, which were made in the same order."""
    with tf.name_scope('sync'):
        pairs = [
            (target, source)
            for update, slots in zip(updates[1:], made[1:], strict=True)
            for target, source in zip((*update.variables, *slots), (*updates[0].variables, *made[0]), strict=True)
        ]
        return tf.group(*[target.assign(source.read_value(), read_value=False) for target, source in pairs], name='sync')
