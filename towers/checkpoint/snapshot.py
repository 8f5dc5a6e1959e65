"""A consistent copy of tensors inside the graph, written in TensorFlow's own checkpoint format where every number is finite."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import shadows

_SUMMED = (tf.float32, tf.float64)  # others are summed as float32
_HERE = tf.RunOptions(inter_op_thread_pool=-1)  # a thread pool below 0 is the calling thread: the training keeps all of its own
_KINDS: Mapping[str, Callable[..., Any]] = {'NaN': np.isnan, '+Inf': np.isposinf, '-Inf': np.isneginf}


class NotFinite(ValueError):
    """A value of a snapshot is not finite."""


class Snapshot(NamedTuple):
    """Operations of one snapshot.

    Attributes:
      take: holds the values; run it between steps.
      held: name in the checkpoint -> the value taken last.
      finite: whether the sum over all floats taken is finite; where it isn't, some number may not be.
      write: writes the values to `prefix` and drops them; run it whenever.
      prefix: string scalar placeholder, path of the files without endings.
    """

    take: tf.Operation
    held: Mapping[str, tf.Tensor]
    finite: tf.Tensor
    write: tf.Operation
    prefix: tf.Tensor

    def writer(self, session: tf.Session, given: Sequence[tf.Tensor]) -> Callable[..., None]:
        """A function of the files' prefix and the values of `given` that writes the snapshot in the calling thread; it raises NotFinite."""
        is_finite = session.make_callable(self.finite, accept_options=True)
        write = session.make_callable(self.write, [self.prefix, *given], accept_options=True)

        def checked(prefix: str, *values: Any) -> None:
            if not is_finite(options=_HERE):
                self._check(session)
            write(prefix, *values, options=_HERE)

        return checked

    def _check(self, session: tf.Session) -> None:
        """Looks at every number; a sum of large ones may overflow though they are finite."""
        for name, tensor in self.held.items():
            if tensor.dtype.is_floating or tensor.dtype.is_complex:
                kinds = _not_finite(session.run(tensor, options=_HERE))
                if kinds:
                    raise NotFinite(f'{name} has {" and ".join(kinds)} values')


def make(sources: Mapping[str, tf.Variable | tf.Tensor], given: Mapping[str, tf.Tensor] | None = None) -> Snapshot:
    """Adds the operations to the current graph, on its CPU.

    Args:
      sources: name in the checkpoint -> variable or tensor.
      given: name in the checkpoint -> placeholder, to be fed when it is written.
    """
    names = sorted(sources)
    with tf.name_scope('checkpoint'), tf.device('/cpu:0'):
        values = [_value(sources[name]) for name in names]
        shadow = shadows.Shadow(values, device='/cpu:0', name='checkpoint_shadow')
        held = dict(zip(names, shadow.held, strict=True))
        prefix = tf.placeholder(tf.string, [], name='prefix')
        written = {**held, **(given or {})}
        save = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[*written], shape_and_slices=[''] * len(written), tensors=[*written.values()])
        with tf.control_dependencies([save]):
            write = shadow.drop()
        return Snapshot(shadow.keep(), held, _finite(shadow.held), write, prefix)


def reason(error: Exception) -> str:
    """What stopped a write, in one line; TensorFlow's messages hold stack traces too."""
    if isinstance(error, tf.errors.OpError):
        lines = [line.strip() for line in error.message.splitlines()]
        telling = [line for line in lines if '; ' in line and not line.startswith('File "')]
        return (telling or lines)[0]
    if isinstance(error, OSError) and error.filename:
        return f'{error.strerror or error} ({error.filename})'
    return str(error)


def _value(source: tf.Variable | tf.Tensor) -> tf.Tensor:
    return source if isinstance(source, tf.Tensor) else shadows.value_of(source)


def _finite(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether the sum over all floats is finite, as one flag."""
    sums: dict[tf.DType, list[tf.Tensor]] = collections.defaultdict(list)
    axes: dict[int | None, tf.Tensor] = {}
    for value in values:
        if value.dtype.is_complex:
            value = tf.abs(value)
        if value.dtype.is_floating:
            value = value if value.dtype in _SUMMED else tf.cast(value, tf.float32)
            rank = value.shape.rank
            if rank is None or rank not in axes:
                axes[rank] = tf.range(tf.rank(value))
            sums[value.dtype].append(tf.raw_ops.Sum(input=value, axis=axes[rank]))
    flags = [tf.math.is_finite(tf.add_n(of_type)) for of_type in sums.values()]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def _not_finite(value: Any) -> list[str]:
    """What a value holds besides finite numbers."""
    if not np.iscomplexobj(value) and value.dtype != np.float64:
        value = np.asarray(value, np.float32)  # numpy itself knows no bfloat16
    parts = [value.real, value.imag] if np.iscomplexobj(value) else [value]
    return [name for name, is_one in _KINDS.items() if any(is_one(part).any() for part in parts)]
