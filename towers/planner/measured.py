"""Bytes that a step held, from the runtime's own record of it."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which a device held most.

    Attributes:
      device: such as '/cpu:1'.
      bytes: what the step's own tensors held then; variables are not among them.
      tensors: (operation, bytes) of those that were there, the biggest first.
    """

    device: str
    bytes: int
    tensors: Sequence[tuple[str, int]]


def options() -> tf.RunOptions:
    """With which a step is run to be measured."""
    return tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)


def peaks(metadata: tf.RunMetadata) -> dict[str, Peak]:
    """The peak of each device, by its name, from a step that was run with `options`."""
    events: dict[str, list[tuple[int, int, str]]] = collections.defaultdict(list)
    for stats in metadata.step_stats.dev_stats:
        kept = [(node.node_name, memory.allocation_records) for node in stats.node_stats for memory in node.memory]
        for name, records in kept:
            events[name_of(stats.device)] += [(record.alloc_micros, record.alloc_bytes, name) for record in records]
    return {device: _peak(device, found) for device, found in events.items()}


def transfers(metadata: tf.RunMetadata) -> dict[tuple[str, str], int]:
    """(from, to) -> bytes that went from one device to another, from a step that was run with `options`."""
    made = {}
    for stats in metadata.step_stats.dev_stats:
        for node in stats.node_stats:
            made.update({(node.node_name, output.slot): output.tensor_description for output in node.output})
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for graph in metadata.partition_graphs:
        bundles = {node.name: node.input for node in graph.node if node.op == 'OptionalFromValue'}
        for node in (node for node in graph.node if node.op in ('_Send', '_HostSend')):
            pair = tuple(name_of(node.attr[end].s.decode()) for end in ('send_device', 'recv_device'))
            for name, _, slot in (each.partition(':') for each in bundles.get(node.input[0], node.input[:1])):
                found[pair[0], pair[1]] += _size(made.get((name, int(slot or 0))))
    return dict(sorted((pair, size) for pair, size in found.items() if size))


def _size(sent: Any) -> int:
    """Bytes of a tensor that is described in a step's record; 0 where it isn't in it."""
    return 0 if sent is None else math.prod(dim.size for dim in sent.shape.dim) * tf.as_dtype(sent.dtype).size


def name_of(device: str) -> str:
    """'/job:localhost/replica:0/task:0/device:CPU:1' and '/device:CPU:1' as '/cpu:1'; no device is the first CPU."""
    spec = tf.DeviceSpec.from_string(device)
    return f'/{(spec.device_type or "CPU").lower()}:{spec.device_index or 0}'


def _peak(device: str, events: Sequence[tuple[int, int, str]]) -> Peak:
    """Frees come before allocations of the same microsecond, as when a buffer is used again."""
    held: dict[str, int] = collections.defaultdict(int)
    total, most, then = 0, 0, {}
    for _, size, node in sorted(events, key=lambda event: (event[0], event[1] > 0)):
        total += size
        held[node] += size
        if total > most:
            most, then = total, dict(held)
    tensors = sorted(((node, size) for node, size in then.items() if size > 0), key=lambda pair: -pair[1])
    return Peak(device, most, tensors)
