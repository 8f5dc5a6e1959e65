"""Reads of variables, and values brought from one device to another, as few as will do."""

from collections.abc import Callable

import tensorflow.compat.v1 as tf


def read(variable: tf.Variable) -> tf.Tensor:
    """The value, read where the variable is by one operation; `read_value` makes an identity besides."""
    with tf.device(None), tf.device(variable.device):
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype, name='read')


def once() -> Callable[[tf.Tensor | tf.Variable, str], tf.Tensor]:
    """A function that brings a value to a device, once for all who ask for it there."""
    here: dict[tuple[str, str], tf.Tensor] = {}

    def bring(value: tf.Tensor | tf.Variable, device: str) -> tf.Tensor:
        is_variable = hasattr(value, 'handle')
        key = ((value.handle if is_variable else value).name, device)
        if key not in here:
            with tf.control_dependencies(None), tf.name_scope(f'read/{value.op.name}/'), tf.device(None), tf.device(device):
                tensor = read(value) if is_variable else value
                here[key] = tensor if is_variable and device == value.device else tf.identity(tensor, name='to_machine')
        return here[key]

    return bring
