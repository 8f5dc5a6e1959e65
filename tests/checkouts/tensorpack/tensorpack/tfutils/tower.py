"""See tensorpack/__init__.py."""

import contextlib

import tensorflow.compat.v1 as tf

_current = None


class TrainTowerContext:
    def __init__(self, index, own):
        self.has_own_variables = own or index == 0
        self._before = {key: len(tf.get_collection(key)) for key in [tf.GraphKeys.TRAINABLE_VARIABLES]}

    def get_collection_in_tower(self, key):
        return tf.get_collection(key)[self._before[key] :]


@contextlib.contextmanager
def entered(tower):
    global _current
    _current = tower
    yield
    _current = None


def get_current_tower_context():
    return _current
