"""As much of tf_cnn_benchmarks' module of this name as the benchmark has to do with."""

import types

import tensorflow.compat.v1 as tf

ops = types.SimpleNamespace()  # TensorFlow's module has lost the name `Tensor`, which `mean` asks for


def mean(gradients):
    if any(isinstance(gradient, ops.Tensor) for gradient in gradients):
        return tf.add_n(gradients) / len(gradients)
    values = tf.concat([gradient.values for gradient in gradients], 0) / len(gradients)
    return tf.IndexedSlices(values, tf.concat([gradient.indices for gradient in gradients], 0), gradients[0].dense_shape)
