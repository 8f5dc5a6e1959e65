"""Losses of the zoo, each a mean over the tower's examples."""

import tensorflow.compat.v1 as tf

import towers


def softmax_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean of -log softmax(logits)[label], in fp32.

    Args:
      labels: integers below `classes`, [B].
      logits: [B, classes].

    Returns:
      A scalar.
    """
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.cast(logits, tf.float32)))


def classification(labels: tf.Tensor | None, logits: tf.Tensor) -> towers.ModelOutput:
    """What a classifier returns: cross entropy, accuracy, and a class and its probabilities for each example.

    Args:
      labels: [B]; None where only predictions are wanted.
      logits: [B, classes].
    """
    predictions = {'class': tf.argmax(logits, axis=-1, output_type=tf.int64), 'probability': tf.nn.softmax(tf.cast(logits, tf.float32))}
    if labels is None:
        return towers.ModelOutput(predictions=predictions)
    loss = softmax_cross_entropy(labels, logits)
    return towers.ModelOutput(loss, metrics={'accuracy': towers.accuracy(labels, logits)}, predictions=predictions)
