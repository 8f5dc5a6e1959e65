"""The models that are measured, and their data: constants in the graph, or a pipeline that all sides share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import towers
from scripts import models

MOMENTUM, RATE = 0.9, 0.01
_IDS, _ROWS, _WIDTH, _CLASSES = 20, 100_000, 64, 10
_CYCLE = 8  # batches of a pipeline's pass: held in memory, since what is measured is not the making of data


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the batch that a tower has.

    Attributes:
      model: `model(batch, *, training) -> ModelOutput`.
      batch: examples for each tower.
      features: function from a number of examples to a batch of them: fixed numbers, made by numpy-like TensorFlow operations.
      keras: name of the function in `peers` that makes the same model of Keras layers.
      l2: penalty factor over all trainable variables; 0 = none.
    """

    model: Callable[..., towers.ModelOutput]
    batch: int
    features: Callable[[int], Mapping[str, tf.Tensor]]
    keras: str
    l2: float = 0.0

    def pipeline(self, size: int) -> tf.data.Dataset:
        """Single examples without end, from `_CYCLE` batches in memory."""
        return tf.data.Dataset.from_tensor_slices(self.features(_CYCLE * size)).repeat()


def embedding(batch: Mapping[str, tf.Tensor], *, training: bool) -> towers.ModelOutput:
    """The mean of embedded ids [B, 20], then a linear layer: its table gets IndexedSlices."""
    del training
    table = tf.get_variable('table', [_ROWS, _WIDTH], tf.float32, tf.random_normal_initializer(stddev=0.05))
    x = tf.reduce_mean(tf.nn.embedding_lookup(table, batch['ids']), axis=1)
    kernel = tf.get_variable('kernel', [_WIDTH, _CLASSES], tf.float32, tf.glorot_uniform_initializer())
    logits = tf.matmul(x, kernel) + tf.get_variable('bias', [_CLASSES], tf.float32, tf.zeros_initializer())
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch['label'], logits=logits)
    return towers.ModelOutput(tf.reduce_mean(loss), metrics={'accuracy': towers.accuracy(batch['label'], logits)})


def _images(examples: int, *, shape: tuple[int, ...], classes: int) -> Mapping[str, tf.Tensor]:
    seed = tf.constant([1, 2])
    labels = tf.random.stateless_uniform([examples], seed, 0, classes, tf.int64)
    return {'image': tf.random.stateless_normal([examples, *shape], seed), 'label': labels}


def _ids(examples: int) -> Mapping[str, tf.Tensor]:
    seed = tf.constant([3, 4])
    ids = tf.random.stateless_uniform([examples, _IDS], seed, 0, _ROWS, tf.int64)
    return {'ids': ids, 'label': ids[:, 0] % _CLASSES}


def _pictures(*, shape: tuple[int, ...], classes: int = 10) -> Callable[[int], Mapping[str, tf.Tensor]]:
    return functools.partial(_images, shape=shape, classes=classes)


def _zoo(name: str, **sizes: Any) -> Callable[..., towers.ModelOutput]:
    return models.build(name, **sizes)


WORKLOADS: Mapping[str, Workload] = {
    'w1': Workload(_zoo('mlp', hidden=[100]), 32, _pictures(shape=(28, 28, 1)), keras='perceptron'),
    'w2': Workload(_zoo('resnet20'), 32, _pictures(shape=(32, 32, 3)), keras='resnet20', l2=1e-4),
    'w3': Workload(_zoo('resnet50'), 8, _pictures(shape=(64, 64, 3), classes=1000), keras='resnet50', l2=1e-4),
    'w4': Workload(embedding, 64, _ids, keras='embedding'),
}
