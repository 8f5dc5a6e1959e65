"""What every dataset of the zoo is made of."""

import dataclasses
from collections.abc import Callable

import tensorflow.compat.v1 as tf

SHUFFLE_BUFFER = 10000  # the buffer travels in each checkpoint, so it holds undecoded records and is kept modest


@dataclasses.dataclass(frozen=True)
class Splits:
    """A dataset whose files have been checked.

    Attributes:
      train: makes the training dataset in the current graph: single examples {'image': float32 [H, W, C], 'label':
        int64 []}, shuffled with the dataset's seed anew in each pass. Picklable, as `test` is.
      test: the same for the test examples, always in the order of the files.
      shape: H, W, C.
      classes: number of classes; labels are below it.
      train_examples: how many examples `train` has.
      test_examples: how many `test` has.
    """

    train: Callable[[], tf.data.Dataset]
    test: Callable[[], tf.data.Dataset]
    shape: tuple[int, int, int]
    classes: int
    train_examples: int
    test_examples: int


def pipeline(
    records: tf.data.Dataset, decode: Callable[..., dict[str, tf.Tensor]], *, examples: int, seed: int | None
) -> tf.data.Dataset:
    """Decoded examples of `records`, of known cardinality and with a state that a checkpoint can hold.

    Args:
      records: undecoded records, cheap to keep in a shuffle buffer.
      decode: function from a record to an example; without state.
      examples: number of records.
      seed: shuffles, differently in each pass; None keeps the order.
    """
    if seed is not None:
        records = records.shuffle(min(examples, SHUFFLE_BUFFER), seed=seed)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).apply(tf.data.experimental.assert_cardinality(examples))


def scaled(pixels: tf.Tensor) -> tf.Tensor:
    """Bytes 0..255 as float32 in [-1, 1]."""
    return tf.cast(pixels, tf.float32) / 127.5 - 1.0
