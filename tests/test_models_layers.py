"""Layers and losses of the zoo against numpy."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import layers, losses

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        yield graph


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _run(fetches, *, after=()):
    """Values of `fetches` and of all variables by name, the latter once `after` has run."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        values = session.run(fetches)
        session.run(after)
        return values, {v.op.name: session.run(v) for v in tf.global_variables()}


def test_dense_is_a_matrix_product_and_a_bias():
    x = _normal(5, 3)
    with tf.variable_scope('outer'):
        y = layers.dense(tf.constant(x), 'fc', units=4)
    value, variables = _run(y, after=tf.trainable_variables()[1].assign([1.0, 2.0, 3.0, 4.0]).op)
    assert sorted(variables) == ['outer/fc/bias', 'outer/fc/kernel'] and y.shape.as_list() == [5, 4]
    np.testing.assert_allclose(value, x @ variables['outer/fc/kernel'], rtol=TOLERANCE, atol=TOLERANCE)
    tf.get_variable_scope().reuse_variables()
    with tf.variable_scope('outer'):
        again = layers.dense(tf.constant(x), 'fc', units=4)
    biased, _ = _run(again - tf.matmul(tf.constant(x), tf.trainable_variables()[0]))
    np.testing.assert_allclose(biased, np.zeros([5, 4]), atol=TOLERANCE)


def _convolve(x, kernel, stride):
    """'SAME' convolution by the definition, NHWC."""
    (_, height, width, _), (kh, kw, _, _) = x.shape, kernel.shape
    rows, columns = -(-height // stride), -(-width // stride)
    down, right = max((rows - 1) * stride + kh - height, 0), max((columns - 1) * stride + kw - width, 0)
    x = np.pad(x, [(0, 0), (down // 2, down - down // 2), (right // 2, right - right // 2), (0, 0)])
    out = np.zeros([len(x), rows, columns, kernel.shape[-1]])
    for r in range(rows):
        for c in range(columns):
            patch = x[:, r * stride : r * stride + kh, c * stride : c * stride + kw]
            out[:, r, c] = np.tensordot(patch, kernel, axes=3)
    return out


@pytest.mark.parametrize('size', [(8, 8), (5, 7)])
@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('bias', [True, False])
def test_conv2d_is_a_same_convolution(size, stride, bias):
    x = _normal(2, *size, 3)
    y = layers.conv2d(tf.constant(x), 'conv', kernel=(3, 5, 4), stride=stride, bias=bias)
    value, variables = _run(y)
    assert sorted(variables) == (['conv/bias', 'conv/kernel'] if bias else ['conv/kernel'])
    np.testing.assert_allclose(value, _convolve(x, variables['conv/kernel'], stride), rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize('shape', [(6, 3), (4, 5, 3), (4, 5, 6, 3), (2, 2, 2, 2, 3)])
@pytest.mark.parametrize('momentum', [0.9, 0.5])
def test_batch_norm_in_training(graph, shape, momentum):
    x = 3 * _normal(*shape) + 2
    y = layers.batch_norm(tf.constant(x), 'norm', training=True, momentum=momentum)
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    value, variables = _run(y, after=updates)
    axes = tuple(range(len(shape) - 1))
    np.testing.assert_allclose(value, (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-5), rtol=1e-4, atol=1e-4)
    variance = x.var(axes, ddof=1 if len(shape) == 4 else 0)
    np.testing.assert_allclose(variables['norm/moving_mean'], (1 - momentum) * x.mean(axes), rtol=1e-4)
    np.testing.assert_allclose(variables['norm/moving_variance'], momentum + (1 - momentum) * variance, rtol=1e-4)
    assert len(updates) == 2 and {op.type for op in updates} == {'AssignSubVariableOp'}
    assert [v.op.name for v in tf.trainable_variables()] == ['norm/gamma', 'norm/beta']


@pytest.mark.parametrize('shape', [(6, 3), (4, 5, 6, 3)])
def test_batch_norm_in_evaluation_takes_the_moving_values(shape):
    x = _normal(*shape)
    y = layers.batch_norm(tf.constant(x), 'norm', training=False)
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    new = {'gamma': [1.0, 2.0, 3.0], 'beta': [0.0, 1.0, 2.0], 'moving_mean': [1.0, 0.0, -1.0], 'moving_variance': [4.0, 1.0, 9.0]}
    with tf.Session() as session:
        session.run([v.assign(new[v.op.name.removeprefix('norm/')]).op for v in tf.global_variables()])
        value = session.run(y)
    expected = (x - new['moving_mean']) / np.sqrt(np.array(new['moving_variance']) + 1e-5) * new['gamma'] + new['beta']
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize('shape', [(8, 3), (4, 5, 6, 3)])
@pytest.mark.parametrize('training', [True, False])
def test_batch_norm_of_half_precision_keeps_fp32_variables(shape, training):
    x = tf.cast(tf.constant(_normal(*shape)), tf.bfloat16)
    y = layers.batch_norm(x, 'norm', training=training)
    value, _ = _run(tf.cast(y, tf.float32), after=tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    assert y.dtype == tf.bfloat16 and {v.dtype.base_dtype for v in tf.global_variables()} == {tf.float32}
    assert np.isfinite(value).all()


@pytest.mark.parametrize('shape', [(8, 3), (4, 5, 6, 3)])
def test_moving_values_are_no_part_of_the_gradient(shape):
    y = layers.batch_norm(tf.constant(_normal(*shape)), 'norm', training=True)
    gradients = dict(zip((v.op.name for v in tf.global_variables()), tf.gradients(y**2, tf.global_variables()), strict=True))
    assert {name for name, g in gradients.items() if g is None} == {'norm/moving_mean', 'norm/moving_variance'}


def test_max_pool_rounds_up_and_takes_the_largest():
    x = np.arange(15, dtype=np.float32).reshape(1, 3, 5, 1)
    value, _ = _run(layers.max_pool(tf.constant(x)))
    np.testing.assert_array_equal(value[0, :, :, 0], [[6, 8, 9], [11, 13, 14]])


def test_global_average_pool_and_flatten():
    x = _normal(2, 3, 4, 5)
    placeholder = tf.placeholder(tf.float32, [None, 3, 4, 5])
    flat = layers.flatten(placeholder)
    assert flat.shape.as_list() == [None, 60]
    with tf.Session() as session:
        mean, row = session.run([layers.global_average_pool(placeholder), flat], {placeholder: x})
    np.testing.assert_allclose(mean, x.mean((1, 2)), rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(row, x.reshape(2, 60))


def test_embedding_reads_rows_and_has_a_sparse_gradient():
    ids = np.array([[1, 1], [0, 3]])
    rows = layers.embedding(tf.constant(ids), 'words', rows=4, units=3)
    (gradient,) = tf.gradients(rows, tf.trainable_variables())
    value, variables = _run(rows)
    np.testing.assert_array_equal(value, variables['words/table'][ids])
    assert isinstance(gradient, tf.IndexedSlices)


@pytest.mark.parametrize('make, variance', [(layers.he_normal, 2 / 400), (layers.glorot_uniform, 2 / 700)])
def test_initialisers_have_their_variance_and_can_be_made_again_with_a_seed(make, variance):
    initializer = make()
    copies = [type(initializer).from_config({**initializer.get_config(), 'seed': 7})([400, 300], tf.float32) for _ in range(2)]
    with tf.Session() as session:
        plain, first, second = session.run([initializer([400, 300], tf.float32), *copies])
    np.testing.assert_allclose([plain.var(), first.var()], variance, rtol=0.03)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize('dtype', [tf.int32, tf.int64])
def test_classification_is_mean_cross_entropy_with_accuracy_and_predictions(dtype):
    logits, labels = _normal(6, 4), np.array([0, 1, 2, 3, 0, 1])
    output = losses.classification(tf.constant(labels, dtype), tf.constant(logits))
    (loss, sums, predictions), _ = _run((output.loss, output.metrics['accuracy'].sums, output.predictions))
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(probability[range(6), labels]).mean(), rtol=TOLERANCE)
    np.testing.assert_allclose(predictions['probability'], probability, rtol=TOLERANCE)
    np.testing.assert_array_equal(predictions['class'], logits.argmax(-1))
    np.testing.assert_array_equal(sums, [(logits.argmax(-1) == labels).sum(), 6])


def test_classification_without_labels_only_predicts():
    output = losses.classification(None, tf.constant(_normal(6, 4)))
    assert output.loss is None and not output.metrics and set(output.predictions) == {'class', 'probability'}
