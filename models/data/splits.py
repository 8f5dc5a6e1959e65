"""What every dataset of the zoo is made of."""

import dataclasses
from collections.abc import Callable

import tensorflow.compat.v1 as tf

SHUFFLE_BUFFER = 10000  # the buffer travels in each checkpoint, so it holds undecoded records and is kept modest
LARGEST_BLOCK = 64


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
      left_out: names of bad records that neither of the two has.
    """

    train: Callable[[], tf.data.Dataset]
    test: Callable[[], tf.data.Dataset]
    shape: tuple[int, int, int]
    classes: int
    train_examples: int
    test_examples: int
    left_out: tuple[str, ...] = ()


def shuffled(records: tf.data.Dataset, examples: int, *, seed: int | None) -> tf.data.Dataset:
    """The records in an order drawn from `seed`, another in each pass; None keeps their order."""
    return records if seed is None else records.shuffle(min(examples, SHUFFLE_BUFFER), seed=seed)


def decoded(records: tf.data.Dataset, decode: Callable[..., dict[str, tf.Tensor]], *, examples: int) -> tf.data.Dataset:
    """Examples of `records`, decoded a block at a time, which costs a sixth of decoding one by one.

    tf.data's batch and parallel map read ahead, and a batch that has met the end of its input forgets it: a position
    saved then goes on with another shuffle in the next pass. So a block's size divides the number of examples, and
    decoding stands in a flat_map, which never reads ahead.

    Args:
      records: one example each.
      decode: function from records [block, ...] to examples [block, ...]; without state.
      examples: number of records.
    """
    block = max(size for size in range(1, LARGEST_BLOCK + 1) if examples % size == 0)
    blocks = records.batch(block, drop_remainder=True)
    made = blocks.flat_map(lambda *parts: tf.data.Dataset.from_tensor_slices(decode(*parts)))
    return made.apply(tf.data.experimental.assert_cardinality(examples))


def scaled(pixels: tf.Tensor) -> tf.Tensor:
    """Bytes 0..255 as float32 in [-1, 1]."""
    return tf.cast(pixels, tf.float32) / 127.5 - 1.0
