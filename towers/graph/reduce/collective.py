"""Dense gradients added by all towers together: each ends with the whole sum beside its own variables, and no device is a hub.

The operations are TensorFlow's own `CollectiveReduce`: a ring of device-to-device copies on any device, NCCL between GPUs.
All towers add in one order, whatever the order in which their gradients are there, so every tower has the same bits. What
differs in size from tower to tower (rows of a table), or is a number or two (losses, counts, moving statistics), is added
on one device as by `central`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph.reduce import central, packing

Columns: TypeAlias = Mapping[int, Sequence[tf.Tensor]]  # by a variable's place, one tensor of each tower

_SMALL_BYTES = 1 << 16
_GROUP = 1  # the towers, the only ones of a session who add together


@dataclasses.dataclass(frozen=True)
class Wire:
    """How towers reach each other.

    Attributes:
      hint: 'nccl' where each tower has a GPU to itself; 'ring' goes between any devices.
      timeout_secs: that a tower waits for the others before the step fails; 0 = without end.
    """

    hint: Literal['ring', 'nccl'] = 'ring'
    timeout_secs: float = 600.0


def totals(
    outputs: Sequence[structs.TowerOutput], *, device: str, wire: Wire, statistics: Literal['mean', 'first'] = 'mean'
) -> list[structs.Sum]:
    """The unnormalised sum over towers, once for each tower: dense gradients beside its own variables, the rest shared.

    Args:
      outputs: one for each tower, with aligned gradients and variables.
      device: device string where all but the dense gradients is added.
      wire: how the towers reach each other.
      statistics: as in `central.total`.
    """
    if len(outputs) == 1:
        return [central.total(outputs, device=device, statistics=statistics)]
    with tf.name_scope('all_reduce'):
        sums = _added(_dense(outputs), [output.tower.devices[0] for output in outputs], wire)
    first = central.total(outputs, device=device, statistics=statistics, made={place: column[0] for place, column in sums.items()})
    return [
        dataclasses.replace(
            first,
            gradients=tuple(sums[place][index] if place in sums else gradient for place, gradient in enumerate(first.gradients)),
            variables=output.variables,
        )
        for index, output in enumerate(outputs)
    ]


def _dense(outputs: Sequence[structs.TowerOutput]) -> dict[int, list[tf.Tensor]]:
    """The gradients of variables for which some tower has a dense one, made dense on every tower; None counts as zero."""
    found: dict[int, list[tf.Tensor]] = {}
    for place, variable in enumerate(outputs[0].variables):
        column = [output.gradients[place] for output in outputs]
        like: Any = next((gradient for gradient in column if isinstance(gradient, tf.Tensor)), None)
        if like is None:
            continue
        found[place] = []
        for output, gradient in zip(outputs, column, strict=True):
            with tf.device(output.tower.devices[0]):
                own = tf.zeros(variable.shape, like.dtype) if gradient is None else central.dense(gradient, output.variables[place])
                found[place].append(own)
    return found


def _added(columns: Columns, devices: Sequence[str], wire: Wire) -> dict[int, list[tf.Tensor]]:
    """The sums, one on each device, in one order on all of them: the last variables' first, whose gradients are there first."""
    groups: dict[str, list[int]] = {}
    for place in sorted(columns, reverse=True):
        small = all(packing.is_small(tensor, _SMALL_BYTES) for tensor in columns[place])
        groups.setdefault(columns[place][0].dtype.name if small else str(place), []).append(place)
    ordered = sorted(groups.values(), key=len)  # the packed ones wait for all their parts
    found: dict[int, list[tf.Tensor]] = {place: [] for place in columns}
    for index, device in enumerate(devices):
        with tf.device(device):
            own = {place: column[index] for place, column in columns.items()}
            for place, whole in _sums(own, ordered, len(devices), wire).items():
                found[place].append(whole)
    if ordered:  # whoever reads the first tower's sums makes all towers take part, or it would wait in vain
        with tf.device(devices[0]), tf.control_dependencies(found[ordered[-1][-1]][1:]):
            for column in found.values():
                column[0] = tf.identity(column[0])
    return found


def _sums(own: Mapping[int, tf.Tensor], groups: Sequence[Sequence[int]], towers: int, wire: Wire) -> dict[int, tf.Tensor]:
    """One tower's side of the sums; each group crosses as one tensor, and after the one before, as NCCL wants it."""
    found: dict[int, tf.Tensor] = {}
    before: list[tf.Tensor] = []
    for instance, places in enumerate(groups, 1):
        parts = [own[place] for place in places]
        whole = parts[0] if len(parts) == 1 else packing.packed(parts)
        with tf.control_dependencies(before):
            whole = _all_reduce(whole, towers, instance, wire)
        before = [whole]
        found.update(zip(places, [whole] if len(parts) == 1 else packing.unpacked(whole, parts), strict=True))
    return found


def _all_reduce(value: tf.Tensor, towers: int, instance: int, wire: Wire) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduce(
        input=value,
        group_size=towers,
        group_key=_GROUP,
        instance_key=instance,
        merge_op='Add',
        final_op='Id',
        subdiv_offsets=[0],
        communication_hint=wire.hint,
        timeout_seconds=wire.timeout_secs,
    )
