"""A reader's side: the newest version of a training's variables that is served on this machine, whole or not at all."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.live import naming

_LIMIT_MS = 20_000
_ATTEMPTS = 100


class Version(NamedTuple):
    """The variables of one moment.

    Attributes:
      token: of the training.
      number: rises with each version of it.
      step: that they are of.
      values: by name.
    """

    token: str
    number: int
    step: int
    values: Mapping[str, np.ndarray]


class Reader(contextlib.AbstractContextManager):
    """Reads from the training that serves a run directory's variables, and from a later one when that has ended.

    Args:
      model_dir: the run directory.
      variables: name -> variable of the reader's own graph, which says shape and type.
    """

    def __init__(self, model_dir: str, variables: Mapping[str, tf.Variable]) -> None:
        self._model_dir = model_dir
        self._specs = {name: (variable.dtype.base_dtype, variable.shape) for name, variable in variables.items()}
        self._place: naming.Place | None = None
        self._session: Any = None
        self._version: Any = None
        self._buffers: list[Any] = []

    def __exit__(self, *_: Any) -> None:
        self._leave()

    def is_served(self) -> bool:
        """Whether a training serves the variables now."""
        return naming.find(self._model_dir) is not None

    def read(self, *, after: Version | None = None) -> Version | None:
        """The newest version; None where none is served, or none that is newer than `after`.

        Raises:
          ValueError: a variable of the reader is not served, or has another type or shape.
          RuntimeError: the training is so fast that no version could be read before it was written over.
        """
        if not self._connect():
            return None
        try:
            assert self._place is not None
            return self._read(self._place.token, after)
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.CancelledError):
            self._leave()  # the training has ended
            return None
        except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError) as error:
            place, self._place = self._place, None
            self._leave()
            if place is None or naming.find(self._model_dir) != place:
                return None
            what = ' '.join(error.message.replace(f'{place.token}/', '').split())
            raise ValueError(f'A variable of this model is not served; is it the model of the run? TensorFlow says: {what[:300]}') from None

    def _read(self, token: str, after: Version | None) -> Version | None:
        known = after.number if after is not None and after.token == token else 0
        for _ in range(_ATTEMPTS):
            number = int(self._version())
            if number <= known:
                return None
            step, values, begun = self._buffers[number % naming.BUFFERS]()
            if begun < number + naming.BUFFERS:  # nobody has begun to write over it
                self._check(values)
                return Version(token, number, int(step), values)
        raise RuntimeError(f'No version could be read in {_ATTEMPTS} attempts; serve fewer (--serve_snapshots).')

    def _check(self, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            if tuple(value.shape) != tuple(self._specs[name][1].as_list()):
                raise ValueError(
                    f'{name} is served in the shape {list(value.shape)}, expected {self._specs[name][1]}; is it the same model?'
                )

    def _connect(self) -> bool:
        """Whether there is a training to read from."""
        place = naming.find(self._model_dir)
        if place != self._place:
            self._leave()
        if place is None or self._session is not None:
            return place is not None
        with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
            version = self._value(place, 'version', (tf.int64, tf.TensorShape([])))
            buffers = [self._buffer(place, number) for number in range(naming.BUFFERS)]
            graph.finalize()
        self._session = tf.Session(f'grpc://127.0.0.1:{place.port}', graph=graph, config=tf.ConfigProto(operation_timeout_in_ms=_LIMIT_MS))
        self._version = self._session.make_callable(version)
        self._buffers = [self._session.make_callable(each) for each in buffers]
        self._place = place
        return True

    def _buffer(self, place: naming.Place, number: int) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Step and values of a buffer, and then the newest version that was begun."""
        step = self._value(place, naming.buffered(number, 'step'), (tf.int64, tf.TensorShape([])))
        values = {name: self._value(place, naming.buffered(number, f'values/{name}'), spec) for name, spec in self._specs.items()}
        with tf.control_dependencies([step, *values.values()]):
            return step, values, self._value(place, 'begun', (tf.int64, tf.TensorShape([])))

    def _value(self, place: naming.Place, name: str, spec: tuple[tf.DType, tf.TensorShape]) -> tf.Tensor:
        dtype, shape = spec
        return tf.raw_ops.ReadVariableOp(resource=naming.variable(place.token, name, dtype, shape), dtype=dtype)

    def _leave(self) -> None:
        session, self._session, self._place = self._session, None, None
        if session is not None:
            with contextlib.suppress(tf.errors.OpError):
                session.close()
