"""The bytes that a program needs on each device: predicted from its graph, or measured in traced steps."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import tensorflow.compat.v1 as tf

from towers import upstream
from towers.graph import devices, marks
from towers.jobs import program
from towers.planner import measured, simulated


@dataclasses.dataclass(frozen=True)
class Need:
    """What one device holds, in bytes.

    Attributes:
      parameters: trainable variables.
      slots: what the optimizer keeps for them.
      state: other variables: moving statistics, counters.
      activations: the most that a step holds beside the variables: activations, gradients, received copies.
    """

    parameters: int = 0
    slots: int = 0
    state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.slots + self.state + self.activations


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program needs.

    Attributes:
      devices: device name -> its need, the towers' in order.
      transfers: (from, to) -> bytes that a step brings from one device to another.
      batch: bytes of a global batch, of which the input holds several.
      biggest: device name -> (operation, bytes) of what is there at its peak, the biggest first.
    """

    devices: Mapping[str, Need]
    transfers: Mapping[tuple[str, str], int]
    batch: int
    biggest: Mapping[str, tuple[tuple[str, int], ...]]


def predict(made: program.Program, *, examples: int) -> Plan:
    """The plan of a program, from its graph alone; nothing is run.

    Towers of the same model get the same figure: which of them waits for the others with all its gradients is chance.

    Args:
      made: the program.
      examples: of a global batch.
    """
    operations = _operations(made)
    of_a_tower = {measured.name_of(device) for tower in made.placement.towers for device in tower.devices}

    def rows(device: str) -> int:
        return math.ceil(examples / len(made.placement.towers)) if device in of_a_tower else examples

    peaks = simulated.Simulation(operations, batch=rows).run()
    towers = [measured.name_of(tower.devices[0]) for tower in made.placement.towers]
    highest = max((peaks[name].bytes for name in towers if name in peaks), default=0)
    names = list(dict.fromkeys([measured.name_of(made.placement.parameter_device), *towers, *peaks]))
    held = _variables(made)
    found = {}
    for name in names:
        own = peaks[name].bytes if name in peaks else 0
        found[name] = dataclasses.replace(held.get(name, Need()), activations=max(own, highest) if name in towers else own)
    biggest = {name: tuple(sorted(peak.tensors, key=lambda pair: -pair[1])) for name, peak in peaks.items()}
    batch = sum(
        simulated.size_of(tensor, rows(tower.devices[0]))
        for tower, part in zip(made.placement.towers, made.step.input.batches, strict=True)
        for tensor in tf.nest.flatten(part.features)
    )
    return Plan(found, _transfers(operations, rows), batch, biggest)


def measure(made: program.Program, *, examples: int, steps: int = 5) -> Plan:
    """The same, measured in so many steps of a session of its own; of several steps the highest peak."""
    plan = predict(made, examples=examples)
    peaks: dict[str, measured.Peak] = {}
    transfers: dict[tuple[str, str], int] = {}
    with tf.Session(graph=made.graph, config=made.proto) as session, made.graph.as_default():
        devices.check_devices(session, made.placement)
        for operation in (made.init, made.step.input.initializer, made.step.sync):
            session.run(operation)
        fetches = [marks.whole(made.step), dict(made.step.report)]
        session.run(fetches)  # in which TensorFlow prepares itself
        for _ in range(steps):
            metadata = tf.RunMetadata()
            session.run(fetches, options=measured.options(), run_metadata=metadata)
            transfers = measured.transfers(metadata)
            for name, peak in measured.peaks(metadata).items():
                peaks[name] = max(peaks.get(name, peak), peak, key=lambda each: each.bytes)
    found = {name: dataclasses.replace(need, activations=peaks[name].bytes if name in peaks else 0) for name, need in plan.devices.items()}
    return dataclasses.replace(
        plan, devices=found, transfers=transfers, biggest={name: tuple(peak.tensors) for name, peak in peaks.items()}
    )


def _operations(made: program.Program) -> list[tf.Operation]:
    return [*marks.whole(made.step), *(tensor.op for tensor in made.step.report.values())]


def _variables(made: program.Program) -> dict[str, Need]:
    found: dict[str, Need] = collections.defaultdict(Need)
    variables = made.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) + made.graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)
    trained = {variable.op.name for variable in made.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    copies = _copies(made)
    for variable in {variable.op.name: variable for variable in variables}.values():
        name = measured.name_of(variable.device)
        field = _kind(variable.op.name, trained, copies)
        found[name] = dataclasses.replace(found[name], **{field: getattr(found[name], field) + _size(variable)})
    return found


def _kind(name: str, trained: set[str], copies: Mapping[str, str]) -> str:
    name = copies.get(name, name)
    if name in trained:
        return 'parameters'
    # TensorFlow's optimizers name a slot after its variable and themselves: 'layer/kernel/Momentum'.
    return 'slots' if name.rpartition('/')[0] in trained else 'state'


def _copies(made: program.Program) -> dict[str, str]:
    """Each variable that is set from another one at the start, and that one, by their names."""
    found = {}
    for op in upstream.of([made.step.sync]).values():
        if op.type == 'AssignVariableOp':
            source = next((each for each in upstream.of([op.inputs[1].op]).values() if each.type == 'VarHandleOp'), None)
            found[op.inputs[0].op.name] = '' if source is None else source.name
    return found


def _size(variable: tf.Variable) -> int:
    known = variable.shape.num_elements()
    return (known or 0) * variable.dtype.base_dtype.size


def _transfers(operations: list[tf.Operation], rows: Callable[[str], int]) -> dict[tuple[str, str], int]:
    """Each tensor once to each device that reads it."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for (source, target), tensors in _crossing(operations).items():
        found[source, target] = sum(simulated.size_of(tensor, min(rows(source), rows(target))) for tensor in tensors)
    return {pair: size for pair, size in sorted(found.items()) if size}


def _crossing(operations: list[tf.Operation]) -> dict[tuple[str, str], list[tf.Tensor]]:
    found: dict[tuple[str, str], dict[object, tf.Tensor]] = collections.defaultdict(dict)
    for reader, tensor in _edges(operations):
        source, target = simulated.device_of(tensor.op), simulated.device_of(reader)
        if source != target and tensor.dtype != tf.resource:
            found[source, target][tensor.ref()] = tensor
    return {pair: list(tensors.values()) for pair, tensors in found.items()}


def _edges(operations: list[tf.Operation]) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    for reader in upstream.of(operations).values():
        for tensor in simulated.read_by(reader):
            yield reader, tensor
