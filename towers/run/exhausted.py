"""An out-of-memory error as one screen: where it was, the biggest tensors there with the lines that made them, what to lower."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import errors

_WANTED = re.compile(r'OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+) on (\S+) by allocator (\S+)')
_USAGE = re.compile(r'Current usage from device: (\S+), allocator: \S+\n((?:[^\n]* from [^\n]*\n?)*)')
_HELD = re.compile(r'^\s*([\d.]+)(B|KiB|MiB|GiB|TiB) from (\S+)', re.MULTILINE)
_UNITS = {'B': 0, 'KiB': 10, 'MiB': 20, 'GiB': 30, 'TiB': 40}
_TOWER = re.compile(r'tower_(\d+)/')  # structs.Tower.scope, the first of an operation's scopes
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor that was there when memory ended.

    Attributes:
      name: of the operation that made it.
      size: as the runtime says it, such as '400.00MiB'.
      line: the user's line, or None.
    """

    name: str
    size: str
    line: str | None


def is_one(error: tf.errors.OpError) -> bool:
    """Whether an error says that a device has no memory left; a full disk is another matter."""
    return isinstance(error, tf.errors.ResourceExhaustedError) and _WANTED.search(error.message) is not None


def explained(
    error: tf.errors.OpError, graph: tf.Graph, again: Callable[[tf.RunOptions], Any], *, session: str, lower: Sequence[str]
) -> errors.OutOfMemory:
    """The error with a screen.

    Args:
      error: as the session raised it, for which `is_one` holds.
      graph: that ran.
      again: makes the same step with the given options, so that the runtime lists what it holds.
      session: what kind it is, in words.
      lower: flags that make a step smaller.
    """
    error = _once_more(again) or error
    operation = errors.find_operation(error, graph)
    found = _WANTED.search(error.message)
    assert found is not None
    shape, kind, device, _ = found.groups()
    name = operation.name if operation is not None else 'an operation'
    tower = _TOWER.match(name)
    where = f'{_short(device)} ({f"tower {tower[1]}" if tower else "no tower"}) of the {session}, process {os.getpid()}'
    line = operation and _line(operation)
    first = f'Out of memory on {where}: no room for {kind}[{shape}] of {name}{f", made at {line}" if line else ""}.'
    held = _held(error.message, device, graph)
    rows = [f'  {each.size:>10}  {each.name}{f"  {each.line}" if each.line else ""}' for each in held]
    listed = [f'The biggest of what {_short(device)} held then:', *rows] if rows else ['What it held then is not known.']
    ways = f'What to lower: {", ".join(lower)}; scripts/plan.py with the same flags says what a step needs.'
    return errors.OutOfMemory(f'{first} {ways}', '\n'.join([first, *listed, ways]))


def _once_more(again: Callable[[tf.RunOptions], Any]) -> tf.errors.OpError | None:
    """The error when the same happens again, with a list of what was held; None where something else happens."""
    try:
        again(tf.RunOptions(report_tensor_allocations_upon_oom=True))
    except tf.errors.OpError as error:
        return error if is_one(error) else None
    return None


def _held(message: str, device: str, graph: tf.Graph) -> list[Held]:
    """The biggest tensors on a device, each once."""
    operations = {operation.name: operation for operation in graph.get_operations()}
    sizes: dict[str, tuple[float, str]] = {}
    for place, text in _USAGE.findall(message):
        for number, unit, name in _HELD.findall(text) if place == device else ():
            sizes[name] = max(sizes.get(name, (0.0, '')), (float(number) * (1 << _UNITS[unit]), number + unit))
    biggest = sorted(sizes.items(), key=lambda item: -item[1][0])[:_SHOWN]
    return [Held(name, text, _line(operations[name]) if name in operations else None) for name, (_, text) in biggest]


def _line(operation: tf.Operation) -> str | None:
    """The user's line; for an operation of a gradient that of the operation that it is the gradient of."""
    together = [group.decode().removeprefix('loc:@') for group in operation.colocation_groups()]
    others = [name for name in together if name != operation.name]
    forward = operation.graph.get_operation_by_name(others[0]) if others else operation
    return errors.source_line(forward)


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    task = f'{spec.job}:{spec.task} ' if spec.job not in (None, 'localhost') else ''
    return f'{task}/{(spec.device_type or "CPU").lower()}:{spec.device_index or 0}'
