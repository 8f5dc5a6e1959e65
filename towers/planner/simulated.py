"""Bytes that a step will hold on each device, from the graph alone: it is followed in the order in which it may run.

What TensorFlow does with memory is imitated: a tensor is freed after its last reader; views (Reshape, Identity, a read of a
variable) hold what they look at; an element-wise operation writes over an input that nobody else reads. Not imitated: scratch
memory inside operations, and what the graph's optimisation fuses or folds. Batches belong to the input, which holds them.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from towers import upstream
from towers.planner import measured

_VIEWS = frozenset({
    'Identity', 'IdentityN', 'Reshape', 'ExpandDims', 'Squeeze', 'StopGradient', 'PreventGradient', 'ReadVariableOp', 'Switch', 'Merge',
    'RefSwitch', 'Enter', 'Exit', 'NextIteration', 'LoopCond', 'CheckNumerics', 'Snapshot', 'Bitcast', 'EnsureShape',
})  # fmt: skip
_SLICES = {'StridedSlice': 0, 'SplitV': 0, 'Split': 1}  # type -> which input is cut
_IN_PLACE = frozenset({
    'Add', 'AddV2', 'AddN', 'Sub', 'Mul', 'MulNoNan', 'Div', 'RealDiv', 'DivNoNan', 'Maximum', 'Minimum', 'Pow', 'SquaredDifference',
    'BiasAdd', 'Relu', 'Relu6', 'LeakyRelu', 'Elu', 'Selu', 'Softplus', 'Softsign', 'Tanh', 'Sigmoid', 'Exp', 'Log', 'Log1p', 'Sqrt',
    'Rsqrt', 'Square', 'Neg', 'Abs', 'Sign', 'Erf', 'Inv', 'Reciprocal', 'Floor', 'Ceil', 'Round', 'Cos', 'Sin', 'Softmax', 'LogSoftmax',
    'ReluGrad', 'Relu6Grad', 'LeakyReluGrad', 'EluGrad', 'TanhGrad', 'SigmoidGrad', 'SqrtGrad', 'RsqrtGrad', 'SoftplusGrad', 'ClipByValue',
    'LogicalAnd', 'LogicalNot', 'Select', 'SelectV2', 'Cast',
})  # fmt: skip

_NOT_OF_THE_STEP = frozenset({'Const', 'VarHandleOp', 'IteratorGetNext', 'IteratorGetNextSync', 'OptionalGetValue', 'AnonymousIteratorV3'})


@dataclasses.dataclass
class _Buffer:
    """Memory on one device that several tensors may look at."""

    device: str
    size: int
    operation: str
    readers: int = 0


class Simulation:
    """Follows a graph once.

    Args:
      operations: what a step runs; all that they need is followed.
      batch: device -> rows to take there for a first axis of unknown size.
    """

    def __init__(self, operations: Iterable[tf.Operation], *, batch: Callable[[str], int]) -> None:
        self._batch = batch
        self._needed = upstream.of(operations)
        self._readers = collections.Counter((t.ref(), _memory(device_of(op))) for op in self._needed.values() for t in read_by(op))
        self._elsewhere = collections.Counter(tensor for tensor, _ in self._readers)  # memories in which a tensor is read
        self._buffers: dict[tuple[object, str], _Buffer] = {}
        self._held: dict[str, dict[int, _Buffer]] = collections.defaultdict(dict)
        self._total: collections.Counter[str] = collections.Counter()
        self._peaks: dict[str, measured.Peak] = {}

    def run(self) -> Mapping[str, measured.Peak]:
        """The predicted peak of each device, by its name."""
        for op in _in_order(self._needed):
            inputs = [self._read(tensor, device_of(op)) for tensor in read_by(op) if self._is_known(tensor)]
            seen = _seen(op)
            made = [inputs[place] for place in seen] if inputs and seen is not None else self._allocated(op, inputs)
            for tensor, buffer in zip(op.outputs, made, strict=True):
                memory = _memory(buffer.device)
                self._buffers[tensor.ref(), memory] = self._buffers[tensor.ref(), ''] = buffer
                here = self._readers[tensor.ref(), memory]
                buffer.readers += here + self._elsewhere[tensor.ref()] - bool(here)  # a copy for each other memory reads it once
            for buffer in inputs:
                buffer.readers -= 1
            for buffer in {id(each): each for each in (*inputs, *made)}.values():
                self._free(buffer)
        return self._peaks

    def _is_known(self, tensor: tf.Tensor) -> bool:
        return (tensor.ref(), '') in self._buffers

    def _read(self, tensor: tf.Tensor, device: str) -> _Buffer:
        """The tensor's memory as a device reads it: a copy where that has a memory of its own."""
        memory = _memory(device)
        if (tensor.ref(), memory) not in self._buffers:
            origin = self._buffers[tensor.ref(), '']
            copy = self._new(device, size_of(tensor, self._batch(device)), origin.operation)
            copy.readers = self._readers[tensor.ref(), memory]
            self._buffers[tensor.ref(), memory] = copy
            origin.readers -= 1
            self._free(origin)
        return self._buffers[tensor.ref(), memory]

    def _allocated(self, op: tf.Operation, inputs: Sequence[_Buffer]) -> list[_Buffer]:
        device, made = device_of(op), []
        for tensor in op.outputs:
            size = 0 if op.type in _NOT_OF_THE_STEP else size_of(tensor, self._batch(device))
            given = self._given(op, inputs, device, size) if len(op.outputs) == 1 else None
            made.append(given or self._new(device, size, op.name))
        return made

    def _given(self, op: tf.Operation, inputs: Sequence[_Buffer], device: str, size: int) -> _Buffer | None:
        """An input that may be written over: of the same size, in the same memory, and read by nobody else."""
        if op.type not in _IN_PLACE:
            return None
        once = collections.Counter(id(buffer) for buffer in inputs)
        fitting = (b for b in inputs if b.size == size and _memory(b.device) == _memory(device) and b.readers == once[id(b)])
        return next(fitting, None)

    def _new(self, device: str, size: int, name: str) -> _Buffer:
        buffer = _Buffer(device, size, name)
        self._held[device][id(buffer)] = buffer
        self._total[device] += size
        if device not in self._peaks or self._total[device] > self._peaks[device].bytes:
            tensors = [(each.operation, each.size) for each in self._held[device].values()]
            self._peaks[device] = measured.Peak(device, self._total[device], tensors)
        return buffer

    def _free(self, buffer: _Buffer) -> None:
        if buffer.readers <= 0 and self._held[buffer.device].pop(id(buffer), None) is not None:
            self._total[buffer.device] -= buffer.size


def read_by(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors that an operation looks at: a bundle looks at nothing, what is taken out of it at the tensors in it."""
    if op.type == 'OptionalFromValue':
        return []
    return list(op.inputs[0].op.inputs) if is_bundled(op) else list(op.inputs)


def is_bundled(op: tf.Operation) -> bool:
    """Whether it takes tensors out of a bundle that crossed from one device to another (`towers/transfers.py`)."""
    return op.type == 'OptionalGetValue' and op.inputs[0].op.type == 'OptionalFromValue'


def _seen(op: tf.Operation) -> list[int] | None:
    """Which input each output looks at; None for an operation that makes something new.

    A slice of the first axis looks at what it is cut from.
    """
    count = len(op.outputs)
    if op.type == 'IdentityN' or is_bundled(op):
        return list(range(count))
    if op.type in _VIEWS:
        return [0] * count
    if op.type not in _SLICES:
        return None
    place = _SLICES[op.type]
    whole, part = op.inputs[place].shape, op.outputs[0].shape
    is_view = whole.rank is not None and whole.rank == part.rank and whole[1:].is_compatible_with(part[1:])
    return [place] * count if is_view else None


def _memory(device: str) -> str:
    """All CPU devices have the main memory, and hand tensors to one another as they are."""
    return 'main' if device.startswith('/cpu') else device


def device_of(op: tf.Operation) -> str:
    """The device on which an operation will run: what reads or writes a variable is brought to it."""
    handle = next((tensor.op for tensor in op.inputs if tensor.dtype == tf.resource), None)
    return measured.name_of(op.device if handle is None else handle.device or op.device)


def size_of(tensor: tf.Tensor, batch: int) -> int:
    """Bytes of a tensor whose unknown first axis has `batch` rows and other unknown ones 1; 0 where that isn't known at all."""
    if tensor.shape.rank is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    dims = [size if size is not None else (batch if axis == 0 else 1) for axis, size in enumerate(tensor.shape.as_list())]
    return math.prod(dims) * tensor.dtype.base_dtype.size


def _in_order(needed: Mapping[str, tf.Operation]) -> list[tf.Operation]:
    """First come, first run, as the executor takes what is ready; an edge back into a loop is not waited for."""
    before = {name: {each.name for each in _waited(op)} for name, op in needed.items()}
    after = collections.defaultdict(list)
    for name, others in before.items():
        for other in others:
            after[other].append(name)
    waiting = {name: len(others) for name, others in before.items()}
    ready = collections.deque(name for name, count in waiting.items() if not count)
    order = []
    while ready:
        name = ready.popleft()
        order.append(needed[name])
        for follower in after[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return order


def _waited(op: tf.Operation) -> list[tf.Operation]:
    inputs = [tensor.op for tensor in op.inputs if not (op.type == 'Merge' and tensor.op.type == 'NextIteration')]
    return [*inputs, *op.control_inputs]
