"""One training step from its updates: what is applied, in which order, and what is reported of it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import reads, structs
from towers.graph import standing

# TensorFlow's own hooks read the step through this collection; a read that is ordered with the update keeps theirs right.
_STEP_READS = 'global_step_read_op_cache'
_GATE = 'gate/'  # a scope that is entered again

Apply = Callable[[structs.Update, Sequence[tf.Tensor]], tf.Operation]


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a run counts; the variables are in every checkpoint.

    Attributes:
      global_step: int64 variable, updates applied.
      examples_seen: int64 variable, examples in the batches of those updates.
      skipped_steps: int64 variable, steps that changed nothing else since they were not finite.
      step: int64 scalar, global_step read before the update.
    """

    global_step: tf.Variable
    examples_seen: tf.Variable
    skipped_steps: tf.Variable
    step: tf.Tensor

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables, in the order of `standing.Point`."""
        return self.global_step, self.examples_seen, self.skipped_steps


@dataclasses.dataclass(frozen=True)
class Gate:
    """What decides whether a step changes anything.

    Attributes:
      weight: fp32 scalar, the total's; where it is 0 there is nothing to learn from.
      examples: int64 scalar, examples in the batch.
      finite: bool scalar, whether the update is finite; None = an update is applied as it is.
      otherwise: makes the operations that run in place of a step that is not finite.
      first: operations that every step runs, before it changes anything.
      noted: is told where a step begins to write and where it has ended; None = nobody is.
    """

    weight: tf.Tensor
    examples: tf.Tensor
    finite: tf.Tensor | None = None
    otherwise: Callable[[], Sequence[tf.Operation]] = tuple
    first: Sequence[tf.Operation] = ()
    noted: standing.Standing | None = None


def counters(device: str) -> Counters:
    """Makes the counters, which come before every model and input."""
    with tf.device(device):
        global_step = tf.train.get_or_create_global_step()
        examples_seen, skipped_steps = _counter('examples_seen'), _counter('skipped_steps')
        step = tf.get_default_graph().as_graph_element(global_step)  # the read that a session makes for who asks for the variable
        tf.add_to_collection(_STEP_READS, step)
        return Counters(global_step, examples_seen, skipped_steps, step)


def make(
    gate: Gate,
    updates: Sequence[structs.Update],
    count: Counters,
    *,
    apply: Apply,
    report: Mapping[str, tf.Tensor],
) -> tuple[tf.Operation, dict[str, tf.Tensor], tf.Operation]:
    """The operation of one whole step: updates, then state, then the counters, behind one gate.

    Args:
      gate: lets all of the step through or nothing; without a reason to ask there is no gate in the graph.
      updates: one for each copy of the variables.
      count: the run's counters.
      apply: makes one update's operation, after the given readers of the old values; nothing of it may run before them.
      report: name -> scalar computed from the old values.

    Returns:
      (the step's operation, `report` with step, examples, examples_seen and skipped added, the operation that sets all
      copies from the canonical variables)
    """
    writes = [w for update in updates for w in update.state]
    before = () if gate.noted is None else _before(count)
    passes = _passes(gate)
    sides = None if passes is None else _sides(passes, [*before[2:], *gate.first])
    seen = [value for value in report.values() if value.op.type != 'Const']
    readers = [*gate.first, *seen, count.step, *before[1:], *[w.value for w in writes], *(sides[:1] if sides else ())]
    if gate.noted is not None:
        readers += gate.noted.begins(count.step + 1, sides[:1] if sides else [_gradients(updates)])
    applied, made = [], []
    for update in updates:
        slots: list[tf.Variable] = []
        with _recording(slots):
            applied.append(apply(update, readers))
        made.append(slots)
    counted = _counts(gate, count, before, [*applied, *_written(writes, applied)])
    if sides is None:
        operation = tf.group(*counted, name='count/step')
    else:
        operation = _joined(counted, sides[0], _skipped(gate, count, before, sides[1]))
    return operation, {**_counted(gate, count, passes, operation), **report}, _sync(updates, made)


def _counter(name: str) -> tf.Variable:
    return tf.get_variable(name, [], tf.int64, initializer=tf.zeros_initializer(), trainable=False, use_resource=True)


def _counts(gate: Gate, count: Counters, before: Sequence[tf.Tensor], after: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Counts and notes the step, once all of it is written."""
    with tf.name_scope('count'):
        with tf.control_dependencies(after if len(after) == 1 else [tf.group(*after, name='written')]):
            return [
                reads.count(count.global_step),
                count.examples_seen.assign_add(gate.examples, read_value=False),
                *_noted(gate, before, (1, gate.examples, None)),
            ]


def _before(count: Counters) -> tuple[tf.Tensor, ...]:
    """The counters before the step."""
    with tf.name_scope('counters'):
        return count.step, reads.read(count.examples_seen), reads.read(count.skipped_steps)


def _counted(gate: Gate, count: Counters, passes: tf.Tensor | None, operation: tf.Operation) -> dict[str, tf.Tensor]:
    """The counters after the step; those that nothing in it needs are read when it has ended, so that only who looks pays for it."""
    with tf.name_scope('report'):
        advanced = tf.constant(1, tf.int64) if passes is None else tf.cast(passes, tf.int64)
        with tf.control_dependencies([operation]):
            seen, skipped = reads.read(count.examples_seen), reads.read(count.skipped_steps)
        return {'step': count.step + advanced, 'examples': gate.examples, 'examples_seen': seen, 'skipped': skipped}


def _passes(gate: Gate) -> tf.Tensor | None:
    """Whether the step is made; None where nothing can forbid it."""
    static = tf.get_static_value(gate.weight)
    with tf.name_scope(_GATE):
        asked = [] if static is not None and static > 0 else [gate.weight > 0]
        asked += [] if gate.finite is None else [gate.finite]
        return tf.reduce_all(tf.stack(asked)) if len(asked) > 1 else asked[0] if asked else None


def _bad(gate: Gate) -> tf.Tensor:
    return tf.constant(0, tf.int64) if gate.finite is None else 1 - tf.cast(gate.finite, tf.int64)


def _sides(passes: tf.Tensor, first: Sequence[tf.Operation | tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Two tensors of which only one lives: all that needs the other, by control edges too, does not run.

    The second one comes after `first`, so it is the one sign that other machines need to do what there is to do on the closed side.

    `tf.cond` is made of the same operations, but carries each gradient and variable through one of its own: that takes
    longer to build and to run, and slots would be made inside a function.
    """
    with tf.name_scope(_GATE):
        switch = tf.raw_ops.Switch(data=passes, pred=passes)
        opened = tf.identity(switch.output_true, name='opened')
        with tf.control_dependencies(first):
            return opened, tf.identity(switch.output_false, name='closed')


def _skipped(gate: Gate, count: Counters, before: Sequence[tf.Tensor], closed: tf.Tensor) -> tf.Tensor:
    """The closed side, after what there is to do on it."""
    with tf.control_dependencies([closed]), tf.name_scope(_GATE):
        bad = _bad(gate)
        done = [] if gate.finite is None else [count.skipped_steps.assign_add(bad, read_value=False), *gate.otherwise()]
        with tf.control_dependencies([*done, *_noted(gate, before, (None, None, bad), held_back=True)]):
            return tf.identity(closed)


def _noted(
    gate: Gate, before: Sequence[tf.Tensor], more: Sequence[tf.Tensor | int | None], *, held_back: bool = False
) -> list[tf.Operation]:
    """Notes the end of a step, with the counters before it and what is added to each."""
    if gate.noted is None:
        return []
    counted = [value if added is None else value + added for value, added in zip(before, more, strict=True)]
    return gate.noted.ends(counted, held_back=held_back)


def _gradients(updates: Sequence[structs.Update]) -> tf.Operation:
    """An operation that runs when all that is to be applied is there."""
    parts = tf.nest.flatten([g for update in updates for g in update.gradients if g is not None], expand_composites=True)
    with tf.name_scope(_GATE):
        return tf.group(*parts, name='gradients')


def _joined(operations: Sequence[tf.Operation], opened: tf.Tensor, closed: tf.Tensor) -> tf.Operation:
    """An operation that runs after whichever side was taken, the opened one being those operations."""
    with tf.name_scope(_GATE):
        with tf.control_dependencies(operations):
            opened = tf.identity(opened)
        return tf.raw_ops.Merge(inputs=[opened, closed], name='step').output.op


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
