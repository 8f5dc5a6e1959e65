"""Moving averages of the trained variables, which follow each applied update and no other."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow.compat.v1 as tf

from towers import structs

Apply: TypeAlias = Callable[[structs.Update, Sequence[tf.Tensor]], tf.Operation]

_NAME = 'ExponentialMovingAverage'  # as tf.train.ExponentialMovingAverage calls it, so that others find it


def name_of(variable: tf.Variable) -> str:
    """The name of a variable's average, in the graph and in a checkpoint."""
    return f'{variable.op.name}/{_NAME}'


def make(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """An average for each variable, in fp32 at least, beside it; not trained, and part of a checkpoint."""
    made = []
    for variable in variables:
        dtype = tf.float64 if variable.dtype.base_dtype == tf.float64 else tf.float32
        with tf.device(variable.device), tf.variable_scope(tf.get_variable_scope(), reuse=False, use_resource=True):
            zeros = tf.zeros_initializer()
            made.append(tf.get_variable(name_of(variable), variable.shape, dtype, initializer=zeros, trainable=False))
    return made


def follow(
    averages: Sequence[tf.Variable], variables: Sequence[tf.Variable], *, decay: float, step: tf.Tensor, after: tf.Operation
) -> tf.Operation:
    """a <- decay * a + (1 - decay) * v with the new values; the first update of a run sets a to v.

    Args:
      averages: aligned with `variables`.
      variables: the canonical ones.
      decay: between 0 and 1.
      step: int64 scalar, global_step before the update.
      after: the update of the variables; where it does not happen, nor does this.
    """
    made = []
    with tf.name_scope('averages/'):
        left = tf.where(tf.equal(step, 0), 0.0, decay)
        for average, variable in zip(averages, variables, strict=True):
            with tf.device(variable.device), tf.control_dependencies([after]):
                new = tf.cast(variable.read_value(), average.dtype.base_dtype)
                made.append(average.assign_sub((average.read_value() - new) * (1.0 - tf.cast(left, new.dtype)), read_value=False))
        return tf.group(after, *made, name='followed')


def followed(apply: Apply, variables: Sequence[tf.Variable], decay: float | None, step: tf.Tensor) -> Apply:
    """`apply`, followed by the averages of the canonical `variables`, which are made here; as it is without a `decay`."""
    if decay is None or not variables:
        return apply
    averages, first = make(variables), variables[0].op.name

    def with_averages(update: structs.Update, after: Sequence[tf.Tensor]) -> tf.Operation:
        operation = apply(update, after)
        if update.variables[0].op.name != first:  # another tower's copies
            return operation
        return follow(averages, update.variables, decay=decay, step=step, after=operation)

    return with_averages


def restored(variables: Sequence[tf.Variable], *, averaged: bool) -> Mapping[str, tf.Variable]:
    """Name in a checkpoint -> variable that takes its value; with `averaged` trained ones take their averages'."""
    return {name_of(variable) if averaged and variable.trainable else variable.op.name: variable for variable in variables}
