"""A multi-layer perceptron on flattened images."""

import dataclasses
from collections.abc import Mapping

import tensorflow.compat.v1 as tf

import towers

from . import layers, losses


@dataclasses.dataclass(frozen=True)
class Hparams:
    """Sizes of the perceptron.

    Attributes:
      hidden: units of each hidden layer; none makes a linear classifier.
      classes: number of classes.
    """

    hidden: tuple[int, ...] = (256, 128)
    classes: int = 10


def model(batch: Mapping[str, tf.Tensor], *, training: bool, hparams: Hparams) -> towers.ModelOutput:
    """Dense layers with ReLU, then a linear one.

    Args:
      batch: 'image' float [B, H, W, C], 'label' integer [B] (may be absent).
      training: makes no difference here.
      hparams: sizes.
    """
    del training
    x = layers.flatten(batch['image'])  # [B, H * W * C]
    for index, units in enumerate(hparams.hidden, start=1):
        x = tf.nn.relu(layers.dense(x, f'hidden{index}', units=units, initializer=layers.he_normal()))
    return losses.classification(batch.get('label'), layers.dense(x, 'logits', units=hparams.classes))
