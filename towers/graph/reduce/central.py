"""The towers' outputs added on one device: the classic way, deterministic in its order.

What the towers of one machine made is added on its own CPU first, where there are several machines, so that one tensor
crosses for each sum and machine, whatever its number of towers.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from towers import structs
from towers.graph.reduce import packing

Machines: TypeAlias = Mapping[str, Sequence[int]]  # a machine's CPU -> the places of its towers


def total(
    outputs: Sequence[structs.TowerOutput],
    *,
    device: str,
    statistics: Literal['mean', 'first'] = 'mean',
    beside: bool = False,
    made: Mapping[int, tf.Tensor] | None = None,
) -> structs.Sum:
    """The unnormalised sum over towers, in fp32 at least.

    Args:
      outputs: one for each tower, with aligned gradients and variables.
      device: device string where the sums are made.
      statistics: 'mean' weighs the towers' state writes by examples, 'first' takes tower 0's.
      beside: whether a gradient's sum is made on its variable's device.
      made: sums of gradients that are there already, by their variables' places.
    """
    made = made or {}
    variables = outputs[0].variables
    machines = _machines(outputs)
    devices = [variable.device if beside else device for variable in variables]
    with tf.device(device), tf.name_scope('sum'):
        columns = [[None] if index in made else [output.gradients[index] for output in outputs] for index in range(len(variables))]
        losses = [_weighted_loss(output) for output in outputs]
        near = {**made, **({} if machines else _near([*columns, losses], [*devices, device], outputs))}
        if machines:
            columns = _over_machines(columns, variables, devices, machines)
        gradients = []
        for index, (column, variable, place) in enumerate(zip(columns, variables, devices, strict=True)):
            with tf.name_scope(variable.op.name), tf.device(place):
                gradients.append(near[index] if index in near else add(column, variable))
        examples = _total([output.examples for output in outputs], machines)
        return structs.Sum(
            gradients=tuple(gradients),
            variables=variables,
            weight=tf.constant(1.0) if normalised(outputs) else _total([output.weight for output in outputs], machines),
            loss=near[len(variables)] if len(variables) in near else _total(losses, machines),
            state=_state(outputs, examples, statistics, machines),
            examples=examples,
            metrics=add_metrics([output.metrics for output in outputs], machines),
        )


def normalised(outputs: Sequence[structs.TowerOutput]) -> bool:
    """Whether the towers' weights are shares of one batch, which add up to 1, and not the model's own counts."""
    return all(output.output.weight is None for output in outputs)


def _machines(outputs: Sequence[structs.TowerOutput]) -> Machines:
    """The places of each machine's towers, by its CPU's device; empty where there is one machine only."""
    places: dict[str, list[int]] = {}
    for place, output in enumerate(outputs):
        places.setdefault(output.tower.host, []).append(place)
    return places if len(places) > 1 else {}


def _near(columns: Sequence[Sequence[Any]], devices: Sequence[str], outputs: Sequence[structs.TowerOutput]) -> dict[int, tf.Tensor]:
    """Of the columns, one tensor from each tower, the sums of small ones by their places, which come from a tower as one tensor.

    That is for CPU devices: between them a copy of a few kilobytes costs less than a transfer.
    """
    hosts = [output.tower.devices[0] for output in outputs]
    if len(outputs) < 2 or any(tf.DeviceSpec.from_string(host).device_type != 'CPU' for host in hosts):
        return {}
    groups: dict[tuple[str, tf.DType], list[int]] = {}
    for index, (column, device) in enumerate(zip(columns, devices, strict=True)):
        if all(packing.is_small(part, near=True) for part in column):
            groups.setdefault((tf.DeviceSpec.from_string(device).to_string(), column[0].dtype), []).append(index)
    found: dict[int, tf.Tensor] = {}
    for (device, _), places in groups.items():
        if len(places) > 1:
            found.update(zip(places, packing.added([columns[at] for at in places], hosts=hosts, device=device), strict=True))
    return found


def _over_machines(
    columns: Sequence[Sequence[structs.Gradient]], variables: Sequence[tf.Variable], devices: Sequence[str], machines: Machines
) -> list[list[structs.Gradient]]:
    """For each variable the sums over each machine's towers, small ones packed for their way to `devices`; None = no gradient."""
    found: list[list[structs.Gradient]] = [[] for _ in variables]
    for host, places in machines.items():
        small: dict[str, list[int]] = {}
        for index, (column, variable) in enumerate(zip(columns, variables, strict=True)):
            own = [column[place] for place in places]
            with tf.name_scope(variable.op.name), tf.device(host):
                partial: Any = add(own, variable) if any(gradient is not None for gradient in own) else None
            found[index].append(partial)
            if packing.is_small(partial) and not packing.same_machine(host, devices[index]):
                small.setdefault(f'{devices[index]} {partial.dtype.name}', []).append(index)
        for indices in small.values():
            values: Any = [found[index][-1] for index in indices]
            values = packing.brought(values, host=host, device=devices[indices[0]])
            for index, value in zip(indices, values, strict=True):
                found[index][-1] = value
    return found


def add(gradients: Sequence[structs.Gradient], variable: tf.Variable) -> structs.Gradient:
    """The sum of one variable's gradients: sparse if all are, None if all are; None in some counts as zero."""
    present = [g for g in gradients if g is not None]
    if not present:
        logging.warning('No gradient reaches the variable %r in any tower; it is not trained.', variable.op.name)
        return None
    if all(isinstance(g, tf.IndexedSlices) for g in present):
        if len(present) == 1:
            return present[0]
        values = tf.concat([g.values for g in present], 0)
        return tf.IndexedSlices(values, tf.concat([g.indices for g in present], 0), present[0].dense_shape)
    return _add([dense(g, variable) for g in present])


def dense(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable) -> tf.Tensor:
    """A gradient of the variable's shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(tf.expand_dims(gradient.indices, 1), tf.int64)
    return tf.scatter_nd(rows, gradient.values, tf.shape(variable, out_type=tf.int64))


def add_metrics(metrics: Sequence[Mapping[str, structs.Metric]], machines: Machines | None = None) -> dict[str, structs.Metric]:
    """Metrics of several towers as one: their sums are added, on each of several `machines` first."""
    return {
        name: structs.Metric(
            tuple(_total(list(parts), machines or {}) for parts in zip(*[m[name].sums for m in metrics], strict=True)), first.result
        )
        for name, first in metrics[0].items()
    }


def _add(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.add_n(tensors)


def _total(tensors: Sequence[tf.Tensor], machines: Machines) -> tf.Tensor:
    """The sum of one tensor of each tower."""
    known: list[Any] = [tf.get_static_value(tensor) for tensor in tensors] if machines else [None]
    if all(value is not None for value in known):
        return tf.constant(sum(known), tensors[0].dtype)
    partial = list(tensors) if not machines else []
    for host, places in machines.items():
        with tf.device(host):
            partial.append(_add([tensors[place] for place in places]))
    return _add(partial)


def _weighted_loss(output: structs.TowerOutput) -> tf.Tensor:
    with tf.device(output.tower.devices[0]):
        return tf.math.multiply_no_nan(output.output.loss, output.weight)


def _state(
    outputs: Sequence[structs.TowerOutput], examples: tf.Tensor, statistics: str, machines: Machines
) -> tuple[structs.StateWrite, ...]:
    """One write for each of tower 0's, its value the towers' mean weighted by examples; what isn't a float is tower 0's.

    Raises:
      ValueError: the towers write different variables.
    """
    towers = [_by_target(output.state) for output in outputs]
    for output, writes in zip(outputs, towers, strict=True):
        if differing := writes.keys() ^ towers[0].keys():
            names = ', '.join(sorted(f'{name!r} ({kind})' for name, kind, _ in differing))
            raise ValueError(
                f'{output.tower.scope} and {outputs[0].tower.scope} update different state: {names}; '
                'expected the same updates of the same variables in each tower.'
            )
    made = []
    for target, write in towers[0].items():
        value = write.value
        if statistics == 'mean' and value.dtype.is_floating and len(outputs) > 1:
            value = _total(
                [_share(output, writes[target].value, examples) for output, writes in zip(outputs, towers, strict=True)], machines
            )
        made.append(structs.StateWrite(write.variable, write.kind, value))
    return tuple(made)


def _by_target(state: Sequence[structs.StateWrite]) -> dict[tuple[str, str, int], structs.StateWrite]:
    """A tower's writes by variable, kind and how many there were before of the same."""
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    found = {}
    for write in state:
        key = (write.variable.op.name, write.kind)
        found[(*key, seen[key])] = write
        seen[key] += 1
    return found


def _share(output: structs.TowerOutput, value: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
    with tf.device(output.tower.devices[0]):
        own, whole = (tf.get_static_value(count) for count in (output.examples, examples))
        if own is None or whole is None:
            share = tf.cast(output.examples, tf.float32) / tf.cast(examples, tf.float32)
        else:  # a constant of its own, so that nothing crosses devices for it
            share = tf.constant(np.float32(own) / np.float32(whole))
        return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))
