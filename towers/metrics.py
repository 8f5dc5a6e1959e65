"""Metrics as sums that add over towers, batches and evaluators, and a function from the totals to the value."""

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import structs


def ratio(numerator: Any, denominator: Any) -> float:
    """numerator / denominator, NaN where nothing was counted."""
    return float(numerator) / float(denominator) if float(denominator) else float('nan')


def mean(values: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """Mean over all entries of `values`, each counted by `weights`.

    Args:
      values: tensor of any shape.
      weights: tensor that broadcasts to `values`; None counts each entry once. An entry of weight 0 adds nothing.
    """
    values = tf.cast(values, tf.float32)
    if weights is None:
        count = tf.cast(tf.size(values), tf.float32)
        return structs.Metric((tf.reduce_sum(values), count), ratio)
    weights = tf.broadcast_to(tf.cast(weights, tf.float32), tf.shape(values))
    return structs.Metric((tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), tf.reduce_sum(weights)), ratio)


def accuracy(labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """Share of examples whose largest logit is the label's.

    Args:
      labels: integer classes, [B, ...].
      logits: scores, [B, ..., classes].
      weights: [B, ...], None counts each label once.
    """
    found = tf.argmax(logits, axis=-1, output_type=tf.int64)
    return mean(tf.equal(found, tf.cast(labels, tf.int64)), weights)


def top_k(labels: tf.Tensor, logits: tf.Tensor, k: int = 5) -> structs.Metric:
    """Share of examples whose label is among the k largest logits; labels [B], logits [B, classes]."""
    return mean(tf.math.in_top_k(targets=tf.cast(labels, tf.int32), predictions=tf.cast(logits, tf.float32), k=k))


def mean_squared_error(targets: tf.Tensor, values: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """Mean of (values - targets)^2 over all entries; the shapes are equal."""
    return mean(tf.math.squared_difference(tf.cast(values, tf.float32), tf.cast(targets, tf.float32)), weights)


def perplexity(losses: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """e to the mean of `losses`, the negative log-likelihoods in nats of tokens of any shape, each counted by `weights`."""
    return structs.Metric(mean(losses, weights).sums, _exponential)


def precision(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """Share of what was predicted that is so: NaN where nothing was predicted.

    Args:
      labels: whether each entry is of the class, boolean or 0 and 1; for class k of several tf.equal(labels, k).
      predictions: whether it was predicted so, of the same shape; tf.equal(tf.argmax(logits, -1), k).
      weights: tensor that broadcasts to them; None counts each entry once.
    """
    return _share(labels, predictions, weights, of=predictions)


def recall(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """Share of what is so that was predicted: NaN where nothing is; arguments as of `precision`."""
    return _share(labels, predictions, weights, of=labels)


def auc(labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor | None = None, *, buckets: int = 4096) -> structs.Metric:
    """Area under the ROC curve: how probably a positive has a higher score than a negative, equal ones counted half.

    Scores are compared by their bucket, so the value is exact for scores rounded to 1 / buckets: it differs from that of the
    scores themselves by at most half the share of pairs that fall into one bucket. NaN where one of the two kinds is missing.

    Args:
      labels: whether each entry is a positive, boolean or 0 and 1.
      scores: in [0, 1], of the same shape; others count as 0 or 1.
      weights: tensor that broadcasts to them; None counts each entry once.
      buckets: of equal width.
    """
    scores = tf.reshape(tf.cast(scores, tf.float32), [-1])
    place = tf.clip_by_value(tf.cast(scores * buckets, tf.int32), 0, buckets - 1)
    positive, counted = _flat(labels), _weights(labels, weights)
    sums = [tf.math.unsorted_segment_sum(counted * kind, place, buckets) for kind in (positive, 1.0 - positive)]
    return structs.Metric(tuple(sums), _area)


def confusion_matrix(labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None = None) -> structs.Metric:
    """How often a label (row) was taken for a class (column): [classes, classes], which TensorBoard shows as an image.

    Args:
      labels: integer classes, [B, ...].
      logits: scores, [B, ..., classes], the number of classes known.
      weights: [B, ...], None counts each label once.
    """
    classes = int(logits.shape[-1])
    found = tf.reshape(tf.argmax(logits, axis=-1, output_type=tf.int64), [-1])
    place = tf.reshape(tf.cast(labels, tf.int64), [-1]) * classes + found
    counts = tf.math.unsorted_segment_sum(_weights(labels, weights), place, classes * classes)
    return structs.Metric((tf.reshape(counts, [classes, classes]),), lambda counts: counts)


def _share(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor | None, *, of: tf.Tensor) -> structs.Metric:
    counted = _weights(labels, weights) * _flat(of)
    return structs.Metric((tf.reduce_sum(counted * _flat(labels) * _flat(predictions)), tf.reduce_sum(counted)), ratio)


def _flat(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(values, tf.float32), [-1])


def _weights(like: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """What each entry counts, [entries]."""
    given = tf.ones([]) if weights is None else tf.cast(weights, tf.float32)
    return tf.reshape(tf.broadcast_to(given, tf.shape(like)), [-1])


def _exponential(total: Any, count: Any) -> float:
    with np.errstate(over='ignore'):
        return float(np.exp(ratio(total, count)))


def _area(positives: np.ndarray, negatives: np.ndarray) -> float:
    below = np.cumsum(negatives) - negatives  # negatives in lower buckets
    return ratio(np.sum(positives * (below + negatives / 2)), np.sum(positives) * np.sum(negatives))


def resolve(name: str, metric: Any, weight: tf.Tensor) -> structs.Metric:
    """A metric's short forms made whole.

    Args:
      name: for the message.
      metric: a Metric, a scalar mean over the examples, or (scalar mean, scalar weight).
      weight: fp32 scalar, the number of examples that a plain mean stands for.

    Raises:
      ValueError: `metric` is none of these.
    """
    if isinstance(metric, structs.Metric):
        return metric
    if isinstance(metric, tuple) and len(metric) == 2:
        metric, weight = metric
    elif isinstance(metric, tuple | list | dict):
        raise ValueError(f'Metric {name!r} must be a towers.Metric, a scalar, or (scalar, weight), got {type(metric).__name__}.')
    value, weight = tf.cast(metric, tf.float32), tf.cast(weight, tf.float32)
    if value.shape.rank not in (None, 0):
        raise ValueError(f'Metric {name!r} must be a scalar mean, got shape {value.shape}; use towers.mean for values of examples.')
    return structs.Metric((tf.math.multiply_no_nan(value, weight), weight), ratio)


def results(metrics: Any, totals: Any) -> dict[str, Any]:
    """Values of metrics from the totals of their sums: {name: Metric}, {name: numpy arrays} -> {name: value}."""
    return {name: metric.result(*(np.asarray(t) for t in totals[name])) for name, metric in metrics.items()}
