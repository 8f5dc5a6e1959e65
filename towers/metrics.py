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
