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


RANDOM = np.random.default_rng(5)
TRUE, SCORES, WEIGHTS = RANDOM.random(301) < 0.3, RANDOM.random(301).round(2), RANDOM.integers(0, 4, 301)
TRUE[-7:], SCORES[-7:] = True, 1.0
CLASSES, SCORED = RANDOM.integers(0, 4, 301), RANDOM.normal(size=(301, 4)).astype(np.float32)


def by_pairs(true, scores, weights):
    """The area under the curve from all pairs."""
    pair = weights[true][:, None] * weights[~true][None, :]
    ahead = np.sign(scores[true][:, None] - scores[~true][None, :]) / 2 + 0.5
    return (pair * ahead).sum() / pair.sum()


def counted(labels, found, weights):
    matrix = np.zeros([4, 4])
    np.add.at(matrix, (labels, found), weights)
    return matrix


@pytest.mark.parametrize('weights', [np.ones(301), WEIGHTS], ids=['once', 'weighted'])
@pytest.mark.parametrize('batches', [[301], [7] * 43])
def test_totals_over_batches_are_numpys_of_all_examples(weights, batches):
    given = {'t': TRUE, 's': SCORES.astype(np.float32), 'w': weights.astype(np.float32), 'c': CLASSES, 'l': SCORED}
    fed = {name: tf.placeholder(array.dtype, [None, *array.shape[1:]]) for name, array in given.items()}
    found = SCORES > 0.6
    made = {
        'precision': towers.precision(fed['t'], fed['s'] > np.float32(0.6), fed['w']),
        'recall': towers.recall(fed['t'], fed['s'] > np.float32(0.6), fed['w']),
        'auc': towers.auc(fed['t'], fed['s'], fed['w']),
        'confusion': towers.confusion_matrix(fed['c'], fed['l'], fed['w']),
        'perplexity': towers.perplexity(fed['s'], fed['w']),
        'error': towers.mean_squared_error(fed['s'], fed['l'][:, 0], fed['w']),
    }
    expected = {
        'precision': (weights * TRUE * found).sum() / (weights * found).sum(),
        'recall': (weights * TRUE * found).sum() / (weights * TRUE).sum(),
        'auc': by_pairs(TRUE, SCORES, weights),
        'confusion': counted(CLASSES, SCORED.argmax(-1), weights),
        'perplexity': np.exp(np.average(SCORES, weights=weights)),
        'error': np.average((SCORED[:, 0] - SCORES) ** 2, weights=weights),
    }
    totals, start = dict.fromkeys(made, 0), 0
    with tf.Session(config=PROTO) as session:
        for size in batches:
            rows = {fed[name]: array[start : start + size] for name, array in given.items()}
            sums = session.run({name: metric.sums for name, metric in made.items()}, rows)
            totals = {name: [np.asarray(part, np.float64) for part in np.add(totals[name], sums[name])] for name in made}
            start += size
    values = metrics.results(made, totals)
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize('scores', [[-0.5, 0.0], [1.0, 1.5]])
def test_scores_out_of_range_count_as_the_nearest(scores):
    assert value(towers.auc(tf.constant([True, False]), tf.constant(scores))) == 0.5


def test_a_share_of_nothing_is_nan():
    no, yes = tf.constant([False]), tf.constant([True])
    assert np.isnan([value(metric) for metric in (towers.precision(yes, no), towers.recall(no, yes), towers.auc(yes, tf.ones([1])))]).all()


def test_a_perplexity_without_bound_is_infinite():
    assert value(towers.perplexity(tf.constant([1e5]))) == np.inf


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
