"""Metrics against numpy, their short forms and their errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import metrics

PROTO = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
NAN = float('nan')


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def value(metric, times=1):
    """The value of totals over so many equal batches."""
    with tf.Session(config=PROTO) as session:
        return metric.result(*[times * np.asarray(total) for total in session.run(metric.sums)])


LOGITS = np.array([[1, 2, 3], [3, 2, 1], [0, 5, 0], [2, 1, 0]], np.float32)
LABELS = np.array([2, 1, 1, 0])


@pytest.mark.parametrize(
    ('make', 'expected'),
    [
        (lambda: towers.mean(tf.constant([[1.0, 2.0], [3.0, 6.0]])), 3.0),
        (lambda: towers.mean(tf.constant([1, 2, 4])), 7 / 3),
        (lambda: towers.mean(tf.constant([1.0, NAN, 5.0]), tf.constant([1.0, 0.0, 3.0])), 4.0),
        (lambda: towers.mean(tf.constant([[1.0, 2.0], [3.0, 6.0]]), tf.constant([[1.0], [3.0]])), (3 + 27) / 8),
        (lambda: towers.accuracy(tf.constant(LABELS), tf.constant(LOGITS)), 0.75),
        (lambda: towers.accuracy(tf.constant(LABELS, tf.int32), tf.constant(LOGITS), tf.constant([1.0, 3.0, 0.0, 0.0])), 0.25),
        (lambda: towers.accuracy(tf.constant(LABELS.reshape(2, 2)), tf.constant(LOGITS.reshape(2, 2, 3))), 0.75),
        (lambda: towers.top_k(tf.constant(LABELS), tf.constant(LOGITS), k=2), 1.0),
        (lambda: towers.top_k(tf.constant(LABELS), tf.constant(LOGITS), k=1), 0.75),
        (lambda: towers.mean_squared_error(tf.constant([1.0, 2.0]), tf.constant([2.0, 4.0])), 2.5),
        (lambda: towers.mean_squared_error(tf.constant([1, 2]), tf.constant([2.0, NAN]), tf.constant([1.0, 0.0])), 1.0),
    ],
)
def test_values(make, expected):
    metric = make()
    np.testing.assert_allclose(value(metric), expected, rtol=1e-6)
    np.testing.assert_allclose(value(metric, times=3), expected, rtol=1e-6)  # the totals of equal batches


def test_nothing_counted_is_nan():
    assert np.isnan(value(towers.mean(tf.zeros([0]))))
    assert np.isnan(metrics.ratio(0.0, 0.0)) and metrics.ratio(np.float32(3), np.int64(2)) == 1.5


@pytest.mark.parametrize(
    ('short', 'expected'),
    [
        (lambda: tf.constant(2.0), (10.0, 5.0)),
        (lambda: 2, (10.0, 5.0)),
        (lambda: (tf.constant(2.0), 3), (6.0, 3.0)),
        (lambda: (NAN, 0.0), (0.0, 0.0)),
    ],
)
def test_short_forms_become_sums(short, expected):
    metric = metrics.resolve('m', short(), tf.constant(5.0))
    with tf.Session(config=PROTO) as session:
        assert tuple(session.run(metric.sums)) == expected
    assert metric.result is metrics.ratio


def test_a_whole_metric_is_left_as_it_is():
    metric = towers.Metric((tf.constant(1.0),), float)
    assert metrics.resolve('m', metric, tf.constant(5.0)) is metric


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (lambda: [1.0, 2.0], r"Metric 'm' must be a towers.Metric, a scalar, or \(scalar, weight\), got list"),
        (lambda: {'a': 1.0}, r'got dict'),
        (lambda: (1.0, 2.0, 3.0), r'got tuple'),
        (lambda: tf.ones([3]), r"Metric 'm' must be a scalar mean, got shape \(3,\); use towers.mean for values of examples"),
        (lambda: (tf.ones([3]), 1.0), r'must be a scalar mean, got shape'),
    ],
)
def test_other_forms_are_errors_that_say_what_to_do(wrong, message):
    with pytest.raises(ValueError, match=message):
        metrics.resolve('m', wrong(), tf.constant(5.0))


def test_results_take_totals_by_name():
    made = {'a': towers.Metric((), lambda x, y: float(x) - float(y)), 'b': towers.Metric((), lambda x: x * 2)}
    found = metrics.results(made, {'a': (3, 1), 'b': ([1, 2],)})
    assert found['a'] == 2.0 and found['b'].tolist() == [2, 4]
