"""Reads and counts of variables, and values brought from one device to another, by as few operations as will do."""

from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf


def read(variable: tf.Variable) -> tf.Tensor:
    """The value, read where the variable is by one operation; `read_value` makes an identity besides."""
    with tf.device(None), tf.device(variable.device):
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype, name='read')


def count(variable: tf.Variable) -> tf.Operation:
    """Adds 1 to an int64 scalar variable where it is, by one operation on a CPU, where `assign_add` needs a constant besides."""
    with tf.device(variable.device):
        if tf.DeviceSpec.from_string(variable.device).device_type == 'CPU':
            return tf.raw_ops.ResourceCountUpTo(resource=variable.handle, limit=tf.int64.max, T=tf.int64).op
        return variable.assign_add(1, read_value=False)


def once() -> Callable[..., tf.Tensor]:
    """A function that brings a variable's value to a device, once for all who ask for it there, and not before what is given as `after`."""
    here: dict[tuple[str, str], tf.Tensor] = {}

    def bring(variable: tf.Variable, device: str, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        key = (variable.handle.name, device)
        if key not in here:
            with tf.control_dependencies(None), tf.name_scope(f'read/{variable.op.name}/'), tf.device(None), tf.device(device):
                with tf.control_dependencies(after):
                    value = read(variable)
                here[key] = value if device == variable.device else tf.identity(value, name='to_machine')
        return here[key]

    return bring
