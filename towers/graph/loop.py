"""Several steps in one call of the session: a loop inside the graph around a copy of the operations of one step.

The step itself stays as it is. A copy of what changes from step to step runs in the frame of a loop of TensorFlow's own
control flow; constants and handles of variables, iterators and tables come in from outside, so devices, towers, gates,
marks and writes are those of the step. No operation of an iteration begins before the one before is done.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import errors, structs, upstream

_SCOPE = 'loop/'  # entered again
COPIES = 'loop/frame/'  # what the names of copies begin with
_CONTROL_FLOW = frozenset(('Enter', 'Exit', 'LoopCond', 'Merge', 'NextIteration', 'Switch'))
_PLACEHOLDERS = frozenset(('Placeholder', 'PlaceholderV2'))
_LOOPS = frozenset(('While', 'StatelessWhile'))
_FRAME = 'steps'
_STEP, _GOES_ON, _INSIDE = 'loop.step', 'loop.goes_on', 'loop.inside'
_DONE, _NEXT, _END = 'loop.done', 'loop.next', 'loop.end'


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over steps. It ends behind one that was held back, since somebody may have to look at that.

    Attributes:
      given: int64 scalar to feed to `set_most`.
      set_most: operation that says how many steps each loop from now on makes at most.
      operation: makes them.
      results: name of a tensor of the step -> its value in the last step of the loop, fetched with `operation`.
      made: int64 scalar, steps that loops have made in this session, fetched with `operation`.
      kept, made_so_far: the same two at any other moment, behind a loop that failed or beside one in another thread.
      stop: operation that ends this loop, and all later ones, behind the step in flight.
      parts: names of the operations of the step; what is fed to one of them does not reach the loop.
    """

    given: tf.Tensor
    set_most: tf.Operation
    operation: tf.Operation
    results: Mapping[str, tf.Tensor]
    made: tf.Tensor
    kept: Mapping[str, tf.Tensor]
    made_so_far: tf.Tensor
    stop: tf.Operation
    parts: frozenset[str]


def make(step: structs.TrainStep, operations: Sequence[tf.Operation]) -> Loop:
    """Adds a loop to the graph of a step.

    Args:
      step: what to repeat; its report, its wait and the sums of its metrics are what a loop tells of its last step.
      operations: those that make one whole step.

    Raises:
      ValueError: something in the step can't be repeated.
    """
    told = {tensor.name: tensor for tensor in (step.step, step.waited, *step.report.values(), *_sums(step)) if tensor is not None}
    needed = upstream.of([*operations, *[tensor.op for tensor in told.values()]])
    copied = _changing(needed)
    _require(copied.values(), step.summary_prefixes)
    home = step.global_step.device
    with tf.name_scope(_SCOPE), tf.device(home):
        count, stopped, most = _local('made', tf.int64), _local('stopped', tf.bool), _local('most', tf.int64)
        given = tf.placeholder(tf.int64, [], name='given')
        set_most = most.assign(given, read_value=False)
        first = step.global_step.read_value()
        one = tf.constant(1, tf.int64)
        limits = first + one, first + most.read_value()
    frame = _Frame(copied, home)
    _begin(frame, home, first, limits, stopped.handle)
    for operation in copied.values():
        frame.copy(operation)
    frame.finish(operations)
    last = {name: _variable(tensor) for name, tensor in told.items() if tensor.op.name in copied}
    writes = [frame.write('AssignVariableOp', handle, told[name].name, told[name]) for name, handle in last.items()]
    writes.append(frame.write('AssignAddVariableOp', count.handle, frame.enter(one), one))
    _end(frame, home, step.step.name, writes, limits[1])
    with tf.control_dependencies([frame.build(_END)]):
        results = {name: _read(last[name], tensor) if name in last else tensor for name, tensor in told.items()}
        with tf.name_scope(_SCOPE), tf.device(home):
            operation, made = tf.no_op('steps'), count.read_value()
    kept = {name: _read(last[name], tensor) if name in last else tensor for name, tensor in told.items()}
    with tf.name_scope(_SCOPE), tf.device(home):
        stop = stopped.assign(True, read_value=False)
        return Loop(given, set_most, operation, results, made, kept, count.read_value(), stop, frozenset(needed))


class _Frame:
    """What stands in the loop's frame, written down first and imported at once, as the loop's way back wants.

    Args:
      copied: name -> operation of the step that gets a copy.
      home: device that decides whether there is another step.
    """

    def __init__(self, copied: Mapping[str, tf.Operation], home: str) -> None:
        self._copied, self._home = copied, home
        self._begins: dict[str, tuple[str, str]] = {}
        self._nodes = tf.GraphDef()
        self._entered: dict[str, tuple[str, tf.Tensor]] = {}

    def add(self, kind: str, name: str, inputs: Sequence[str], device: str, **attributes: Any) -> str:
        """Adds an operation of the loop's own and returns its name."""
        node = self._nodes.node.add(op=kind, name=name, input=inputs, device=device)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(_attribute(value))
        return name

    def enter(self, tensor: tf.Tensor, *, constant: bool = True) -> str:
        """The name in the loop of a tensor from outside: the same at each step, or what the first one begins with."""
        if tensor.name not in self._entered:
            name = f'loop.in.{len(self._entered)}'
            self._entered[tensor.name] = name, tensor
            how = {'frame_name': _FRAME, 'is_constant': constant, 'parallel_iterations': 1}
            self.add('Enter', name, [f'{name}.outside'], tensor.device, T=tensor.dtype, **how)
        return self._entered[tensor.name][0]

    def begin(self, device: str) -> str:
        """The name of what tells a device that a step begins: one of its own, so that no other message is needed for it."""
        if device in ('', self._home):
            return _INSIDE
        if device not in self._begins:
            at = len(self._begins)
            with tf.name_scope(_SCOPE), tf.device(device):
                outside = tf.zeros([], tf.int32)  # which a GPU keeps in the memory of its host
            again, inside = f'loop.again.{at}', f'loop.inside.{at}'
            self.add('Merge', f'loop.merge.{at}', [self.enter(outside, constant=False), again], device, T=tf.int32, N=2)
            self.add('Switch', f'loop.switch.{at}', [f'loop.merge.{at}', _GOES_ON], device, T=tf.int32)
            self.add('Identity', inside, [f'loop.switch.{at}:1'], device, T=tf.int32)
            self._begins[device] = inside, again
        return self._begins[device][0]

    def finish(self, operations: Sequence[tf.Operation]) -> None:
        """Says what makes a whole step: each device ends its part when those on it are done, and all when those at home are."""
        for device, (inside, again) in self._begins.items():
            own = [f'^{operation.name}' for operation in operations if operation.device == device]
            self.add('NextIteration', again, [inside, *own], device, T=tf.int32)
        others = [f'^{operation.name}' for operation in operations if operation.device not in self._begins]
        self.add('NoOp', _DONE, others, self._home)

    def copy(self, operation: tf.Operation) -> None:
        """Adds a copy of an operation of the step."""
        inputs = [tensor.name if tensor.op.name in self._copied else self.enter(tensor) for tensor in operation.inputs]
        waits = [f'^{other.name}' for other in operation.control_inputs if other.name in self._copied]
        if not waits and not any(tensor.op.name in self._copied for tensor in operation.inputs):
            waits = [f'^{self.begin(operation.device)}']  # what comes from outside is there before the step begins
        node = self._nodes.node.add()
        node.CopyFrom(operation.node_def)
        node.device = operation.device
        node.attr.pop('_class', None)  # it may name what is not in the loop; the device is known by now
        del node.input[:]
        node.input.extend([*inputs, *waits])

    def write(self, kind: str, handle: tf.Tensor, value: str, like: tf.Tensor) -> str:
        """Writes to a variable of the loop's own when the step is done."""
        inputs = [self.enter(handle), value, f'^{_DONE}']
        return self.add(kind, f'loop.write.{len(self._nodes.node)}', inputs, like.device, dtype=like.dtype)

    def build(self, name: str) -> tf.Operation:
        """Adds all of it to the graph, and returns the operation of a name."""
        given = {f'{inner}.outside:0': tensor for inner, tensor in self._entered.values()}
        [found] = tf.import_graph_def(self._nodes, input_map=given, return_elements=[name], name=COPIES.rstrip('/'))
        return found


def _begin(frame: _Frame, home: str, first: tf.Tensor, limits: tuple[tf.Tensor, tf.Tensor], stopped: tf.Tensor) -> None:
    """What decides before each step whether it is made: the step reached is below the limit, which is the lower one after a stop."""
    number = tf.int64
    frame.add('Merge', _STEP, [frame.enter(first, constant=False), _NEXT], home, T=number, N=2)
    frame.add('ReadVariableOp', 'loop.stopped', [frame.enter(stopped), f'^{_STEP}'], home, dtype=tf.bool)
    frame.add('SelectV2', 'loop.limit', ['loop.stopped', *[frame.enter(limit) for limit in limits]], home, T=number)
    frame.add('Less', 'loop.is_below', [_STEP, 'loop.limit'], home, T=number)
    frame.add('LoopCond', _GOES_ON, ['loop.is_below'], home)
    frame.add('Switch', 'loop.switch', [_STEP, _GOES_ON], home, T=number)
    frame.add('Identity', _INSIDE, ['loop.switch:1'], home, T=number)
    frame.add('Exit', _END, ['loop.switch'], home, T=number)


def _end(frame: _Frame, home: str, step: str, writes: Sequence[str], limit: tf.Tensor) -> None:
    """The way back, with the step that was reached; with the limit where it was held back, which ends the loop."""
    waits = [f'^{write}' for write in writes]
    frame.add('Greater', 'loop.advanced', [step, _INSIDE], home, T=tf.int64)
    frame.add('SelectV2', 'loop.reached', ['loop.advanced', step, frame.enter(limit)], home, T=tf.int64)
    frame.add('NextIteration', _NEXT, ['loop.reached', *waits], home, T=tf.int64)


def _changing(needed: Mapping[str, tf.Operation]) -> dict[str, tf.Operation]:
    """The operations whose result may be another one at each step, in the order of the graph."""
    changing: dict[str, tf.Operation] = {}
    for operation in tf.get_default_graph().get_operations():
        if operation.name in needed and not _is_handle(operation) and not _is_constant(operation, changing):
            changing[operation.name] = operation
    return changing


def _is_handle(operation: tf.Operation) -> bool:
    """Whether it gives a variable, an iterator or a table, which is the same one for all steps."""
    return not operation.inputs and any(tensor.dtype == tf.resource for tensor in operation.outputs)


def _is_constant(operation: tf.Operation, changing: Mapping[str, tf.Operation]) -> bool:
    """Whether it depends on constants alone; to be asked in the order of the graph."""
    if operation.control_inputs or operation.op_def.is_stateful or operation.type in _CONTROL_FLOW | _PLACEHOLDERS:
        return False
    return all(tensor.op.name not in changing and tensor.dtype != tf.resource for tensor in operation.inputs)


def _require(operations: Iterable[tf.Operation], scopes: tuple[str, ...]) -> None:
    """Raises ValueError where an operation can't be repeated in a loop; `scopes`: what names begin with that a model gave."""
    library = {function.signature.name: function for function in tf.get_default_graph().as_graph_def().library.function}
    for operation in operations:
        why = ''
        if operation.type in _PLACEHOLDERS:
            why = 'is a placeholder, which nothing feeds inside of a loop'
        elif any(tensor.dtype.name.endswith('_ref') for tensor in (*operation.inputs, *operation.outputs)):
            why = 'is or has a reference variable, which a loop can not share (use_resource=True makes another kind)'
        elif operation.type in _CONTROL_FLOW and operation.name.startswith(scopes) or _has_loop(operation.node_def, library, set()):
            why = "is a loop of the model's own, or control flow of the old kind, which does not work inside of another loop"
        if why:
            raise ValueError(
                f'--steps_per_run makes steps inside the graph, and {operation.name} ({operation.type}, made at '
                f'{errors.source_line(operation) or "an unknown line"}) {why}; change it, or leave --steps_per_run out.'
            )


def _has_loop(node: Any, library: Mapping[str, Any], seen: set[str]) -> bool:
    """Whether a node is a loop, or one is in a function that it calls."""
    names = [function.name for value in node.attr.values() for function in (value.func, *value.list.func)]
    new = [name for name in names if name in library and name not in seen]
    seen.update(new)
    return node.op in _LOOPS or any(_has_loop(inner, library, seen) for name in new for inner in library[name].node_def)


def _sums(step: structs.TrainStep) -> list[tf.Tensor]:
    return [tensor for metric in step.metrics.values() for tensor in metric.sums]


def _local(name: str, dtype: tf.DType) -> tf.Variable:
    """A variable that is set with all others, and in no checkpoint."""
    zero = tf.zeros([], dtype)
    return tf.Variable(zero, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name=name, use_resource=True)


def _variable(tensor: tf.Tensor) -> tf.Tensor:
    """The handle of a variable for a tensor of the step, beside it."""
    with tf.name_scope(_SCOPE), tf.device(tensor.device):
        return tf.raw_ops.VarHandleOp(dtype=tensor.dtype, shape=tensor.shape, shared_name=f'loop/{tensor.name}')


def _read(handle: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    with tf.name_scope(_SCOPE), tf.device(tensor.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tensor.dtype)


def _attribute(value: Any) -> tf.AttrValue:
    if isinstance(value, tf.DType):
        return tf.AttrValue(type=value.as_datatype_enum)
    if isinstance(value, str):
        return tf.AttrValue(s=value.encode())
    return tf.AttrValue(b=value) if isinstance(value, bool) else tf.AttrValue(i=value)
