"""Tensors that a variable beside the model's own holds, uncopied, while the steps go on."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import reads, transfers


class Shadow:
    """Holds tensors from one run of the session to others, several as one bundle.

    To keep them costs next to nothing: their buffers are taken over. An update of a variable whose buffer is held writes to a new one,
    so the next step pays for one copy of what it changes, and until `drop` is run the memory is needed twice.

    Args:
      tensors: what is held, at least one.
      device: device string, of a CPU where there are several.
      name: of the variable, the graph's own.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], *, device: str, name: str) -> None:
        self._tensors, self._device = list(tensors), device
        alone = self._tensors[0] if len(self._tensors) == 1 else None
        dtype, shape = (tf.variant, []) if alone is None else (alone.dtype, alone.shape)
        with tf.device(None), tf.device(device):
            # Servers keep variables, so another graph over the same machines may find this one's, and hold something else in it.
            self._handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=f'{name}/{dtype.name}')
            value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=dtype)
        self.held: list[tf.Tensor] = (
            [value] if alone is not None else transfers.unbundled(value, self._tensors, device)
        )  # what was kept last

    def keep(self) -> tf.Operation:
        """Makes the operation that takes the tensors."""
        value = self._tensors[0] if len(self._tensors) == 1 else transfers.bundle(self._tensors, self._device)
        with tf.device(None), tf.device(self._device):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def drop(self) -> tf.Operation:
        """Makes the operation that lets go of them."""
        with tf.device(None), tf.device(self._device):
            return tf.raw_ops.DestroyResourceOp(resource=self._handle)


def value_of(variable: tf.Variable) -> tf.Tensor:
    """A variable's value, on its device, that no later update changes."""
    if variable.op.type == 'VarHandleOp':
        return reads.read(variable)
    with tf.device(None), tf.device(variable.device):
        return tf.raw_ops.DeepCopy(x=variable.read_value())  # a reference variable is changed in place, whoever holds its buffer
