"""Small tensors that cross from one machine to another together, since a message costs more than their bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_SMALL_BYTES = 1 << 18
_FIRST_BYTES = 1 << 17
_GROUP_BYTES = 1 << 20


def is_small(value: Any, most: int = _SMALL_BYTES) -> bool:
    """Whether it is a dense tensor or variable of a known size that is worth packing, `most` bytes or fewer."""
    return value is not None and not isinstance(value, tf.IndexedSlices) and value.shape.is_fully_defined() and _size(value) <= most


def groups(values: Sequence[Any]) -> Iterator[list[int]]:
    """The places of small tensors or variables that go together: the first ones, up to 128 KiB in all, then up to 1 MiB each.

    What the first layers read is needed first, and their gradients are there last: so they are apart, where the others are many.
    """
    sizes = [_size(value) for value in values]
    most = _FIRST_BYTES if sum(sizes) > 2 * _FIRST_BYTES else _GROUP_BYTES
    group: list[int] = []
    held = 0
    for place, size in enumerate(sizes):
        if group and held + size > most:
            yield group
            group, held, most = [], 0, _GROUP_BYTES
        group.append(place)
        held += size
    if group:
        yield group


def brought(values: Sequence[tf.Tensor], *, host: str, device: str) -> list[tf.Tensor]:
    """Several tensors of one type on a device, to which they come in groups.

    Args:
      values: small ones, as `groups` takes them.
      host: device string of the CPU that they are packed on.
      device: device string of where they are wanted.
    """
    found = list(values)
    for places in groups(values) if len(values) > 1 else ():
        own = [values[place] for place in places]
        with tf.device(host):
            flat = packed(own) if len(own) > 1 else own[0]
        with tf.device(device):
            pieces = unpacked(flat, own) if len(own) > 1 else [tf.identity(flat)]
        for place, piece in zip(places, pieces, strict=True):
            found[place] = piece
    return found


def packed(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Several tensors of one type as one of a single axis, on the current device."""
    return tf.concat([value if value.shape.rank == 1 else tf.reshape(value, [-1]) for value in values], 0, name='packed')


def unpacked(flat: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What was packed, in the shapes of `values`, on the current device."""
    pieces = tf.split(flat, [value.shape.num_elements() for value in values])
    return [piece if value.shape.rank == 1 else tf.reshape(piece, value.shape) for piece, value in zip(pieces, values, strict=True)]


def _size(value: Any) -> int:
    """Bytes of a tensor or variable of a known shape."""
    return (value.shape.num_elements() or 0) * value.dtype.size
