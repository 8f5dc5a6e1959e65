"""Residual networks in their CIFAR form (He et al. 2015, arXiv:1512.03385, section 4.2).

A 3 x 3 convolution, three stages of `blocks` blocks with 16, 32 and 64 filters, the mean over the image, and a linear
layer: 6 * blocks + 2 layers. Where the size changes, the shortcut is the paper's option A: every second pixel, with
zeros for the new filters, so it has no variable.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import towers

from . import augment, layers, losses

# The paper's: batches of 128, rate 0.1 divided by 10 at 32,000 and 48,000 steps, weight decay as a penalty.
RECIPE: Mapping[str, Any] = {
    'learning_rate': 0.1,
    'l2': 1e-4,
    'schedule': 'piecewise',
    'schedule_unit': 'steps',
    'boundaries': (32000.0, 48000.0),
    'decay_rate': 0.1,
}


@dataclasses.dataclass(frozen=True)
class Hparams:
    """Sizes of ResNet-20.

    Attributes:
      blocks: residual blocks of each stage.
      width: filters of the first stage; doubled in each later one.
      classes: number of classes.
      norm_momentum: of the batch norms' moving values, in [0, 1).
      augment: whether training images are mirrored and moved at random, as in the paper.
      channels_first: whether the layers keep images as [B, C, H, W]; checkpoints are the same.
    """

    blocks: int = 3
    width: int = 16
    classes: int = 10
    norm_momentum: float = 0.9
    augment: bool = False
    channels_first: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where `norm_momentum` is no momentum."""
        if not 0 <= self.norm_momentum < 1:
            raise ValueError(f'norm_momentum must be in [0, 1), got {self.norm_momentum!r}; 0.9 to 0.997 are usual.')


@dataclasses.dataclass(frozen=True)
class Hparams56(Hparams):
    """Sizes of ResNet-56."""

    blocks: int = 9


def model(batch: Mapping[str, tf.Tensor], *, training: bool, hparams: Hparams) -> towers.ModelOutput:
    """The network of `hparams.blocks`; images of 8 x 8 or more.

    Args:
      batch: 'image' float [B, H, W, C], 'label' integer [B] (may be absent).
      training: whether batch norm takes the batch's own moments.
      hparams: sizes.
    """
    image = batch['image']
    if training and hparams.augment:
        image = augment.pad_and_crop(augment.flip(image))
    with layers.images(image, channels_first=hparams.channels_first) as x:
        x = _features(x, hparams, norm=(training, hparams.norm_momentum))
    return losses.classification(batch.get('label'), layers.dense(x, 'logits', units=hparams.classes))


def _features(x: tf.Tensor, hparams: Hparams, *, norm: tuple[bool, float]) -> tf.Tensor:
    """[B, H, W, C] -> [B, 4 * width]."""
    x = tf.nn.relu(layers.conv_norm(x, 'stem', kernel=(3, 3, hparams.width), norm=norm))  # [B, H, W, width]
    for stage in range(3):
        for block in range(hparams.blocks):
            with tf.variable_scope(f'stage{stage + 1}/block{block + 1}'):
                x = _block(x, hparams.width * 2**stage, stride=2 if stage > 0 and block == 0 else 1, norm=norm)
    return layers.global_average_pool(x)


def _block(inputs: tf.Tensor, filters: int, *, stride: int, norm: tuple[bool, float]) -> tf.Tensor:
    """relu(inputs + f(inputs)), f being two convolutions: [B, H, W, C] -> [B, H / stride, W / stride, filters]."""
    x = tf.nn.relu(layers.conv_norm(inputs, 'conv1', kernel=(3, 3, filters), stride=stride, norm=norm))
    x = layers.conv_norm(x, 'conv2', kernel=(3, 3, filters), norm=norm)
    if stride > 1:
        inputs = layers.wider(inputs, stride=stride, filters=filters)
    return tf.nn.relu(inputs + x)
