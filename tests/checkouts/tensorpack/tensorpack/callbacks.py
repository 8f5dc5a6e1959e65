"""See tensorpack/__init__.py."""

import tensorflow.compat.v1 as tf


class RunUpdateOps:
    def hook(self):
        return tf.train.FeedFnHook(lambda: {}) if not (found := tf.get_collection(tf.GraphKeys.UPDATE_OPS)) else _Fetching(tf.group(*found))

    def before_train(self):
        pass


class _Fetching(tf.train.SessionRunHook):
    def __init__(self, operation):
        self._operation = operation

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._operation)
