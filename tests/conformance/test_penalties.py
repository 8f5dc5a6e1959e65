"""Law 8: regularisation counts once, however the model spells it, whatever the strategy and the number of towers."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER

import towers


def l2(variable):
    return 0.1 * tf.nn.l2_loss(variable)


def no_loss(x, *variables):
    """A data loss of 0 that every variable takes part in."""
    return tf.add_n([0.0 * v * tf.reduce_mean(x) for v in variables])


def beside_the_loss(x, *, training):
    """Three spellings whose penalties the loss does not contain."""
    a = harness.variable('argument', 1.0, regularizer=l2)
    with tf.variable_scope('by', regularizer=l2):
        b = harness.variable('scope', 1.0)
    c = harness.variable('hand', 1.0)
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, l2(c))
    return towers.ModelOutput(no_loss(x, a, b, c))


def in_the_total(x, *, training):
    """The same, and TensorFlow's own helper adds the penalties to the loss."""
    tf.losses.add_loss(beside_the_loss(x, training=training).loss)
    return towers.ModelOutput(tf.losses.get_total_loss())


def own(x, *, training):
    """A model that adds the penalty of whatever is trainable to its loss."""
    v = [harness.variable(name, 1.0) for name in ('argument', 'by/scope', 'hand')]
    return towers.ModelOutput(no_loss(x, *v) + tf.add_n([l2(w) for w in tf.trainable_variables()]))


def plain(x, *, training):
    return towers.ModelOutput(no_loss(x, *[harness.variable(name, 1.0) for name in ('argument', 'by/scope', 'hand')]))


@pytest.mark.parametrize(
    ('model', 'settings', 'inside'),
    [(beside_the_loss, {}, 0), (in_the_total, {}, 3), (own, {}, 3), (plain, {'l2': 0.1}, 0)],
    ids=['beside', 'in_total', 'own', 'flag'],
)
@harness.each_case
def test_a_penalty_counts_once(strategy, n, model, settings, inside):
    data = harness.numbers(1, 2, 3, 4, 5)  # unequal shares
    [report], variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=5, **settings))
    for name in ('argument', 'by/scope', 'hand'):
        np.testing.assert_allclose(variables[name], 0.9, rtol=FP32_SAME_ORDER, err_msg=name)
    np.testing.assert_allclose(report['loss'], 0.05 * inside, atol=FP32_SAME_ORDER)
    np.testing.assert_allclose(report['penalty'], 0.05 * (3 - inside), atol=FP32_SAME_ORDER)
    np.testing.assert_allclose(report['total_loss'], 0.15, rtol=FP32_SAME_ORDER)


@pytest.mark.parametrize('inside', [False, True])
@harness.each_case
def test_one_penalty_and_one_slope_a_variable_whatever_the_number_of_towers(strategy, n, inside):
    made = []

    def square(v):
        made.append(v)
        return 0.05 * tf.square(tf.identity(v), name='square_of_penalty')

    def squared(x, *, training):
        w = harness.variable('w', 1.0, regularizer=square)
        loss = no_loss(x, w)
        return towers.ModelOutput(loss + tf.losses.get_regularization_loss() if inside else loss)

    settings = harness.config(strategy, n, global_batch_size=4)
    with harness.started(squared, harness.numbers(1, 2, 3, 4), settings) as run:
        run.steps(1)
        np.testing.assert_allclose(run.variables()['w'], 0.9, rtol=FP32_SAME_ORDER)
        slopes = [op for op in run.program.graph.get_operations() if 'square_of_penalty_grad' in op.name and op.name.endswith('Mul_1')]
    assert len(made) == 1 and len(slopes) == 1


@harness.each_case
def test_a_penalty_beside_a_sparse_gradient_and_a_scaled_one_in_the_loss(strategy, n):
    """loss = mean of looked-up rows + 3 * penalty^2: the penalty counts by its slope in the loss, here 3 * 2 * penalty."""

    def model(ids, *, training):
        table = harness.variable('table', np.ones([3, 1]), regularizer=l2)
        found = tf.nn.embedding_lookup(table, ids)
        return towers.ModelOutput(tf.reduce_mean(found) + 3 * tf.square(tf.losses.get_regularization_loss()))

    data = harness.rows(np.array([0, 0, 1, 2, 2]))
    _, variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=5))
    penalty = 0.1 * 0.5 * 3
    expected = 1 - (np.array([0.4, 0.2, 0.4]) + 3 * 2 * penalty * 0.1)
    np.testing.assert_allclose(variables['table'][:, 0], expected, rtol=FP32_SAME_ORDER)


@harness.each_case
def test_a_penalty_on_activations_is_part_of_the_data_loss(strategy, n):
    def model(x, *, training):
        h = harness.variable('w', 1.0) * x
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 0.1 * tf.reduce_mean(h))
        return towers.ModelOutput(tf.reduce_mean(0 * h))

    data = harness.numbers(1, 2, 3, 4, 5)
    [report], variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=5))
    np.testing.assert_allclose([variables['w'], report['loss'], report['penalty']], [0.7, 0.3, 0], rtol=FP32_SAME_ORDER)


@harness.each_case
def test_weight_decay_is_decoupled_and_once(strategy, n):
    settings = harness.config(strategy, n, global_batch_size=4, learning_rate=0.5, weight_decay=0.2)
    [report], variables = harness.train(plain, harness.numbers(1, 2, 3, 4), settings)
    np.testing.assert_allclose(variables['hand'], 0.9, rtol=FP32_SAME_ORDER)
    assert report['penalty'] == 0
