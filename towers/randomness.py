"""Random draws that belong to an example, not to a tower: the same for every number of towers, and after a resume.

A draw is keyed by (seed, which draw of the model, step) and counted by the index of the example in the global batch.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

_WORDS_PER_COUNT = 4  # 32-bit words that Philox makes from one value of its counter (Salmon et al. 2011)


def fold(seed: int, *parts: object) -> int:
    """A non-negative 31-bit seed that depends on `seed` and all `parts`, the same in every process."""
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), 'little') & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Draws:
    """Where the draws of one tower's model come from.

    Attributes:
      seed: the run's seed.
      step: int64 scalar, the global step before the update.
      first: int64 scalar, index in the global batch of the tower's first example.
      calls: numbers the model's draws in the order of its code.
    """

    seed: int
    step: tf.Tensor
    first: tf.Tensor
    calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)


_current: contextvars.ContextVar[Draws | None] = contextvars.ContextVar('towers_draws', default=None)


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Makes `draws` the source of the helpers in this file while a tower is built."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


def random_uniform(rows: tf.Tensor | int, shape: Sequence[int] = (), *, minval: float = 0.0, maxval: float = 1.0) -> tf.Tensor:
    """Uniform numbers in [minval, maxval), one block of `shape` for each example of the tower's batch.

    Args:
      rows: number of examples in the tower's batch, scalar.
      shape: static shape of one example's numbers.
      minval: lower bound, included.
      maxval: upper bound, excluded.

    Returns:
      float32 [rows, *shape]; example k of the global batch gets the same numbers on any tower.

    Raises:
      ValueError: not called inside a model that Towers builds for training.
    """
    size = int(np.prod(shape, dtype=np.int64))
    flat = _uniform_rows(tf.cast(rows, tf.int32), size)
    return tf.reshape(flat, tf.concat([[-1], tf.constant(list(shape), tf.int32)], 0)) * (maxval - minval) + minval


def dropout(x: tf.Tensor, rate: float, *, training: bool) -> tf.Tensor:
    """Dropout (Srivastava et al. 2014) that drops the same units of an example whatever the number of towers.

    Args:
      x: activations, [B, ...] with B the examples of the tower's batch; the other dimensions are static.
      rate: share of units set to 0; the rest are divided by 1 - rate.
      training: False returns `x`.

    Raises:
      ValueError: `rate` is not in [0, 1), a dimension after the first is unknown, or no training model is being built.
    """
    if not 0 <= rate < 1:
        raise ValueError(f'Dropout rate must be in [0, 1), got {rate!r}.')
    if not training or rate == 0:
        return x
    shape = x.shape[1:]
    if not shape.is_fully_defined():
        raise ValueError(f'towers.dropout needs static dimensions after the first, got {x.shape}; set them with tf.ensure_shape.')
    keep = random_uniform(tf.shape(x)[0], shape.as_list()) >= rate
    return tf.where(keep, x / tf.cast(1 - rate, x.dtype), tf.zeros_like(x))


def _uniform_rows(rows: tf.Tensor, size: int) -> tf.Tensor:
    """float32 [rows, size]: each example owns a whole number of counter values, so that a tower can start at its own."""
    draws = _current.get()
    if draws is None:
        raise ValueError('Draws by example need the step and the batch: call towers.dropout and random_uniform in a model in training.')
    counts = -(-size // _WORDS_PER_COUNT)
    seed = tf.random.experimental.stateless_fold_in([draws.seed, fold(draws.seed, 'draw', next(draws.calls))], draws.step)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    low = counter[0] + tf.cast(draws.first * counts, tf.uint64)
    numbers = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.stack([rows, counts * _WORDS_PER_COUNT]), key=key, counter=tf.stack([low, counter[1]]), alg=1, dtype=tf.float32
    )
    return numbers[:, :size]
