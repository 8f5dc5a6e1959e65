"""From a total to the gradient that is applied: links, each a small function from `Sum` to `Sum`, in one fixed order.

    sum in fp32 -> mean, or times the weight -> [finite?] -> add_penalties -> clip -> the user's links -> (applied by optimizers.apply)

`run` holds the order. Every link works on each variable's own device and in fp32 at least: gradients of half-precision
variables are cast back only when they are applied. A link makes the same number of operations for any number of towers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import reads, structs

Link: TypeAlias = Callable[[structs.Sum], structs.Sum]


def run(
    total: structs.Sum,
    config: config_lib.OptimizerConfig,
    *,
    normalised: bool,
    penalties: Sequence[tf.Tensor] = (),
    links: Sequence[Link] = (),
) -> tuple[structs.Sum, tf.Tensor, structs.Sum]:
    """The whole chain: mean, penalties, clipping and the user's links.

    Args:
      total: sum over all towers.
      config: `gradient_reduction`, `l2` and `clip_norm`.
      normalised: True where the weights in `total` already add up to 1.
      penalties: scalars over the canonical variables that the loss does not contain.
      links: the user's own, in order.

    Returns:
      (Sum whose gradients are ready to apply, fp32 scalar penalty, the Sum before clipping, whose norm is worth a look)
    """
    [(made, penalty, whole)] = run_each([total], config, normalised=normalised, penalties=penalties)
    return follow(made, links), penalty, whole


def run_each(
    totals: Sequence[structs.Sum], config: config_lib.OptimizerConfig, *, normalised: bool, penalties: Sequence[tf.Tensor] = ()
) -> list[tuple[structs.Sum, tf.Tensor, structs.Sum]]:
    """The chain without a user's links over one sum that is there several times, each time beside another copy of the variables.

    The penalties are over the first one's variables, the canonical ones; their gradient is made once and brought to the others.
    """
    means = []
    for total in totals:
        averaged = mean(total, normalised=normalised)
        if config.gradient_reduction == 'sum':
            averaged = _times(averaged, total.examples if normalised else total.weight)
        means.append(averaged)
    wholes, penalty = _with_penalties(means, penalties, config.l2)
    return [(whole if config.clip_norm is None else clip(whole, config.clip_norm), penalty, whole) for whole in wholes]


def _times(total: structs.Sum, count: tf.Tensor) -> structs.Sum:
    return _map_values(total, lambda values: values * tf.cast(count, values.dtype))


def mean(total: structs.Sum, *, normalised: bool) -> structs.Sum:
    """Divides gradients and loss by the weight, which becomes 1.

    Where the weight is 0 all of them become 0, whatever they held, and so does the weight. `state`, `examples` and
    `metrics` keep their own denominators.

    Args:
      total: unnormalised sum.
      normalised: True where the weights already add up to 1; `total` is then returned as it is.
    """
    if normalised:
        return total

    def divide(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(values, tf.cast(total.weight, values.dtype))

    with tf.name_scope('mean'):
        averaged = _map_values(total, divide)
        return dataclasses.replace(averaged, loss=divide(total.loss), weight=divide(total.weight))


def add_penalties(total: structs.Sum, penalties: Sequence[tf.Tensor], l2: float) -> tuple[structs.Sum, tf.Tensor]:
    """Adds the gradient of penalties and of l2 * sum(v^2) / 2 over all trainable variables, once.

    A variable without a gradient gets the penalty's. A sparse gradient becomes dense where the penalty's is dense, which
    is logged, since each step then touches the whole table.

    Args:
      total: mean gradients.
      penalties: scalars over the canonical variables.
      l2: weight of the sum of squares, 0.0 for none.

    Returns:
      (Sum with the penalties' gradient, fp32 scalar: the sum of the penalties and l2 * sum(v^2) / 2)
    """
    [whole], penalty = _with_penalties([total], penalties, l2)
    return whole, penalty


def _with_penalties(totals: Sequence[structs.Sum], penalties: Sequence[tf.Tensor], l2: float) -> tuple[list[structs.Sum], tf.Tensor]:
    """`add_penalties` to the same sum beside several copies of the variables, the first ones being those of the penalties."""
    if not penalties and not l2:
        return list(totals), tf.zeros([])
    first = totals[0]
    with tf.name_scope('penalties'):
        terms = [tf.cast(penalty, tf.float32) for penalty in penalties]
        slopes = tf.gradients(terms, first.variables, colocate_gradients_with_ops=True) if terms else [None] * len(first.variables)
        wholes = []
        for total in totals:
            triples = zip(total.gradients, total.variables, slopes, strict=True)
            factor = functools.cache(functools.partial(_constant, l2))
            gradients, halves = zip(*[_penalised(*triple, factor if l2 else None) for triple in triples], strict=True)
            wholes.append(dataclasses.replace(total, gradients=gradients))
            if total is first and l2:
                terms.append(l2 * added(halves))
        _warn_of_dense(first, wholes[0])
        return wholes, tf.add_n(terms)


def with_penalty(loss: tf.Tensor, penalty: tf.Tensor) -> tf.Tensor:
    """The loss and what is added to it by `add_penalties`; the loss itself where that is known to be nothing."""
    return loss if tf.get_static_value(penalty) == 0 else tf.add(loss, penalty, name='total_loss')


def _warn_of_dense(before: structs.Sum, after: structs.Sum) -> None:
    densified = [
        variable.op.name
        for variable, old, new in zip(before.variables, before.gradients, after.gradients, strict=True)
        if isinstance(old, tf.IndexedSlices) and not isinstance(new, tf.IndexedSlices)
    ]
    if densified:
        logging.warning(
            'A penalty on all rows makes the sparse gradient dense of %s: each step updates the whole table; leave it out of the '
            'penalty to keep it sparse.',
            ', '.join(densified),
        )


def global_norm(total: structs.Sum) -> tf.Tensor:
    """fp32 scalar: the square root of the sum of squares over all gradients, repeated rows summed first."""
    with tf.name_scope('global_norm'):
        return _norm(_map(total, _sum_rows))


def clip(total: structs.Sum, norm: float) -> structs.Sum:
    """Scales all gradients by norm / global norm where that is below 1.

    Where the global norm is not finite all gradients become NaN, so the fault can't hide in a few entries. Repeated rows
    of sparse gradients are summed first, or they would count as separate entries of the norm.

    Args:
      total: mean gradients.
      norm: largest global norm, above 0 (Pascanu et al., On the difficulty of training recurrent neural networks).
    """
    with tf.name_scope('clip'):
        total = _map(total, _sum_rows)
        found = _norm(total)
        factor = tf.where(tf.math.is_finite(found), norm / tf.maximum(found, norm), float('nan'))
        return _map_values(total, lambda values: values * tf.cast(factor, values.dtype))


def follow(total: structs.Sum, links: Sequence[Link]) -> structs.Sum:
    """Passes `total` through the user's links, in order.

    Raises:
      ValueError: a link returns something else than a Sum over the same variables.
    """
    for link in links:
        found = link(total)
        if not isinstance(found, structs.Sum) or len(found.gradients) != len(total.variables):
            raise ValueError(
                f'Link {getattr(link, "__name__", link)!r} must return a Sum with {len(total.variables)} gradients, got {found!r:.200}; '
                'return dataclasses.replace(total, gradients=...).'
            )
        total = found
    return total


def present(total: structs.Sum) -> list[tuple[tf.Tensor | tf.IndexedSlices, tf.Variable]]:
    """The gradients that there are, each with its variable."""
    pairs = zip(total.gradients, total.variables, strict=True)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]


def _map(total: structs.Sum, change: Callable[[structs.Gradient], structs.Gradient]) -> structs.Sum:
    """`total` with each gradient changed on its variable's device; None stays None."""
    gradients = []
    for gradient, variable in zip(total.gradients, total.variables, strict=True):
        with tf.device(variable.device):
            gradients.append(None if gradient is None else change(gradient))
    return dataclasses.replace(total, gradients=tuple(gradients))


def _map_values(total: structs.Sum, change: Callable[[tf.Tensor], tf.Tensor]) -> structs.Sum:
    def changed(gradient: structs.Gradient) -> structs.Gradient:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
        return change(gradient)

    return _map(total, changed)


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """All entries of a gradient that may differ from 0, repeated rows as they come."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def added(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of scalars, those of each device there first: one number crosses from each, as many small transfers are slow."""
    columns: dict[str, list[tf.Tensor]] = {}
    for scalar in scalars:
        columns.setdefault(scalar.device, []).append(scalar)
    sums = []
    for device, column in columns.items():
        with tf.device(device):
            sums.append(tf.add_n(column))
    return sums[0] if len(sums) == 1 else tf.add_n(sums)


def _norm(total: structs.Sum) -> tf.Tensor:
    halves = []
    for gradient, variable in present(total):
        with tf.device(variable.device):
            halves.append(tf.cast(tf.nn.l2_loss(values_of(gradient)), tf.float32))
    return tf.sqrt(2.0 * added(halves)) if halves else tf.zeros([])


def _sum_rows(gradient: structs.Gradient) -> structs.Gradient:
    """The same gradient with each row named once."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _penalised(
    gradient: structs.Gradient, variable: tf.Variable, slope: structs.Gradient, l2: Callable[[str, tf.DType], tf.Tensor] | None
) -> tuple[structs.Gradient, tf.Tensor | None]:
    """The gradient with the penalties' slope and l2 * v added, and sum(v^2) / 2; `l2` gives its factor on a device, in a type."""
    with tf.device(variable.device):
        added = _add(gradient, slope)
        if l2 is None:
            return added, None
        # Behind the gradient, or all of it would be made when a step begins, before any tower, and kept until its end.
        with tf.control_dependencies([] if added is None else [values_of(added)]):
            value = at_least_fp32(reads.read(variable))
        return _add(added, l2(variable.device, value.dtype) * value), tf.cast(tf.nn.l2_loss(value), tf.float32)


def _constant(value: float, device: str, dtype: tf.DType) -> tf.Tensor:
    with tf.device(None), tf.device(device):
        return tf.constant(value, dtype)


def at_least_fp32(values: tf.Tensor) -> tf.Tensor:
    """The same values, those of half precision in fp32."""
    return tf.cast(values, tf.float32) if values.dtype in (tf.float16, tf.bfloat16) else values


def _add(left: structs.Gradient, right: structs.Gradient) -> structs.Gradient:
    """Sum of two gradients of one variable, sparse only if both are; `right` may be of half precision."""
    if isinstance(right, tf.IndexedSlices):
        right = tf.IndexedSlices(at_least_fp32(right.values), right.indices, right.dense_shape)
    elif right is not None:
        right = at_least_fp32(right)
    if left is None or right is None:
        return right if left is None else left
    sparse = [part for part in (left, right) if isinstance(part, tf.IndexedSlices)]
    if not sparse:
        return left + right
    if len(sparse) == 1:
        dense = right if left is sparse[0] else left
        return tf.tensor_scatter_nd_add(dense, tf.expand_dims(sparse[0].indices, 1), sparse[0].values)
    indices = tf.concat([tf.cast(part.indices, tf.int64) for part in sparse], axis=0)
    return tf.IndexedSlices(tf.concat([part.values for part in sparse], axis=0), indices, left.dense_shape)
