"""Small tensors that cross a network as one, since a message costs more than their bytes."""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_SMALL_BYTES = 1 << 16


def same_machine(device: str, other: str) -> bool:
    """Whether two devices are of one process, so that nothing crosses a network between them."""
    specs = [tf.DeviceSpec.from_string(name) for name in (device, other)]
    return (specs[0].job, specs[0].task) == (specs[1].job, specs[1].task)


def is_small(value: Any) -> bool:
    """Whether it is a dense tensor or variable of a known size that is worth packing."""
    if value is None or isinstance(value, tf.IndexedSlices) or not value.shape.is_fully_defined():
        return False
    return (value.shape.num_elements() or 0) * value.dtype.size <= _SMALL_BYTES


def brought(values: Sequence[tf.Tensor], *, host: str, device: str) -> list[tf.Tensor]:
    """Several tensors of one type on a device, where they come as one.

    Args:
      values: of known shapes.
      host: device string of the CPU that they are packed on.
      device: device string of where they are wanted.
    """
    if len(values) < 2:
        return list(values)
    sizes = [value.shape.num_elements() for value in values]
    with tf.device(host):
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0, name='packed')
    with tf.device(device):
        return [tf.reshape(piece, value.shape) for piece, value in zip(tf.split(flat, sizes), values, strict=True)]
