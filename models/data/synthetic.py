"""Images made of numbers alone: no files, any size, the same on every machine."""

import functools

import tensorflow.compat.v1 as tf

from . import splits

_TEST = 1 << 40  # test examples have numbers that no training example has


def load(
    data_dir: str | None = None,
    *,
    seed: int = 1,
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    examples: tuple[int, int] = (6400, 1280),
) -> splits.Splits:
    """Classes that a model can learn: example i is its class' own fixed pattern plus noise, both of deviation 1.

    Args:
      data_dir: not used.
      seed: of patterns, noise and the training examples' order.
      shape: H, W, C.
      classes: number of classes; example i has label i % classes.
      examples: number of training and of test examples.

    Raises:
      ValueError: a size below 1.
    """
    del data_dir
    if min(*shape, classes, *examples) < 1:
        raise ValueError(f"Dataset 'synthetic' wants sizes of 1 or more, got shape={shape}, classes={classes}, examples={examples}.")
    decode = functools.partial(_example, seed=seed, shape=shape, classes=classes)
    return splits.Splits(
        train=functools.partial(_dataset, decode, first=0, examples=examples[0], seed=seed),
        test=functools.partial(_dataset, decode, first=_TEST, examples=examples[1], seed=None),
        shape=shape,
        classes=classes,
        train_examples=examples[0],
        test_examples=examples[1],
    )


def _dataset(decode: functools.partial, *, first: int, examples: int, seed: int | None) -> tf.data.Dataset:
    numbers = splits.order(examples, seed=seed)
    made = numbers.map(splits.as_it_is(lambda number: decode(first + number)), num_parallel_calls=tf.data.AUTOTUNE)
    return made.apply(tf.data.experimental.assert_cardinality(examples))


def _example(number: tf.Tensor, *, seed: int, shape: tuple[int, int, int], classes: int) -> dict[str, tf.Tensor]:
    label = number % classes
    # Examples count from 0 up and patterns from -1 down, so no pattern is some example's noise.
    pattern = tf.random.stateless_normal(shape, seed=tf.stack([tf.constant(seed, tf.int64), -1 - label]))
    noise = tf.random.stateless_normal(shape, seed=tf.stack([tf.constant(seed, tf.int64), number]))
    return {'image': pattern + noise, 'label': label}
