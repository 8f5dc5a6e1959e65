"""What soft placement would move: operations whose device a session doesn't have, or that have no kernel for it.

TensorFlow places a whole graph when a session first runs anything of it. With soft placement off it says instead what it
can't place, one group of operations at a time, so a copy of the graph is placed again and again without those found.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors

_ROUNDS = 20
_SHOWN = 10
_REFUSED = re.compile(r'Cannot assign a device for operation ([^\s:]+)')
_MEMBER = re.compile(r'^ {2}(\S+) \(\w+\) \S+$', re.MULTILINE)  # of a group that must be together, with a device of its own


@dataclasses.dataclass(frozen=True)
class Moved:
    """An operation that would not run where it was put.

    Attributes:
      name: of the operation.
      type: its kind.
      device: where it was put.
      line: the user's line that made it, or None.
    """

    name: str
    type: str
    device: str
    line: str | None

    def __str__(self) -> str:
        return f'{self.name} ({self.type}) from {self.device}' + (f', made at {self.line}' if self.line else '')


def check(graph: tf.Graph, proto: tf.ConfigProto, config: config_lib.DeviceConfig) -> None:
    """Lists what soft placement would move, as a WARNING; where it is off, or `placement` is 'strict', that is an error.

    Args:
      graph: complete but for what runs on the CPU.
      proto: the session's options.
      config: `placement` is used.

    Raises:
      ValueError: operations are where they can't run, and nothing may move.
    """
    found = find(graph, proto)
    if not found:
        return
    more = [f'and {len(found) - _SHOWN} more'] if len(found) > _SHOWN else []
    what = '1 operation can not run where it was put' if len(found) == 1 else f'{len(found)} operations can not run where they were put'
    text = f'{what}: ' + '; '.join([*map(str, found[:_SHOWN]), *more])
    if config.placement == 'strict' or not proto.allow_soft_placement:
        raise ValueError(f'{text}. Name a device that can, or use --placement=soft, which moves what can not to the CPU.')
    logging.warning('%s. The CPU does it; --placement=strict makes it an error.', text)


def find(graph: tf.Graph, proto: tf.ConfigProto) -> list[Moved]:
    """The operations of `graph` that a session with `proto` would move, in the graph's order; those inside functions are not seen."""
    options = tf.ConfigProto()
    options.CopyFrom(proto)
    options.allow_soft_placement = False
    options.log_device_placement = False
    with tf.Graph().as_default(), tf.Session(config=options) as session:
        devices = [tf.DeviceSpec.from_string(device.name) for device in session.list_devices()]
    operations = graph.get_operations()
    missing = {name for name in {operation.device for operation in operations} if name and not _exists(name, devices)}
    names = {operation.name for operation in operations if operation.device in missing}
    if any(device.device_type == 'GPU' for device in devices):
        names |= _without_kernel(graph.as_graph_def(), options, names)
    return [Moved(op.name, op.type, op.device, errors.source_line(op)) for op in operations if op.name in names and op.device]


def _exists(wanted: str, devices: Sequence[tf.DeviceSpec]) -> bool:
    spec = tf.DeviceSpec.from_string(wanted)
    parts = ('job', 'replica', 'task', 'device_type', 'device_index')
    return any(all(getattr(spec, part) in (None, getattr(device, part)) for part in parts) for device in devices)


def _without_kernel(definition: tf.GraphDef, options: tf.ConfigProto, known: set[str]) -> set[str]:
    """Names of further operations that a session with strict `options` refuses to place, each round those of one message."""
    nodes = {node.name: node for node in definition.node}
    found = set(known)
    for _ in range(_ROUNDS):
        for name in found:
            nodes[name].device = ''
        new = {name for refused in _refused(definition, options) for name in _placed_with(refused, nodes)}
        if not new:
            break
        kinds = {_kind(nodes[name]) for name in new}  # what has no kernel once has none anywhere
        found |= new | {node.name for node in definition.node if node.device and _kind(node) in kinds}
    return found - known


def _placed_with(name: str, nodes: Mapping[str, tf.NodeDef]) -> list[str]:
    """Of a refused operation and those that it must be with: the ones with a device of their own."""
    together = [group.decode().removeprefix('loc:@') for group in nodes[name].attr['_class'].list.s]
    return [each for each in (name, *together) if each in nodes and nodes[each].device]


def _kind(node: tf.NodeDef) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """What decides whether there is a kernel: the type, the type of device, and the types of numbers."""
    types = sorted((name, value.type) for name, value in node.attr.items() if value.type)
    return node.op, str(tf.DeviceSpec.from_string(node.device).device_type), tuple(types)


def _refused(definition: tf.GraphDef, options: tf.ConfigProto) -> set[str]:
    """Names in a session's complaint about the first group of operations that it can't place; none where it places all."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name='')
        nothing = tf.no_op()
        try:
            with tf.Session(graph=graph, config=options) as session:
                session.run(nothing)
        except tf.errors.InvalidArgumentError as error:
            return {*_MEMBER.findall(error.message.partition('Colocation members')[2]), *_REFUSED.findall(error.message)}
    return set()
