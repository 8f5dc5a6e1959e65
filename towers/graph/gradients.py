"""Gradients of one tower's weighted loss. Part of the stage `build`.

A penalty that `get_variable` makes is one tensor that all towers share. A loss that contains it is differentiated as far
as the penalty, and the rest of the way once for all towers: so the penalty's own gradient is made once however many
towers there are, and is right also where a tower has its own copy of the variables.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import structs, upstream


@dataclasses.dataclass(frozen=True)
class Own:
    """What a tower has in place of the canonical variables.

    Attributes:
      variable: from a canonical variable to the tower's own.
      read: from a variable to the tensor that the tower's model uses for its value; None = it has not asked for that.
    """

    variable: Callable[[tf.Variable], tf.Variable]
    read: Callable[[tf.Variable], tf.Tensor | None] = lambda variable: None


@dataclasses.dataclass(frozen=True)
class Slopes:
    """One tower's gradients.

    Attributes:
      variables: of weight * loss, aligned with the tower's variables, penalties aside; None where the loss does not
        reach one. In fp32 at least.
      penalties: for each objective (a plain loss is one), of weight * loss by each shared penalty.
    """

    variables: tuple[structs.Gradient, ...]
    penalties: tuple[tuple[structs.Gradient, ...], ...]


def of(
    output: structs.ModelOutput,
    variables: Sequence[tf.Variable],
    weight: tf.Tensor,
    *,
    shared: Sequence[tf.Tensor],
    read: Callable[[tf.Variable], tf.Tensor | None] = lambda variable: None,
) -> Slopes:
    """Gradients of weight * loss.

    The weight goes in as the gradient of the loss, which costs nothing; but not where it may be 0 for a loss that
    isn't finite (a mean over no tokens), nor where half precision would lose bits of it or of a gradient.

    Args:
      output: a tower's losses.
      variables: the tower's variables.
      weight: fp32 scalar.
      shared: penalties of `get_variable`.
      read: the tower's one read of a variable, which is differentiated as far as that; None where there is none.

    Raises:
      ValueError: two objectives train one variable.
    """
    pairs = _objectives(output, variables)
    half = any(x.dtype.base_dtype.size < 4 for x in (*variables, *[loss for loss, _ in pairs]))
    early = output.weight is None and not half
    found: dict[str, structs.Gradient] = {}
    penalties = []
    for loss, wanted in pairs:
        ys = tf.cast(weight, loss.dtype) if early else None
        values = {variable.handle.name: value for variable in wanted if (value := read(variable)) is not None}
        stop = [*shared, *values.values()]
        direct = _reached(loss, wanted, stop)
        made = tf.gradients(loss, [*stop, *direct], grad_ys=ys, stop_gradients=stop, colocate_gradients_with_ops=True)
        made = [g if early or g is None else _weighted(g, weight) for g in made]
        penalties.append(tuple(made[: len(shared)]))
        by_value = dict(zip(values, made[len(shared) :], strict=False))
        by_variable = dict(zip([variable.handle.name for variable in direct], made[len(stop) :], strict=True))
        for variable in wanted:
            name = variable.handle.name
            if name in found:
                raise ValueError(f'The variable {variable.op.name!r} belongs to two objectives; give each variable to one.')
            found[name] = _add(by_variable.get(name), by_value.get(name))
    return Slopes(tuple(found.get(v.handle.name) for v in variables), tuple(penalties))


def through_penalties(slopes: Sequence[Slopes], shared: Sequence[tf.Tensor], first: structs.TowerOutput) -> tuple[structs.Gradient, ...]:
    """Tower 0's gradients, with those of all towers added that reach a variable by way of a shared penalty.

    Args:
      slopes: of each tower.
      shared: penalties of `get_variable`, over the canonical variables.
      first: tower 0's output, whose variables are the canonical ones.
    """
    made = dict(zip([v.handle.name for v in first.variables], slopes[0].variables, strict=True))
    for index, (_, wanted) in enumerate(_objectives(first.output, first.variables)):
        columns = [[slope.penalties[index][k] for slope in slopes if slope.penalties[index][k] is not None] for k in range(len(shared))]
        reached = [(penalty, column) for penalty, column in zip(shared, columns, strict=True) if column]
        if not reached:
            continue
        ys = [tf.cast(tf.add_n(column), penalty.dtype) for penalty, column in reached]
        more = tf.gradients([penalty for penalty, _ in reached], list(wanted), grad_ys=ys, colocate_gradients_with_ops=True)
        for variable, gradient in zip(wanted, more, strict=True):
            with tf.device(variable.device):
                made[variable.handle.name] = _add(made.get(variable.handle.name), gradient)
    return tuple(made[v.handle.name] for v in first.variables)


def _reached(loss: tf.Tensor, variables: Sequence[tf.Variable], stop: Sequence[tf.Tensor]) -> list[tf.Variable]:
    """The variables that the loss needs otherwise than through `stop`.

    TensorFlow follows whatever begins at each variable that it is asked for, all towers' models: time that grows with their square.
    """
    ends = {tensor.op for tensor in stop}
    needed = upstream.of([loss.op], lambda op: () if op in ends else upstream.needs(op))
    return [variable for variable in variables if variable.handle.op.name in needed]


def _objectives(output: structs.ModelOutput, variables: Sequence[tf.Variable]) -> list[tuple[tf.Tensor, tuple[tf.Variable, ...]]]:
    """Pairs of a loss and the variables that it trains."""
    return [(o.loss, tuple(o.variables)) for o in output.objectives] or [(output.loss, tuple(variables))]


def _weighted(gradient: Any, weight: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(gradient.values, weight), gradient.indices, gradient.dense_shape)
    value = _at_least_fp32(gradient)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def _at_least_fp32(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_at_least_fp32(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient


def _add(gradient: structs.Gradient, more: structs.Gradient) -> structs.Gradient:
    """The sum, sparse where both are."""
    parts = [_at_least_fp32(part) for part in (gradient, more) if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        indices = [tf.cast(part.indices, tf.int64) for part in parts]
        return tf.IndexedSlices(tf.concat([part.values for part in parts], 0), tf.concat(indices, 0), parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])
