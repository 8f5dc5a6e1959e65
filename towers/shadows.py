"""Tensors that a variable beside the model's own holds, uncopied, while the steps go on."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import transfers


class Shadow:
    """Holds tensors from one run of the session to others, all as one bundle.

    To keep them costs next to nothing: their buffers are taken over. An update of a variable whose buffer is held writes to a new one,
    so the next step pays for one copy of what it changes, and until `drop` is run the memory is needed twice.

    Args:
      tensors: what is held, at least one.
      device: device string of a CPU.
      name: of the variable, the graph's own.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], *, device: str, name: str) -> None:
        self._tensors, self._device = list(tensors), device
        with tf.device(None), tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(dtype=tf.variant, shape=[], shared_name=name)
            bundle = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
        self.held: list[tf.Tensor] = transfers.unbundled(bundle, self._tensors, device)  # what was kept last

    def keep(self) -> tf.Operation:
        """Makes the operation that takes the tensors."""
        bundle = transfers.bundle(self._tensors, self._device)
        with tf.device(None), tf.device(self._device):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=bundle)

    def drop(self) -> tf.Operation:
        """Makes the operation that lets go of them."""
        with tf.device(None), tf.device(self._device):
            return tf.raw_ops.DestroyResourceOp(resource=self._handle)


def value_of(variable: tf.Variable) -> tf.Tensor:
    """A variable's value, on its device, that no later update changes."""
    with tf.device(None), tf.device(variable.device):
        if variable.op.type == 'VarHandleOp':
            return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
        return tf.raw_ops.DeepCopy(x=variable.read_value())  # a reference variable is changed in place, whoever holds its buffer
