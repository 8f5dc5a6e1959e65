"""See tensorpack/__init__.py."""

import tensorflow.compat.v1 as tf


def get_default_sess_config():
    return tf.ConfigProto(intra_op_parallelism_threads=1)  # no soft placement: a GPU's name that is left is an error
