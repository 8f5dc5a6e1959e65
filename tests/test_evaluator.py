"""What an evaluation counts: every example once, for any size of dataset and batch and any number of towers."""

import dataclasses
import functools
import threading

import harness
import numpy as np
import pytest
import runs
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest
from towers.evaluators import evaluator
from towers.input import inputs

CLASSES = 4
CASES = [(1, 1, 1), (1, 1, 4), (3, 5, 2), (7, 2, 1), (7, 2, 4), (8, 2, 4), (13, 5, 2), (13, 3, 4), (13, 20, 2)]  # examples, batch, towers


def classifier(batch, *, training):
    """A linear classifier with a metric of every form."""
    assert not training
    features, labels = batch['x'], batch['y']
    logits = tf.matmul(features, tf.get_variable('w', [3, CLASSES]))
    hits = tf.cast(tf.equal(tf.argmax(logits, -1), labels), tf.float32)
    confusion = tf.math.confusion_matrix(labels, tf.argmax(logits, -1), num_classes=CLASSES, dtype=tf.int32)
    metrics = {
        'accuracy': towers.accuracy(labels, logits),
        'top_2': towers.top_k(labels, logits, k=2),
        'weighted': towers.mean(hits, weights=batch['m']),
        'plain': tf.reduce_mean(features[:, 0]),
        'pair': (tf.reduce_sum(features[:, 1] * batch['m']) / tf.reduce_sum(batch['m']), tf.reduce_sum(batch['m'])),
        'recall': towers.Metric((confusion,), lambda total: np.diag(total) / np.maximum(total.sum(1), 1)),
        'deviation': towers.Metric(
            (tf.reduce_sum(features), tf.reduce_sum(features**2), tf.size(features)),
            lambda s, q, n: np.sqrt(q / n - (s / n) ** 2),
        ),
    }
    return towers.ModelOutput(tf.losses.sparse_softmax_cross_entropy(labels, logits), metrics=metrics)


def expected(x, y, m, w):
    logits = x.astype(np.float64) @ w
    order = np.argsort(-logits, -1)
    hits = order[:, 0] == y
    likelihood = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {
        'examples': len(x),
        'loss': -likelihood[np.arange(len(y)), y].mean(),
        'accuracy': hits.mean(),
        'top_2': (order[:, :2] == y[:, None]).any(-1).mean(),
        'weighted': hits @ m / m.sum() if m.sum() else np.nan,
        'plain': x[:, 0].mean(),
        'pair': x[:, 1] @ m / m.sum() if m.sum() else np.nan,
        'recall': [hits[y == c].mean() if (y == c).any() else 0 for c in range(CLASSES)],
        'deviation': x.std(dtype=np.float64),
    }


def make(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    return {'x': x, 'y': rng.integers(0, CLASSES, size), 'm': (np.arange(size) % 3 != 1).astype(np.float32)}


W = np.random.default_rng(0).normal(size=(3, CLASSES)).astype(np.float32)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A checkpoint of the classifier at step 5."""
    return find(runs.publish(tmp_path_factory.mktemp('run'), 5, w=W))


def find(prefix):
    about = manifest.read(prefix)
    return manifest.Checkpoint(about.step, prefix, about)


def score(model, dataset, checkpoint, *, towers=1, batch=4):
    """The values of one evaluation."""
    settings = runs.config('unused', eval_num_gpus=towers, eval_batch_size=batch)
    with evaluator.Evaluator(model, dataset, settings) as session:
        session.load(checkpoint)
        return session.run(checkpoint, threading.Event()).values


@pytest.mark.parametrize(('size', 'batch', 'towers'), CASES)
def test_every_example_counts_exactly_once(trained, size, batch, towers):
    data = make(size)
    found = score(classifier, harness.rows(**data), trained, towers=towers, batch=batch)
    wanted = expected(data['x'], data['y'], data['m'], W)
    assert found.keys() == {'step', *wanted}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    assert found['step'] == 5
    assert found['accuracy'] == wanted['accuracy']  # a ratio of counts is exact


def test_a_dataset_of_unknown_size_is_counted_too(trained):
    data = make(13)
    found = score(classifier, lambda: harness.rows(**data)().filter(lambda row: row['y'] > 0), trained, towers=2)
    kept = data['y'] > 0
    wanted = expected(data['x'][kept], data['y'][kept], data['m'][kept], W)
    assert found['examples'] == kept.sum()
    np.testing.assert_allclose(found['loss'], wanted['loss'], rtol=1e-6)
    np.testing.assert_allclose(found['recall'], wanted['recall'])


def masked(batch, *, training):
    """The mean of the unmasked entries with its weight; 0/0 where a tower has none."""
    del training
    tf.get_variable('w', [])
    weight = tf.reduce_sum(batch['m'])
    mean = tf.reduce_sum(batch['x'] * batch['m']) / weight
    return towers.ModelOutput(mean, weight=weight, metrics={'pair': (mean, weight)})


@pytest.mark.parametrize('mask', [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize('n', [1, 2, 4])
def test_a_loss_weighted_by_the_model_leaves_out_what_weighs_nothing(tmp_path, mask, n):
    x, m = np.array([1, 2, 4, 8, 16], np.float32), np.array(mask, np.float32)
    found = score(masked, harness.rows(x=x, m=m), find(runs.publish(tmp_path, 1, w=np.float32(0))), towers=n, batch=1)
    wanted = x @ m / m.sum() if m.any() else np.nan
    np.testing.assert_allclose([found['loss'], found['pair']], wanted)


def penalised(batch, *, training):
    """The model puts the penalties into its loss by itself."""
    del training
    tf.get_variable('w', [], regularizer=lambda w: w**2)
    return towers.ModelOutput(tf.reduce_mean(batch) + tf.losses.get_regularization_loss())


@pytest.mark.parametrize('n', [1, 2, 4])
def test_penalties_in_the_loss_count_on_each_tower(tmp_path, n):
    found = score(penalised, harness.numbers(1, 2, 3, 4, 5), find(runs.publish(tmp_path, 1, w=np.float32(3))), towers=n, batch=2)
    assert found['loss'] == pytest.approx(3 + 9)


def test_totals_are_wider_than_the_sums(tmp_path):
    """In fp32 the small values would vanish beside the large one."""

    def model(batch, *, training):
        del training
        tf.get_variable('w', [])
        return towers.ModelOutput(metrics={'mean': tf.reduce_mean(batch), 'count': towers.Metric((tf.size(batch),), int)})

    data = [2.0**24, *[1.0] * 7]
    found = score(model, harness.numbers(*data), find(runs.publish(tmp_path, 1, w=np.float32(0))), batch=1)
    assert found == {'step': 1, 'examples': 8, 'mean': np.mean(data), 'count': 8}


def test_local_state_starts_anew_with_each_checkpoint(tmp_path):
    def model(batch, *, training):
        del training
        tf.get_variable('w', [])
        seen = tf.get_variable('seen', [], initializer=tf.zeros_initializer(), collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
        with tf.control_dependencies([batch]):
            last = seen.assign_add(1.0)
        return towers.ModelOutput(metrics={'batches': (last, 1.0)})

    settings = runs.config('unused', eval_batch_size=2)
    checkpoint = find(runs.publish(tmp_path, 1, w=np.float32(0)))
    with evaluator.Evaluator(model, harness.numbers(1, 2, 3), settings) as session:
        assert session.loaded is None
        session.load(checkpoint)
        assert session.loaded == 1
        assert [session.run(checkpoint, threading.Event()).values['batches'] for _ in range(2)] == [1.5, 1.5]


def test_a_lookup_table_and_the_step_are_there(tmp_path):
    def model(batch, *, training):
        del training
        values = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2], tf.int64), tf.constant([10.0, 20.0]))
        found = tf.lookup.StaticHashTable(values, 0.0).lookup(batch)
        step = tf.cast(tf.train.get_global_step(), tf.float32)
        return towers.ModelOutput(metrics={'found': tf.reduce_mean(found * tf.get_variable('w', [])), 'at': step})

    dataset = harness.rows(np.array([1, 2, 2], np.int64))
    found = score(model, dataset, find(runs.publish(tmp_path, 7, w=np.float32(3))), batch=2)
    assert found == {'step': 7, 'examples': 3, 'found': 50.0, 'at': 7.0}


def reads_another(batch, *, training, count):
    """Reads a second iterator, which ends after so many batches."""
    del training
    tf.get_variable('w', [])
    other = tf.data.make_one_shot_iterator(tf.data.Dataset.range(count)).get_next()
    return towers.ModelOutput(tf.reduce_mean(batch) + 0 * tf.cast(other, tf.float32))


@pytest.mark.parametrize('is_known', [True, False])
def test_only_the_own_input_ends_the_pass(tmp_path, is_known):
    """Also where the size is not known, so that nothing but the end tells whether all examples were there."""
    checkpoint = find(runs.publish(tmp_path, 1, w=np.float32(0)))
    data = harness.numbers(*range(20))
    given = data if is_known else lambda: data().filter(lambda number: number >= 0)
    with pytest.raises(tf.errors.OutOfRangeError, match='End of sequence .*test_evaluator.py'):
        score(functools.partial(reads_another, count=1), given, checkpoint, batch=1)


def test_an_iterator_that_ends_with_the_input_does_no_harm(tmp_path):
    checkpoint = find(runs.publish(tmp_path, 1, w=np.float32(0)))
    assert score(functools.partial(reads_another, count=3), harness.numbers(1, 2, 3), checkpoint, batch=1)['loss'] == 2


def test_a_count_that_differs_from_the_datasets_is_an_error(trained, monkeypatch):
    real = inputs.evaluation
    monkeypatch.setattr(inputs, 'evaluation', lambda *args, **given: dataclasses.replace(real(*args, **given), epoch_examples=8))
    with pytest.raises(RuntimeError, match='7 examples were evaluated, the dataset says it has 8; expected each exactly once'):
        score(classifier, harness.rows(**make(7)), trained)


def test_a_pass_stops_between_batches(trained):
    stop = threading.Event()
    stop.set()
    with evaluator.Evaluator(classifier, harness.rows(**make(7)), runs.config('unused')) as session:
        session.load(trained)
        assert session.run(trained, stop) is None


def with_metrics(**metrics):
    def model(batch, *, training):
        del training
        return towers.ModelOutput(metrics={name: tf.reduce_mean(batch) for name in metrics})

    return model


@pytest.mark.parametrize(
    ('model', 'dataset', 'changes', 'message'),
    [
        (with_metrics(loss=1), harness.numbers(1), {}, "metric 'loss', which is a name of every evaluation .*rename it"),
        (with_metrics(), harness.numbers(1), {}, 'neither a loss nor metrics'),
        (with_metrics(a=1), lambda: tf.data.Dataset.range(3).repeat(), {}, 'needs a dataset that ends'),
        (with_metrics(a=1), harness.numbers(1), {'eval_device': 'gpu', 'eval_num_gpus': 2}, '2 GPUs asked, 0 found.*--eval_device=cpu'),
    ],
)
def test_what_can_not_be_evaluated_says_so(model, dataset, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluator.Evaluator(model, dataset, runs.config('unused', **changes))


def test_a_dataset_that_turns_out_empty_is_an_error(trained):
    with pytest.raises(ValueError, match='gave no examples; expected at least one'):
        score(classifier, lambda: harness.rows(**make(7))().filter(lambda row: row['y'] > 9), trained)


def test_a_checkpoint_of_another_model_names_the_variable(tmp_path):
    checkpoint = find(runs.publish(tmp_path, 1, w=np.zeros([2, CLASSES], np.float32)))
    with pytest.raises(ValueError, match=r'w: shape \[3, 4\], in the checkpoint \[2, 4\]'):
        score(classifier, harness.rows(**make(7)), checkpoint)
