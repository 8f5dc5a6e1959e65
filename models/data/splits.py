"""What every dataset of the zoo is made of."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

T = TypeVar('T')

as_it_is = tf.autograph.experimental.do_not_convert  # what is made of graph operations alone needs no rewriting, which writes files
_BLOCK = 256  # examples made at once, which costs a sixth of making them one by one


@dataclasses.dataclass(frozen=True)
class Splits:
    """A dataset whose files have been checked.

    Attributes:
      train: makes the training dataset in the current graph: single examples {'image': float32 [H, W, C], 'label':
        int64 []}, shuffled with the dataset's seed anew in each pass. Picklable, as `test` is.
      test: the same for the test examples, always in the order of the files; None where there are none.
      shape: H, W, C.
      classes: number of classes; labels are below it.
      train_examples: how many examples `train` has.
      test_examples: how many `test` has.
      left_out: names of bad records that neither of the two has.
      missing: what lacks for `test`; empty where it is there.
    """

    train: Callable[[], tf.data.Dataset]
    test: Callable[[], tf.data.Dataset] | None
    shape: tuple[int, int, int]
    classes: int
    train_examples: int
    test_examples: int
    left_out: tuple[str, ...] = ()
    missing: str = ''

    def __post_init__(self) -> None:
        if self.left_out:
            self.train.bad_records = len(self.left_out)  # what the reports of a training show


def found(find: Callable[[pathlib.Path, str], T], place: pathlib.Path) -> tuple[list[T], str]:
    """What `find` gives for 'train' and 'test' in a folder, and what lacks for the latter, which then is not among them.

    Raises:
      FileNotFoundError: what is needed for 'train' is not there.
    """
    train = find(place, 'train')
    try:
        return [train, find(place, 'test')], ''
    except FileNotFoundError as error:
        return [train], str(error)


def made(make: Callable[[tf.Tensor], Any], examples: int, *, seed: int | None) -> tf.data.Dataset:
    """Examples made from their numbers, in an order drawn from `seed`, another in each pass; None = rising numbers.

    The order is that of a cipher (`tf.random.experimental.index_shuffle`), so it is a full shuffle without a buffer: the position
    of the dataset is a few bytes and costs nothing to save, however large it is. The blocks in which examples are made stand in
    a flat_map, which never reads ahead: a position saved by something that does forgets the end of the pass.

    Args:
      make: function from numbers, int64 [n], to examples [n, ...] of any structure; without state, and of graph operations as they are.
      examples: how many there are.
      seed: of the order.
    """
    last = tf.constant(examples - 1, tf.int64)
    firsts = tf.data.Dataset.range(0, examples, _BLOCK)
    if seed is not None:
        keys = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True).take(1)
        firsts = keys.flat_map(as_it_is(lambda key: firsts.map(lambda first: (first, key))))

    @as_it_is
    def block(first: tf.Tensor, *key: tf.Tensor) -> tf.data.Dataset:
        numbers = tf.range(first, tf.minimum(first + _BLOCK, last + 1))
        return tf.data.Dataset.from_tensor_slices(make(tf.random.experimental.index_shuffle(numbers, *key, last) if key else numbers))

    blocks = firsts.flat_map(block)
    return blocks.apply(tf.data.experimental.assert_cardinality(examples))


def order(examples: int, *, seed: int | None) -> tf.data.Dataset:
    """The numbers below `examples` in the order that `made` gives."""
    return made(lambda numbers: numbers, examples, seed=seed)


def scaled(pixels: tf.Tensor) -> tf.Tensor:
    """Bytes 0..255 as float32 in [-1, 1]."""
    return tf.cast(pixels, tf.float32) / 127.5 - 1.0
