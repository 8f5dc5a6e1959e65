"""A user's model that takes a logarithm, and datasets in which it is one of 0 in some batches of 4."""

import numpy as np
import tensorflow.compat.v1 as tf

import towers

BATCHES = 12


def model(batch, *, training):
    """Two variables, one of which sees the logarithm."""
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(0.5))
    b = tf.get_variable('b', [], initializer=tf.constant_initializer(0.1))
    return towers.ModelOutput(tf.reduce_mean(tf.square(w * tf.log(batch) + b - 1.0)))


def rows(*, zeros=(), without=()):
    """So many batches of 4; those numbered (from 1) in `zeros` end with a 0, those in `without` are left out."""
    values = np.linspace(0.5, 3.0, 4 * BATCHES, dtype=np.float32).reshape(BATCHES, 4)
    values[[number - 1 for number in zeros], 3] = 0.0
    return np.delete(values, [number - 1 for number in without], axis=0).reshape(-1)


def spoiled():
    """The fifth batch is bad."""
    return tf.data.Dataset.from_tensor_slices(rows(zeros=[5]))


def at_once():
    """The first batch is bad."""
    return tf.data.Dataset.from_tensor_slices(rows(zeros=[1]))


def hopeless():
    """All batches from the fifth on are bad."""
    return tf.data.Dataset.from_tensor_slices(rows(zeros=range(5, BATCHES + 1)))
