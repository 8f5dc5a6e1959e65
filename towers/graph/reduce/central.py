"""The towers' outputs added on one device: the classic way, deterministic in its order.

What the towers of one machine made is added on its own CPU first, where there are several machines, so that one tensor
crosses for each sum and machine, whatever its number of towers.
"""

import collections
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow.compat.v1 as tf
from absl import logging

from towers import structs, transfers
from towers.graph.reduce import packing

Machines: TypeAlias = Mapping[str, Sequence[int]]  # a machine's CPU -> the places of its towers
Target: TypeAlias = tuple[str, str, int]  # of a write: variable, kind, and how many there were before of the same

_NO_NUMBERS = (tf.string, tf.variant, tf.resource)


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
    devices = [variable.device if beside else device for variable in variables]
    machines = _machines(outputs, [device, *devices, *[write.variable.device for write in outputs[0].state]])
    with tf.device(device), tf.name_scope('sum'):
        columns = [
            [None] * len(outputs) if index in made else [output.gradients[index] for output in outputs] for index in range(len(variables))
        ]
        examples = _total(_over_machines([[output.examples for output in outputs]], [device], machines)[0])
        losses = [_weighted_loss(output) for output in outputs]
        weights = [tf.constant(1.0)] if normalised(outputs) else [output.weight for output in outputs]
        means, sums = _means(outputs, examples, statistics), _sums([output.metrics for output in outputs])
        if machines:
            means.update(_firsts(outputs, means))
        state = _by_target(outputs[0].state)
        written = [state[target].variable.device or device for target in means]
        if machines:
            places = [*devices, device, device, *written, *[device] * len(sums)]
            columns = _over_machines([*columns, losses, weights, *means.values(), *sums], places, machines, variables)
        else:
            *columns, losses = _together([*columns, losses], [*devices, device], outputs)
            columns += [losses, weights, *_together(list(means.values()), written, outputs), *sums]
        gradients = []
        for index, (variable, place) in enumerate(zip(variables, devices, strict=True)):
            with tf.name_scope(variable.op.name), tf.device(place):
                gradients.append(made[index] if index in made else add(columns[index], variable))
        losses, weights, *rest = columns[len(variables) :]
        return structs.Sum(
            gradients=tuple(gradients),
            variables=variables,
            weight=_total(weights),
            loss=_total(losses),
            state=_state(outputs[0], dict(zip(means, rest, strict=False))),
            examples=examples,
            metrics=_metrics(outputs[0].metrics, rest[len(means) :]),
        )


def normalised(outputs: Sequence[structs.TowerOutput]) -> bool:
    """Whether the towers' weights are shares of one batch, which add up to 1, and not the model's own counts."""
    return all(output.output.weight is None for output in outputs)


def _machines(outputs: Sequence[structs.TowerOutput], devices: Iterable[str]) -> Machines:
    """The places of each machine's towers, by its CPU's device; empty where there is one only, and all `devices` of sums are there."""
    places: dict[str, list[int]] = {}
    for place, output in enumerate(outputs):
        places.setdefault(output.tower.host, []).append(place)
    alone = len(places) == 1 and all(transfers.same_machine(outputs[0].tower.host, place) for place in dict.fromkeys(devices) if place)
    return {} if alone else places


def _together(columns: Sequence[Sequence[Any]], devices: Sequence[str], outputs: Sequence[structs.TowerOutput]) -> list[list[Any]]:
    """The columns, one gradient or tensor from each tower, as they come to their sums' devices: in few transfers from each tower."""
    rows: list[list[Any]] = [[column[place] for column in columns] for place in range(len(outputs))]
    targets = [transfers.name_of(device) for device in devices]
    for row, output in zip(rows, outputs, strict=True):
        source = transfers.name_of(output.tower.devices[0])
        for target in filter(functools.partial(transfers.are_bundled, source), dict.fromkeys(targets)):
            places = [place for place, device in enumerate(targets) if device == target]
            for place, value in zip(places, _brought([row[place] for place in places], source, target), strict=True):
                row[place] = value
    return [[row[place] for row in rows] for place in range(len(columns))]


def _brought(gradients: Sequence[structs.Gradient], source: str, target: str) -> list[structs.Gradient]:
    """Gradients of a tower on the device of their sums; those of gathered rows are there already."""
    flat: list[tf.Tensor] = []
    for gradient in gradients:
        flat += [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
    crossing = [at for at, leaf in enumerate(flat) if leaf is not None and leaf.device == source]
    for group in transfers.groups([flat[at] for at in crossing]):
        places = [crossing[at] for at in group]
        for at, value in zip(places, transfers.brought([flat[at] for at in places], source=source, target=target), strict=True):
            flat[at] = value
    leaves = iter(flat)
    return [
        tf.IndexedSlices(next(leaves), next(leaves), g.dense_shape) if isinstance(g, tf.IndexedSlices) else next(leaves) for g in gradients
    ]


def _over_machines(
    columns: Sequence[Sequence[Any]], devices: Sequence[str], machines: Machines, variables: Sequence[tf.Variable] = ()
) -> list[list[Any]]:
    """For each column, one tensor from each tower, the sums over each machine's towers, small ones packed for their way to `devices`.

    The first columns are the gradients of `variables`; None = no gradient. Of the others those stay as they are whose sum is known;
    None = nothing from this tower.
    """
    known = {index for index, column in enumerate(columns) if index >= len(variables) and _known(column) is not None}
    found: list[list[Any]] = [list(column) if index in known or not machines else [] for index, column in enumerate(columns)]
    for host, places in machines.items():
        small: dict[str, list[int]] = {}
        for index in (index for index in range(len(columns)) if index not in known):
            own = [columns[index][place] for place in places]
            partial = _partial(own, host, variables[index] if index < len(variables) else None)
            found[index].append(partial)
            if packing.is_small(partial) and not transfers.same_machine(host, devices[index]):
                small.setdefault(f'{transfers.name_of(devices[index])} {partial.dtype.name}', []).append(index)
        for indices in small.values():
            values: Any = [found[index][-1] for index in indices]
            values = packing.brought(values, host=host, device=devices[indices[0]])
            for index, value in zip(indices, values, strict=True):
                found[index][-1] = value
    return found


def _partial(own: Sequence[Any], host: str, variable: tf.Variable | None) -> Any:
    """The sum over a machine's towers on its CPU; None where they have nothing of it, no gradient of the variable."""
    if variable is None:
        with tf.device(host):
            return _add(own) if any(tensor is not None for tensor in own) else None
    with tf.name_scope(variable.op.name), tf.device(host):
        return add(own, variable) if any(gradient is not None for gradient in own) else None


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


def add_metrics(metrics: Sequence[Mapping[str, structs.Metric]]) -> dict[str, structs.Metric]:
    """Metrics of several towers as one: their sums are added."""
    return _metrics(metrics[0], _sums(metrics))


def _sums(metrics: Sequence[Mapping[str, structs.Metric]]) -> list[list[tf.Tensor]]:
    """The sums of all metrics, one column after the other."""
    return [list(column) for name in metrics[0] for column in zip(*[m[name].sums for m in metrics], strict=True)]


def _metrics(first: Mapping[str, structs.Metric], sums: Sequence[Sequence[tf.Tensor]]) -> dict[str, structs.Metric]:
    """Metrics as those of the first tower, of the columns of `_sums`."""
    totals = iter([_total(column) for column in sums])
    return {name: structs.Metric(tuple(itertools.islice(totals, len(metric.sums))), metric.result) for name, metric in first.items()}


def _add(tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    return present[0] if len(present) == 1 else tf.add_n(present)


def _total(column: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of a column, a constant where it is known, so that nothing crosses for it."""
    known = _known(column)
    return _add(column) if known is None else tf.constant(known, column[0].dtype)


def _known(column: Sequence[tf.Tensor]) -> Any:
    """The sum of scalars that are known; None where they aren't."""
    values: list[Any] = [0 if tensor is None else tf.get_static_value(tensor) for tensor in column] if column[0].shape.rank == 0 else [None]
    return None if any(value is None for value in values) else sum(values)


def _weighted_loss(output: structs.TowerOutput) -> tf.Tensor:
    with tf.device(output.tower.devices[0]):
        return tf.math.multiply_no_nan(output.output.loss, output.weight)


def _means(outputs: Sequence[structs.TowerOutput], examples: tf.Tensor, statistics: str) -> dict[Target, list[tf.Tensor]]:
    """For each write of tower 0's that the towers share their part of its value, weighted by examples; one that isn't a float is tower 0's.

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
    averaged = [target for target, write in towers[0].items() if write.value.dtype.is_floating and statistics == 'mean' and len(towers) > 1]
    shares = _shares(outputs, examples) if averaged else []
    return {
        target: [_part(output, writes[target].value, share) for output, writes, share in zip(outputs, towers, shares, strict=True)]
        for target in averaged
    }


def _firsts(outputs: Sequence[structs.TowerOutput], means: Mapping[Target, Any]) -> dict[Target, list[tf.Tensor | None]]:
    """For each other write of numbers of tower 0's its value, which comes from that tower's machine alone."""
    host, others = outputs[0].tower.host, [None] * (len(outputs) - 1)
    return {
        target: [write.value, *others]
        for target, write in _by_target(outputs[0].state).items()
        if target not in means and write.value.dtype not in _NO_NUMBERS and transfers.same_machine(write.value.device, host)
    }


def _state(first: structs.TowerOutput, means: Mapping[Target, Sequence[tf.Tensor]]) -> tuple[structs.StateWrite, ...]:
    """One write for each of tower 0's, its value the sum of a column where there is one, made beside the variable."""
    made = []
    for target, write in _by_target(first.state).items():
        with tf.device(write.variable.device):
            value = _add(means[target]) if target in means else write.value
        made.append(structs.StateWrite(write.variable, write.kind, value))
    return tuple(made)


def _by_target(state: Sequence[structs.StateWrite]) -> dict[Target, structs.StateWrite]:
    """A tower's writes by variable, kind and how many there were before of the same."""
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    found: dict[Target, structs.StateWrite] = {}
    for write in state:
        key = (write.variable.op.name, write.kind)
        found[(*key, seen[key])] = write
        seen[key] += 1
    return found


def _shares(outputs: Sequence[structs.TowerOutput], examples: tf.Tensor) -> list[tf.Tensor]:
    """Each tower's part of all examples, on it."""
    found = []
    for output in outputs:
        with tf.device(output.tower.devices[0]):
            found.append(transfers.share(output.examples, examples))
    return found


def _part(output: structs.TowerOutput, value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    with tf.device(output.tower.devices[0]):
        return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))
