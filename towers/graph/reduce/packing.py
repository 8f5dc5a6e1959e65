"""Small tensors that cross from one machine to another as one, since a message costs more than their bytes."""

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_SMALL_BYTES = 1 << 16


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
    with tf.device(host):
        flat = packed(values)
    with tf.device(device):
        return unpacked(flat, values)


def packed(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Several tensors of one type as one of a single axis, on the current device."""
    return tf.concat([value if value.shape.rank == 1 else tf.reshape(value, [-1]) for value in values], 0, name='packed')


def unpacked(flat: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What was packed, in the shapes of `values`, on the current device."""
    pieces = tf.split(flat, [value.shape.num_elements() for value in values])
    return [piece if value.shape.rank == 1 else tf.reshape(piece, value.shape) for piece, value in zip(pieces, values, strict=True)]
