"""Small tensors that cross from one device to another as one, since a transfer costs more than their bytes."""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_SMALL_BYTES = 1 << 16
_NEAR_BYTES = 1 << 14  # inside a process, where a transfer costs some 2.5 us of processor time and no more for many bytes


def same_machine(device: str, other: str) -> bool:
    """Whether two devices are of one process, so that nothing crosses a network between them."""
    specs = [tf.DeviceSpec.from_string(name) for name in (device, other)]
    return (specs[0].job, specs[0].task) == (specs[1].job, specs[1].task)


def is_small(value: Any, *, near: bool = False) -> bool:
    """Whether it is a dense tensor or variable of a known size that is worth packing, for another machine or one that is `near`."""
    if value is None or isinstance(value, tf.IndexedSlices) or not value.shape.is_fully_defined():
        return False
    return (value.shape.num_elements() or 0) * value.dtype.size <= (_NEAR_BYTES if near else _SMALL_BYTES)


def brought(values: Sequence[tf.Tensor], *, host: str, device: str) -> list[tf.Tensor]:
    """Several tensors of one type on a device, where they come as one.

    Args:
      values: of known shapes.
      host: device string of the CPU that they are packed on.
      device: device string of where they are wanted.
    """
    if len(values) < 2:
        return list(values)
    with tf.device(host):
        flat = packed(values)
    with tf.device(device):
        return unpacked(flat, values)


def added(columns: Sequence[Sequence[tf.Tensor]], *, hosts: Sequence[str], device: str) -> list[tf.Tensor]:
    """The sums of several tensors of one type, each over the same devices, from each of which they come as one.

    Args:
      columns: for each sum one tensor from each device, of known shapes.
      hosts: those devices.
      device: device string of where the sums are wanted.
    """
    packs = []
    for host, values in zip(hosts, zip(*columns, strict=True), strict=True):
        with tf.device(host):
            packs.append(packed(values))
    with tf.device(device):
        return unpacked(tf.add_n(packs), [column[0] for column in columns])


def packed(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Several tensors of one type as one of a single axis, on the current device."""
    return tf.concat([value if value.shape.rank == 1 else tf.reshape(value, [-1]) for value in values], 0, name='packed')


def unpacked(flat: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What was packed, in the shapes of `values`, on the current device."""
    pieces = tf.split(flat, [value.shape.num_elements() for value in values])
    return [piece if value.shape.rank == 1 else tf.reshape(piece, value.shape) for piece, value in zip(pieces, values, strict=True)]
