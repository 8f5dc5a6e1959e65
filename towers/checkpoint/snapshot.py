"""A consistent copy of tensors inside the graph, and the operation that writes it in TensorFlow's own checkpoint format.

Taking it costs next to nothing: a shadow variable on the same device takes over the variable's buffer, and the next
update, which sees that the buffer is held, writes to a new one. So that step pays for one copy of what it changes, and
until the shadows are dropped the variables need their memory twice.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import tensorflow.compat.v1 as tf

_CHECKED = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
_LARGE = 1 << 16
_NOT_FINITE = re.compile(r'^(\S+) : Tensor had (.+) values', re.MULTILINE)


class Snapshot(NamedTuple):
    """Operations of one snapshot.

    Attributes:
      take: sets the shadows; run it between steps.
      write: checks that every float is finite, writes the shadows to `prefix` and drops them; run it whenever.
      prefix: string scalar placeholder, path of the files without endings.
    """

    take: tf.Operation
    write: tf.Operation
    prefix: tf.Tensor


def make(sources: Mapping[str, tf.Variable | tf.Tensor], given: Mapping[str, tf.Tensor] | None = None) -> Snapshot:
    """Adds the operations to the current graph, on its CPU.

    Args:
      sources: name in the checkpoint -> variable or tensor.
      given: name in the checkpoint -> placeholder, to be fed when it is written.
    """
    names = sorted(sources)
    with tf.name_scope('checkpoint'):
        values = [_value(sources[name]) for name in names]
        with tf.device('/cpu:0'):
            shadows = [
                tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=f'checkpoint_shadow/{name}')
                for name, value in zip(names, values, strict=True)
            ]
            take = tf.group(
                *[tf.raw_ops.AssignVariableOp(resource=shadow, value=value) for shadow, value in zip(shadows, values, strict=True)]
            )
            held = [
                _checked(name, tf.raw_ops.ReadVariableOp(resource=shadow, dtype=value.dtype))
                for name, shadow, value in zip(names, shadows, values, strict=True)
            ]
            prefix = tf.placeholder(tf.string, [], name='prefix')
            given = given or {}
            all_names = [*names, *given]
            all_values = [*held, *given.values()]
            save = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=all_names, shape_and_slices=[''] * len(all_names), tensors=all_values)
            with tf.control_dependencies([save]):
                write = tf.group(*[tf.raw_ops.DestroyResourceOp(resource=shadow) for shadow in shadows])
    return Snapshot(take, write, prefix)


def reason(error: OSError | tf.errors.OpError) -> str:
    """What stopped a write, in one line; TensorFlow's messages hold stack traces too."""
    if isinstance(error, OSError):
        return f'{error.strerror or error} ({error.filename})' if error.filename else str(error)
    found = _NOT_FINITE.search(error.message)
    if found:
        return f'{found[1]} has {found[2]} values'
    lines = [line.strip() for line in error.message.splitlines()]
    telling = [line for line in lines if '; ' in line and not line.startswith('File "')]
    return (telling or lines)[0]


def _value(source: tf.Variable | tf.Tensor) -> tf.Tensor:
    if isinstance(source, tf.Tensor):
        return source
    with tf.device(source.device):
        value = source.read_value()
        # A reference variable is changed in place, whoever holds its buffer.
        return value if source.op.type == 'VarHandleOp' else tf.raw_ops.DeepCopy(x=value)


def _checked(name: str, value: tf.Tensor) -> tf.Tensor:
    """The value, once every number in it is known to be finite."""
    if value.dtype in _CHECKED:
        parts = [_suspect(value)]
    elif value.dtype.is_complex:
        parts = [tf.math.real(value), tf.math.imag(value)]
    elif value.dtype.is_floating:
        parts = [tf.cast(value, tf.float32)]
    else:
        return value
    with tf.control_dependencies([tf.raw_ops.CheckNumericsV2(tensor=part, message=name) for part in parts]):
        return tf.identity(value)


def _suspect(value: tf.Tensor) -> tf.Tensor:
    """What has to be looked at number by number: nothing of a large value whose sum is finite, and summing is several times faster."""
    if (value.shape.num_elements() or 0) < _LARGE:
        return value
    count = tf.where(tf.math.is_finite(tf.reduce_sum(value)), 0, value.shape.num_elements())
    return tf.reshape(value, [-1])[:count]
