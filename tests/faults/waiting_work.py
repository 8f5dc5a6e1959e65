"""A user's model and datasets that take their time: what the commands in these tests train."""

import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

import towers

EXAMPLES = 24


def model(batch, *, training, build_secs=0.0, megabytes=0.0, op_secs=0.0, stuck=None):
    """A linear model; tower `stuck` waits for ever in its third step."""
    print('BUILDING', 'training' if training else 'evaluation', flush=True)
    time.sleep(build_secs)
    x = tf.reshape(tf.cast(batch, tf.float32), [-1, 1])
    weight = tf.get_variable('weight', [1, 1])
    if megabytes:
        x = x + 0.0 * tf.get_variable('large', [int(megabytes * 2**18)])[0]
    if op_secs:
        x = tf.numpy_function(lambda value: (time.sleep(op_secs), value)[1], [x], tf.float32)
        x.set_shape([None, 1])
    if stuck is not None and training:
        x = x + _stuck_in_third_step(x) if _is_tower(x, stuck) else x
    loss = tf.reduce_mean((tf.matmul(x, weight) - 1.0) ** 2)
    return towers.ModelOutput(loss, metrics={'mean': tf.reduce_mean(x)})


def _is_tower(x, tower):
    return x.device.endswith(f':{tower + 1}')


def _stuck_in_third_step(x):
    queue = tf.FIFOQueue(2, tf.float32, shapes=[[]], shared_name='never-filled')
    step = tf.train.get_global_step().read_value()
    return tf.cond(step < 2, lambda: tf.zeros([]), queue.dequeue)


def numbers():
    return tf.data.Dataset.from_tensor_slices(np.arange(EXAMPLES) % 3)


def slow_numbers():
    """Takes half a second for each example."""
    return numbers().map(lambda x: tf.ensure_shape(tf.numpy_function(lambda value: (time.sleep(0.5), value)[1], [x], tf.int64), []))


def blocking_numbers():
    """50 batches of four lines, then a pipe into which nobody writes."""
    with open('lines', 'w') as file:
        file.write('1\n2\n3\n4\n' * 50)
    if not os.path.exists('pipe'):
        os.mkfifo('pipe')
    return tf.data.TextLineDataset(['lines', 'pipe']).map(tf.strings.to_number)


def stuck_numbers():
    """Says that it was asked for its first example, and never gives it."""

    def wait(x):
        with open('stuck', 'w'):
            time.sleep(3600)
        return x

    return numbers().map(lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), []))


def gated_numbers():
    """Waits before its 200th example until a file is there."""
    return numbers().repeat().enumerate().map(_gated)


def _gated(index, x):
    def wait(index, x):
        while index >= 200 and not os.path.exists('open'):
            time.sleep(0.01)
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [index, x], tf.int64), [])
