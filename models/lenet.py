"""A small convolutional network in the way of LeNet-5 (LeCun et al. 1998), with ReLU and max-pooling."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import towers

from . import layers, losses

# The rate falls after two epochs of MNIST's 60,000 and again after four; short runs and small data keep it.
RECIPE: Mapping[str, Any] = {
    'optimizer': 'adam',
    'learning_rate': 0.001,
    'schedule': 'piecewise',
    'schedule_unit': 'examples',
    'boundaries': (120000.0, 240000.0),
    'decay_rate': 0.1,
}


@dataclasses.dataclass(frozen=True)
class Hparams:
    """Sizes of the network.

    Attributes:
      conv1: filters of the first 5 x 5 convolution.
      conv2: filters of the second.
      dense: units of the hidden dense layer.
      classes: number of classes.
      channels_first: whether the layers keep images as [B, C, H, W]; checkpoints are the same.
    """

    conv1: int = 32
    conv2: int = 64
    dense: int = 512
    classes: int = 10
    channels_first: bool = False


def model(batch: Mapping[str, tf.Tensor], *, training: bool, hparams: Hparams) -> towers.ModelOutput:
    """Two convolutions with pooling, a hidden dense layer, and a linear one; images of any size.

    Args:
      batch: 'image' float [B, H, W, C], 'label' integer [B] (may be absent).
      training: makes no difference here: there is neither dropout nor batch norm.
      hparams: sizes.
    """
    del training
    with layers.images(batch['image'], channels_first=hparams.channels_first) as x:  # [B, H, W, C]
        for index, filters in enumerate((hparams.conv1, hparams.conv2), start=1):
            x = layers.max_pool(tf.nn.relu(layers.conv2d(x, f'conv{index}', kernel=(5, 5, filters))))
        x = layers.flatten(x)  # [B, H / 4 * W / 4 * conv2]
    x = tf.nn.relu(layers.dense(x, 'hidden', units=hparams.dense, initializer=layers.he_normal()))
    return losses.classification(batch.get('label'), layers.dense(x, 'logits', units=hparams.classes))
