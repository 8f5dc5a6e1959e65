"""Whether what is to be applied is finite. Part of the stage `chain`."""

import math
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import chain


def everywhere(total: structs.Sum, also: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Bool scalar: every entry of every gradient is finite in its variable's type, and every entry of `also`.

    It looks at the sum of the entries, which one pass over the memory makes and an infinite or undefined entry always
    spoils; so entries so large that their sum overflows don't count as finite either.

    Args:
      total: gradients that are ready to apply.
      also: other tensors of floats; those of other types are finite.
    """
    with tf.name_scope('finite'):
        sums: list[tf.Tensor] = []
        axes: dict[tuple[str, int], tf.Tensor] = {}  # shared, as there is a sum for each gradient
        values = [(chain.values_of(gradient), variable.dtype.base_dtype, variable.device) for gradient, variable in chain.present(total)]
        others = [(value, value.dtype, value.device) for value in also if value.dtype.is_floating and not _is_known_finite(value)]
        for value, dtype, device in [*values, *others]:
            with tf.device(device):
                sums.append(_traced_sum(tf.cast(value, dtype), device, axes))
        return tf.math.is_finite(chain.added(sums)) if sums else tf.constant(True)


def _is_known_finite(value: tf.Tensor) -> bool:
    found = tf.get_static_value(value) if value.shape.rank == 0 else None
    return found is not None and math.isfinite(found)


def _traced_sum(values: tf.Tensor, device: str, axes: dict[tuple[str, int], tf.Tensor]) -> tf.Tensor:
    """fp32 scalar that is finite where the sum of `values` over all their axes is; see `_all_axes` for `axes`."""
    found = chain.at_least_fp32(values)
    if found.shape.rank != 0:
        found = tf.raw_ops.Sum(input=found, axis=_all_axes(found, device, axes))
    return tf.cast(found * 0, tf.float32) if found.dtype == tf.float64 else found


def _all_axes(value: tf.Tensor, device: str, known: dict[tuple[str, int], tf.Tensor]) -> tf.Tensor:
    """The numbers of all axes of a tensor, from `known` where they are."""
    rank = value.shape.rank
    if rank is None:
        return tf.range(tf.rank(value))
    if (device, rank) not in known:
        known[device, rank] = tf.constant(list(range(rank)), tf.int32)
    return known[device, rank]
