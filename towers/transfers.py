"""Tensors that cross from one device to another of the same process together.

Between CPU devices a tensor is handed over as it is, but each transfer costs some 3 to 5 us of processor time: a meeting in a table, and
a task for another thread. An optional holds any number of tensors, uncopied, and crosses as one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

_GROUP_BYTES = 1 << 20  # what comes later waits for what comes first, so not everything goes together
_GROUP = 64  # tensors: what TensorFlow keeps of an optional from when the graph is built grows with the square, 17 MB for 323


def name_of(device: str) -> str:
    """A device string as operations have it."""
    return tf.DeviceSpec.from_string(device).to_string()


def same_machine(device: str, other: str) -> bool:
    """Whether two devices are of one process, so that nothing crosses a network between them."""
    specs = [tf.DeviceSpec.from_string(name) for name in (device, other)]
    return (specs[0].job, specs[0].task) == (specs[1].job, specs[1].task)


def are_bundled(device: str, other: str) -> bool:
    """Whether tensors go together from one to the other: between two CPU devices of one process; with GPUs it has not been measured."""
    specs = [tf.DeviceSpec.from_string(name) for name in (device, other)]
    return same_machine(device, other) and specs[0] != specs[1] and all(spec.device_type == 'CPU' for spec in specs)


def brought(values: Sequence[tf.Tensor], *, source: str, target: str) -> list[tf.Tensor]:
    """Tensors of one device as they come to another, all in one transfer.

    Args:
      values: on `source`, of any types.
      source: device string.
      target: device string; `are_bundled` from the other.
    """
    return list(values) if len(values) < 2 else unbundled(bundle(values, source), values, target)


def bundle(values: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """Tensors on a device as one, a scalar variant that holds them; of many, one of bundles."""
    with tf.device(None), tf.device(device):
        if len(values) > _GROUP:
            values = [bundle(values[at : at + _GROUP], device) for at in range(0, len(values), _GROUP)]
            return bundle(values, device)
        return tf.raw_ops.OptionalFromValue(components=values, name='bundle')


def unbundled(bundle: tf.Tensor, values: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """What a bundle of `values` holds, on a device."""
    with tf.device(None), tf.device(device):
        return _taken(bundle, [(value.dtype, value.shape) for value in values])


def _taken(bundle: tf.Tensor, kinds: Sequence[tuple[tf.DType, tf.TensorShape]]) -> list[tf.Tensor]:
    if len(kinds) > _GROUP:
        parts = [kinds[at : at + _GROUP] for at in range(0, len(kinds), _GROUP)]
        bundles = _taken(bundle, [(tf.variant, tf.TensorShape([]))] * len(parts))
        return [tensor for bundle, part in zip(bundles, parts, strict=True) for tensor in _taken(bundle, part)]
    types, shapes = zip(*kinds, strict=True)
    return list(tf.raw_ops.OptionalGetValue(optional=bundle, output_types=types, output_shapes=shapes, name='unbundled'))


def share(count: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
    """The part that `count` is of all examples, an fp32 scalar on the current device.

    A constant where it is known, so that nothing crosses for it.
    """
    own, whole = tf.get_static_value(count), tf.get_static_value(examples)
    if own is None or whole is None:
        return tf.cast(count, tf.float32) / tf.cast(examples, tf.float32)
    return tf.constant(np.float32(own) / np.float32(whole))


def groups(values: Sequence[tf.Tensor]) -> Iterator[list[int]]:
    """The places of the values that go together: up to 64 neighbours of 1 MiB in all; a larger one, or one of unknown size, goes alone."""
    group: list[int] = []
    held = 0
    for place, value in enumerate(values):
        size = value.shape.num_elements() * value.dtype.size if value.shape.is_fully_defined() else None
        if size is None or size > _GROUP_BYTES:
            yield [place]
            continue
        if held + size > _GROUP_BYTES or len(group) == _GROUP:
            yield group
            group, held = [], 0
        group.append(place)
        held += size
    if group:
        yield group
