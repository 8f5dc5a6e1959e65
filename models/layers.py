"""Layers as small pure functions over `tf.get_variable`.

Each takes its input and the name of its variable scope; its variables are `<name>/kernel`, `<name>/bias` and so on.
Kernels and biases have the type of the input. Images are [B, H, W, C], or [B, C, H, W] inside of `images(..., channels_first=True)`,
with the same variables; all axes but the first must be known when the graph is built.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

_channels_first = contextvars.ContextVar('channels_first', default=False)


@contextlib.contextmanager
def images(batch: tf.Tensor, *, channels_first: bool) -> Iterator[tf.Tensor]:
    """Within it the layers take images with their channels first or last; its value is the batch in that order.

    On GPUs TensorFlow's own rewriting puts the channels first where that pays, so last is right unless measured otherwise.

    Args:
      batch: [B, H, W, C].
      channels_first: whether the layers want [B, C, H, W].
    """
    token = _channels_first.set(channels_first)
    try:
        yield tf.transpose(batch, [0, 3, 1, 2]) if channels_first else batch
    finally:
        _channels_first.reset(token)


def channels(inputs: tf.Tensor) -> int:
    """The number of channels of images."""
    return int(inputs.shape[1 if _channels_first.get() else 3])


def _format() -> str:
    return 'NCHW' if _channels_first.get() else 'NHWC'


def _over_image(size: int) -> list[int]:
    """`size` along H and W, 1 along the other axes."""
    return [1, 1, size, size] if _channels_first.get() else [1, size, size, 1]


def he_normal() -> Any:
    """Initialiser for a layer that a ReLU follows: variance 2 / fan_in (He et al. 2015, arXiv:1502.01852)."""
    return tf.variance_scaling_initializer(scale=2.0, mode='fan_in', distribution='truncated_normal')


def glorot_uniform() -> Any:
    """Initialiser for a linear layer: variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""
    return tf.glorot_uniform_initializer()


def dense(inputs: tf.Tensor, name: str, *, units: int, initializer: Any = None) -> tf.Tensor:
    """inputs @ kernel + bias.

    Args:
      inputs: [B, D].
      name: variable scope.
      units: size of the result's last axis.
      initializer: of the kernel; None = `glorot_uniform()`.

    Returns:
      [B, units].
    """
    with tf.variable_scope(name):
        shape = [inputs.shape.as_list()[-1], units]
        kernel = tf.get_variable('kernel', shape, inputs.dtype, initializer or glorot_uniform())
        bias = tf.get_variable('bias', [units], inputs.dtype, tf.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(inputs, kernel), bias)


def conv2d(inputs: tf.Tensor, name: str, *, kernel: tuple[int, int, int], stride: int = 1, bias: bool = True) -> tf.Tensor:
    """Convolution with 'SAME' padding; the kernel starts as `he_normal()`.

    Args:
      inputs: [B, H, W, C].
      name: variable scope.
      kernel: height, width and number of filters.
      stride: along H and W.
      bias: whether a bias is added; without one where a batch norm follows.

    Returns:
      [B, ceil(H / stride), ceil(W / stride), filters].
    """
    height, width, filters = kernel
    with tf.variable_scope(name):
        kernels = tf.get_variable('kernel', [height, width, channels(inputs), filters], inputs.dtype, he_normal())
        outputs = tf.nn.conv2d(inputs, kernels, strides=_over_image(stride), padding='SAME', data_format=_format())
        if not bias:
            return outputs
        bias_of = tf.get_variable('bias', [filters], inputs.dtype, tf.zeros_initializer())
        return tf.nn.bias_add(outputs, bias_of, data_format=_format())


def conv_norm(inputs: tf.Tensor, name: str, *, kernel: tuple[int, int, int], stride: int = 1, norm: tuple[bool, float]) -> tf.Tensor:
    """Convolution without bias, then batch norm; `norm` is its (training, momentum)."""
    training, momentum = norm
    with tf.variable_scope(name):
        x = conv2d(inputs, 'conv', kernel=kernel, stride=stride, bias=False)
        return batch_norm(x, 'norm', training=training, momentum=momentum)


def batch_norm(inputs: tf.Tensor, name: str, *, training: bool, momentum: float = 0.9, epsilon: float = 1e-5) -> tf.Tensor:
    """Batch normalisation over all axes but the channels' (Ioffe and Szegedy 2015, arXiv:1502.03167).

    In training the batch's own moments normalise, and two ordinary UPDATE_OPS move `moving_mean` and `moving_variance`:
    moving -= (1 - momentum) * (moving - batch). Otherwise the moving values normalise. As in tf.layers, the variance
    that is moved divides by n - 1 for images (the fused kernel's estimate) and by n for other ranks. All four variables
    are fp32 whatever the input's type.

    Args:
      inputs: [B, H, W, C], [B, C] or any other rank from 2 on.
      name: variable scope.
      training: whether this graph trains.
      momentum: share of the moving value kept at each step: 0.9 follows within some tens of steps; runs of many
        thousand steps may take 0.997.
      epsilon: added to the variance.

    Returns:
      A tensor shaped and typed as `inputs`.
    """
    shape = [channels(inputs) if inputs.shape.rank == 4 else inputs.shape.as_list()[-1]]
    with tf.variable_scope(name):
        gamma = tf.get_variable('gamma', shape, tf.float32, tf.ones_initializer())
        beta = tf.get_variable('beta', shape, tf.float32, tf.zeros_initializer())
        mean = tf.get_variable('moving_mean', shape, tf.float32, tf.zeros_initializer(), trainable=False)
        variance = tf.get_variable('moving_variance', shape, tf.float32, tf.ones_initializer(), trainable=False)
        normalise = _normalise_images if inputs.shape.rank == 4 else _normalise
        if not training:
            return normalise(inputs, (gamma, beta), (mean, variance), epsilon=epsilon)[0]
        outputs, batch_mean, batch_variance = normalise(inputs, (gamma, beta), None, epsilon=epsilon)
        for moving, value in ((mean, batch_mean), (variance, batch_variance)):
            write = tf.assign_sub(moving, (moving - tf.stop_gradient(value)) * (1.0 - momentum))
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write.op)
        return outputs


def _normalise_images(inputs: tf.Tensor, affine: Any, moments: Any, *, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Outputs, mean and variance by the fused kernel, which knows images only; moments None = the batch's."""
    mean, variance = moments or (None, None)
    return tf.nn.fused_batch_norm(
        inputs, *affine, mean=mean, variance=variance, epsilon=epsilon, is_training=moments is None, data_format=_format()
    )


def _normalise(inputs: tf.Tensor, affine: Any, moments: Any, *, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The same for any rank, reckoned in fp32."""
    values = tf.cast(inputs, tf.float32)
    mean, variance = moments or tf.nn.moments(values, axes=list(range(inputs.shape.rank - 1)))
    gamma, beta = affine
    outputs = tf.nn.batch_normalization(values, mean, variance, offset=beta, scale=gamma, variance_epsilon=epsilon)
    return tf.cast(outputs, inputs.dtype), mean, variance


def max_pool(inputs: tf.Tensor, *, size: int = 2, stride: int = 2) -> tf.Tensor:
    """The largest value of each size x size window: [B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), C].

    TensorFlow ends the process when the gradient of this meets an empty batch; Towers gives each tower a row or more.
    """
    return tf.nn.max_pool2d(inputs, ksize=size, strides=stride, padding='SAME', data_format=_format())


def global_average_pool(inputs: tf.Tensor) -> tf.Tensor:
    """Mean over the image: [B, H, W, C] -> [B, C]."""
    return tf.reduce_mean(inputs, axis=[2, 3] if _channels_first.get() else [1, 2])


def flatten(inputs: tf.Tensor) -> tf.Tensor:
    """All axes but the first as one, channels last: [B, ...] -> [B, D]."""
    if _channels_first.get() and inputs.shape.rank == 4:
        inputs = tf.transpose(inputs, [0, 2, 3, 1])
    return tf.reshape(inputs, [-1, int(np.prod(inputs.shape[1:].as_list()))])


def wider(inputs: tf.Tensor, *, stride: int, filters: int) -> tf.Tensor:
    """Every so many-th pixel, with zeros for new channels: [B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), filters]."""
    new, none, step = [0, filters - channels(inputs)], [0, 0], slice(None, None, stride)
    if _channels_first.get():
        return tf.pad(inputs[:, :, step, step], [none, new, none, none])
    return tf.pad(inputs[:, step, step, :], [none, none, none, new])


def embedding(ids: tf.Tensor, name: str, *, rows: int, units: int) -> tf.Tensor:
    """Rows of a table; its gradient is sparse.

    Args:
      ids: integers below `rows`, [B, ...].
      name: variable scope.
      rows: number of rows of the table.
      units: length of a row; entries start as normal of standard deviation units ** -0.5.

    Returns:
      [B, ..., units].
    """
    with tf.variable_scope(name):
        initializer = tf.random_normal_initializer(stddev=units**-0.5)
        return tf.nn.embedding_lookup(tf.get_variable('table', [rows, units], tf.float32, initializer), ids)
