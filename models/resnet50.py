"""ResNet-50 (He et al. 2015, arXiv:1512.03385, table 1): bottlenecks of 1 x 1, 3 x 3 and 1 x 1 convolutions.

Where the size halves it is the 3 x 3 convolution that strides (as torchvision and tf_cnn_benchmarks' v1.5 have it), and shortcuts that
change shape are projections. 161 variables, moving averages apart; 25.6 million numbers with 1,000 classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import towers

from . import augment, layers, losses

# Batches of 256, rate 0.1 divided by 10 every 30 epochs, weight decay 1e-4 as a penalty.
RECIPE: Mapping[str, Any] = {
    'learning_rate': 0.1,
    'l2': 1e-4,
    'schedule': 'piecewise',
    'schedule_unit': 'epochs',
    'boundaries': (30.0, 60.0, 80.0),
    'decay_rate': 0.1,
    'warmup': 5.0,
}


@dataclasses.dataclass(frozen=True)
class Hparams:
    """Sizes of ResNet-50.

    Attributes:
      blocks: bottlenecks of each stage.
      width: filters of the first stage's 3 x 3 convolutions; doubled in each later one.
      classes: number of classes.
      norm_momentum: of the batch norms' moving values, in [0, 1).
      augment: whether training images are mirrored at random.
      channels_first: whether the layers keep images as [B, C, H, W]; checkpoints are the same.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    norm_momentum: float = 0.9
    augment: bool = False
    channels_first: bool = False


def model(batch: Mapping[str, tf.Tensor], *, training: bool, hparams: Hparams) -> towers.ModelOutput:
    """The network; images of 32 x 32 or more.

    Args:
      batch: 'image' float [B, H, W, C], 'label' integer [B] (may be absent).
      training: whether batch norm takes the batch's own moments.
      hparams: sizes.
    """
    norm = training, hparams.norm_momentum
    image = augment.flip(batch['image']) if training and hparams.augment else batch['image']
    with layers.images(image, channels_first=hparams.channels_first) as x:
        x = _features(x, hparams, norm=norm)
    return losses.classification(batch.get('label'), layers.dense(x, 'logits', units=hparams.classes))


def _features(x: tf.Tensor, hparams: Hparams, *, norm: tuple[bool, float]) -> tf.Tensor:
    """[B, H, W, C] -> [B, 32 * width]."""
    x = tf.nn.relu(layers.conv_norm(x, 'stem', kernel=(7, 7, hparams.width), stride=2, norm=norm))
    x = layers.max_pool(x, size=3)  # [B, H / 4, W / 4, width]
    for stage, blocks in enumerate(hparams.blocks):
        for block in range(blocks):
            with tf.variable_scope(f'stage{stage + 1}/block{block + 1}'):
                x = _bottleneck(x, hparams.width * 2**stage, stride=2 if stage > 0 and block == 0 else 1, norm=norm)
    return layers.global_average_pool(x)


def _bottleneck(inputs: tf.Tensor, filters: int, *, stride: int, norm: tuple[bool, float]) -> tf.Tensor:
    """relu(shortcut + f(inputs)): [B, H, W, C] -> [B, H / stride, W / stride, 4 * filters]."""
    x = tf.nn.relu(layers.conv_norm(inputs, 'conv1', kernel=(1, 1, filters), norm=norm))
    x = tf.nn.relu(layers.conv_norm(x, 'conv2', kernel=(3, 3, filters), stride=stride, norm=norm))
    x = layers.conv_norm(x, 'conv3', kernel=(1, 1, 4 * filters), norm=norm)
    if layers.channels(inputs) != 4 * filters:
        inputs = layers.conv_norm(inputs, 'shortcut', kernel=(1, 1, 4 * filters), stride=stride, norm=norm)
    return tf.nn.relu(inputs + x)
