"""Laws 1 to 8: what gradient a step applies, for every strategy and number of towers."""

import itertools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER, HALF

import towers


def linear(x, *, training):
    """Loss mean(w * x), whose gradient is the mean of x."""
    return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 1.0) * x))


def in_turn(*models):
    """A model whose towers take turns with these, as a model with state of its own in Python might."""
    turns = itertools.cycle(models)
    return lambda batch, *, training: next(turns)(batch, training=training)


def watch(seen):
    """A link that keeps the totals that pass it."""

    def link(total):
        seen.append(total)
        return total

    return link


@harness.each_case
def test_law_1_the_mean_is_applied(strategy, n):
    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 0.0) * x))

    _, variables = harness.train(model, harness.numbers(1, 3, 1, 3), harness.config(strategy, n, global_batch_size=4, learning_rate=0.1))
    np.testing.assert_allclose(variables['w'], -0.2, rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_1_a_sum_on_request_is_over_all_examples(strategy, n):
    """Also of an odd batch, and of what a model's own weight counts; the loss stays a mean, a penalty counts once."""
    changes = {'global_batch_size': 5, 'learning_rate': 0.1, 'gradient_reduction': 'sum', 'l2': 0.5}
    [report], variables = harness.train(linear, harness.numbers(1, 2, 3, 4, 5), harness.config(strategy, n, **changes))
    np.testing.assert_allclose(variables['w'], 1 - 0.1 * (15 + 0.5), rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose((report['loss'], report['penalty']), (3.0, 0.25), rtol=FP32_SAME_ORDER)

    def counted(x, *, training):
        count = 2 * tf.cast(tf.size(x), tf.float32)
        return towers.ModelOutput(linear(x, training=training).loss, weight=count)

    _, variables = harness.train(counted, harness.numbers(1, 2, 3, 4, 5), harness.config(strategy, n, **changes))
    np.testing.assert_allclose(variables['w'], 1 - 0.1 * (30 + 0.5), rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_2_weights_are_example_counts(strategy, n):
    settings = harness.config(strategy, n, global_batch_size=5)
    [report], variables = harness.train(linear, harness.numbers(1, 2, 3, 4, 5), settings)
    np.testing.assert_allclose([report['loss'], 1 - variables['w']], [3.0, 3.0], rtol=FP32_SAME_ORDER)
    assert report['examples'] == report['examples_seen'] == 5


@pytest.mark.parametrize('pipeline', ['global', 'sharded'])
@harness.each_case
def test_law_2_a_last_batch_of_one_example(strategy, n, pipeline):
    settings = harness.config(strategy, n, global_batch_size=4, input_pipeline=pipeline, learning_rate=0.5)
    reports, variables = harness.train(linear, harness.numbers(1, 2, 3, 4, 2), settings, steps=2)
    assert [r['examples'] for r in reports] == [4, 1] and reports[-1]['examples_seen'] == 5
    w = 1 - 0.5 * 2.5
    np.testing.assert_allclose([r['loss'] for r in reports], [2.5, w * 2], rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(variables['w'], w - 0.5 * 2, rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_2_the_models_own_weight_takes_the_place_of_the_count(strategy, n):
    """Token losses: 4 sequences of 3, 0, 1 and 2 tokens; a tower of the empty one alone has the loss 0/0."""

    def model(batch, *, training):
        x, mask = batch
        tokens = tf.reduce_sum(mask)
        return towers.ModelOutput(tf.reduce_sum(harness.variable('w', 1.0) * x * mask) / tokens, weight=tokens)

    x = np.array([[1, 2, 6], [9, 9, 9], [5, 9, 9], [3, 1, 9]], np.float32)
    mask = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]], np.float32)
    [report], variables = harness.train(model, harness.rows(x, mask), harness.config(strategy, n, global_batch_size=4))
    np.testing.assert_allclose([report['loss'], variables['w']], [3.0, -2.0], rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_2_a_step_of_total_weight_0_changes_nothing(strategy, n):
    def model(x, *, training):
        tokens, w, mean = tf.reduce_sum(x), harness.variable('w', 1.0), harness.variable('mean', 0.0, trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_add(1.0))
        return towers.ModelOutput(w * tf.reduce_sum(x * x) / tokens, weight=tokens)

    data = harness.numbers(1, 1, 1, 1, 0, 0, 0, 0, 1, 3, 1, 3)
    settings = harness.config(strategy, n, global_batch_size=4, optimizer='adam', learning_rate=0.25, l2=0.5)
    with harness.started(model, data, settings) as run:
        [first] = run.steps(1)
        before = run.variables()
        [skipped] = run.steps(1)
        assert run.variables() == before
        [third] = run.steps(1)
        after = run.variables()
    assert [r['step'] for r in (first, skipped, third)] == [1, 1, 2]
    assert [r['examples_seen'] for r in (first, skipped, third)] == [4, 4, 8]
    assert skipped['loss'] == 0 and np.isfinite(skipped['total_loss'])
    assert before['w'] != 1 and after['w'] != before['w'] and after['mean'] == 2
    np.testing.assert_allclose(after['beta1_power'], 0.9**3, rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_3_sparse_stays_sparse(strategy, n):
    def model(ids, *, training):
        found = tf.nn.embedding_lookup(harness.variable('table', np.ones([4, 2])), ids)
        return towers.ModelOutput(tf.reduce_mean(tf.reduce_sum(found, 1)))

    seen = []
    data = harness.rows(np.array([1, 1, 1, 3]))
    _, variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=4), links=[watch(seen)])
    assert isinstance(seen[0].gradients[0], tf.IndexedSlices)
    np.testing.assert_allclose(variables['table'], [[1, 1], [0.25, 0.25], [1, 1], [0.75, 0.75]], rtol=FP32_SAME_ORDER)


@harness.each_split
def test_law_3_one_dense_tower_makes_that_variable_alone_dense(strategy, n):
    def sparse_part():
        return tf.reduce_sum(tf.nn.embedding_lookup(harness.variable('other', np.ones([3, 1])), [2]))

    def table():
        return harness.variable('table', np.zeros([4, 1]))

    def dense(x, *, training):
        return towers.ModelOutput(0.5 * tf.reduce_sum(table()) + sparse_part())

    def sparse(x, *, training):
        return towers.ModelOutput(tf.reduce_sum(tf.nn.embedding_lookup(table(), [1])) + sparse_part())

    seen = []
    settings = harness.config(strategy, n, global_batch_size=n)
    _, variables = harness.train(in_turn(dense, sparse), harness.numbers(*range(n)), settings, links=[watch(seen)])
    kinds = {v.op.name: type(g) for v, g in zip(seen[0].variables, seen[0].gradients, strict=True)}
    assert issubclass(kinds['table'], tf.Tensor) and kinds['other'] is tf.IndexedSlices
    np.testing.assert_allclose(-variables['table'][:, 0], [0.25, 0.75, 0.25, 0.25], rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(variables['other'][:, 0], [1, 1, 0], atol=FP32_SAME_ORDER)


@harness.each_case
def test_law_4_a_variable_without_gradient_is_skipped_with_one_warning(strategy, n, caplog):
    def model(x, *, training):
        harness.variable('net/unused', 7.0)
        return linear(x, training=training)

    _, variables = harness.train(model, harness.numbers(*[1.0] * n), harness.config(strategy, n, global_batch_size=n))
    assert variables['net/unused'] == 7 and variables['w'] == 0
    assert [r.getMessage() for r in caplog.records if 'net/unused' in r.getMessage()] == [
        "No gradient reaches the variable 'net/unused' in any tower; it is not trained."
    ]


@harness.each_split
def test_law_4_none_in_some_towers_is_zero_with_its_weight(strategy, n):
    def both(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 0.0) * x + harness.variable('b', 0.0) * x))

    def one(x, *, training):
        harness.variable('b', 0.0)
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 0.0) * x))

    data = harness.numbers(*range(1, n + 2))  # the first tower has two rows: 1 and 2
    _, variables = harness.train(in_turn(both, one), data, harness.config(strategy, n, global_batch_size=n + 1))
    shares = [3, *range(3, n + 2)]
    np.testing.assert_allclose(-variables['w'], sum(shares) / (n + 1), rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(-variables['b'], sum(shares[::2]) / (n + 1), rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_4_a_loss_that_reaches_no_variable_is_named(strategy, n):
    def model(x, *, training):
        harness.variable('w', 1.0)
        return towers.ModelOutput(tf.reduce_mean(x, name='lonely'))

    with pytest.raises(ValueError, match=r"No gradient of the loss 'tower_0/lonely' reaches a trainable variable"):
        harness.train(model, harness.numbers(1, 2, 3, 4), harness.config(strategy, n, global_batch_size=4))


@pytest.mark.parametrize(
    ('dtype', 'values', 'expected'),
    [(tf.float16, [20000] * 4, 20000), (tf.bfloat16, [256, 1, 1, 1], 64.75)],
    ids=['float16', 'bfloat16'],
)
@harness.each_strategy
def test_law_5_half_precision_is_summed_in_fp32(strategy, dtype, values, expected):
    def model(x, *, training):
        w = harness.variable('w', 0.0, dtype=dtype)
        return towers.ModelOutput(tf.reduce_mean(w * tf.cast(x, dtype)))

    seen = []
    settings = harness.config(strategy, 4, global_batch_size=4, learning_rate=2.0**-10)
    with harness.started(model, harness.numbers(*values), settings, links=[watch(seen)]) as run:
        assert run.session.run(seen[0].gradients[0]) == expected
        run.steps(1)
        w = run.variables()['w']
    assert w.dtype == dtype.as_numpy_dtype
    np.testing.assert_allclose(w.astype(np.float64), -expected / 1024, rtol=HALF)


@harness.each_case
def test_law_5_a_half_precision_loss_keeps_the_weights_exact(strategy, n):
    def model(x, *, training):
        return towers.ModelOutput(tf.cast(tf.reduce_mean(harness.variable('w', 1.0) * x), tf.float16))

    [report], variables = harness.train(model, harness.numbers(1, 2, 3, 4, 5), harness.config(strategy, n, global_batch_size=5))
    np.testing.assert_allclose([report['loss'], 1 - variables['w']], [3.0, 3.0], rtol=FP32_SAME_ORDER)


@harness.each_case
def test_law_6_clipping_acts_once_on_the_mean(strategy, n):
    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(tf.reduce_sum(harness.variable('w', [0.0, 0.0]) * x, 1)))

    data = harness.rows(np.array([[3, 4], [-3, 0]] * 2, np.float32))
    _, variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=4, clip_norm=1.0))
    np.testing.assert_allclose(-variables['w'], [0, 1], atol=FP32_SAME_ORDER)


@harness.each_case
def test_law_6_repeated_rows_are_summed_before_clipping(strategy, n):
    def model(ids, *, training):
        found = tf.nn.embedding_lookup(harness.variable('table', np.zeros([4, 2])), ids)
        return towers.ModelOutput(tf.reduce_mean(tf.reduce_sum(found, 1)))

    data = harness.rows(np.array([1, 1, 1, 3]))
    _, variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=4, clip_norm=0.5))
    gradient = np.array([[0, 0], [0.75, 0.75], [0, 0], [0.25, 0.25]])
    np.testing.assert_allclose(-variables['table'], gradient / np.linalg.norm(gradient) * 0.5, rtol=FP32_SAME_ORDER)


@harness.each_case
def test_several_objectives_train_their_own_variables(strategy, n):
    """Two losses over shared data: each variable follows its own loss, found by its scope as such models do."""

    def model(x, *, training):
        with tf.variable_scope('generator', regularizer=lambda v: 0.05 * v * v):
            g = harness.variable('w', 1.0)
        with tf.variable_scope('critic'):
            c = harness.variable('w', 2.0)
        product, penalty = tf.reduce_mean(g * c * x), tf.losses.get_regularization_loss()
        pairs = [('generator', product + penalty), ('critic', -product)]
        return towers.ModelOutput(
            objectives=tuple(towers.Objective(name, loss, tuple(tf.trainable_variables(name))) for name, loss in pairs)
        )

    data = harness.numbers(1, 2, 3, 4, 5)
    [report], variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=5, learning_rate=0.1))
    np.testing.assert_allclose(variables['generator/w'], 1 - 0.1 * (2 * 3 + 0.1), rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(variables['critic/w'], 2 + 0.1 * 1 * 3, rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(report['total_loss'], 0.05, atol=FP32_SAME_ORDER)
