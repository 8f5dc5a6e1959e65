"""Law 14: what is random depends on the seed and on names and examples, not on how many towers there are."""

import functools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER

import towers

INITIALIZERS = {
    'default': None,
    'uniform': tf.random_uniform_initializer(-1, 1),
    'normal': tf.random_normal_initializer(),
    'truncated': tf.truncated_normal_initializer(),
    'scaling': tf.variance_scaling_initializer(2.0, 'fan_in', 'truncated_normal'),
    'unit_scaling': tf.uniform_unit_scaling_initializer(),
    'glorot_uniform': tf.glorot_uniform_initializer(),
    'glorot_normal': tf.glorot_normal_initializer(),
    'he': tf.initializers.he_normal(),
    'lecun': tf.initializers.lecun_uniform(),
    'orthogonal': tf.orthogonal_initializer(),
    'of_class': tf.random_normal_initializer,
    'lambda': lambda shape, dtype, partition_info=None: tf.random.normal(shape, dtype=dtype),
    'two_draws': lambda shape, dtype: tf.random.normal(shape, dtype=dtype) + tf.random.uniform(shape, dtype=dtype),
    'twin': tf.random_normal_initializer(),  # as 'normal', but for the name
    'seeded': tf.random_normal_initializer(seed=7),
}


def weights(extra_draws, seed=1):
    """A model with every kind of initializer, and with other random operations before each variable."""

    def model(x, *, training):
        total = 0.0
        with tf.variable_scope('net', initializer=tf.random_normal_initializer()):
            for name, initializer in INITIALIZERS.items():
                for _ in range(extra_draws):
                    total += 0 * tf.random.uniform([])
                total += tf.reduce_sum(tf.get_variable(name, [4, 4], initializer=initializer))
            whole = {
                'function': lambda: tf.random.normal([3]),
                'given': np.ones([3], np.float32),
                'tensor': tf.random_normal([3], stddev=tf.constant(0.5)) + tf.random_uniform([3]),
                'twin_tensor': tf.random_normal([3], stddev=tf.constant(0.5)) + tf.random_uniform([3]),
            }
            for name, value in whole.items():
                total += tf.reduce_sum(tf.get_variable(name, initializer=value))
        return towers.ModelOutput(total * tf.reduce_mean(x))

    return model


@functools.cache
def initial(strategy, n, extra_draws=0, seed=1):
    settings = harness.config(strategy, n, global_batch_size=4, seed=seed)
    with harness.started(weights(extra_draws), harness.numbers(1, 2, 3, 4), settings) as run:
        return {name: value for name, value in run.variables().items() if name.startswith('net/')}


@pytest.mark.parametrize(
    ('strategy', 'n', 'extra_draws'), [*[(*case, 0) for case in harness.CASES], ('parameter_server', 1, 2), ('mirrored', 2, 1)]
)
def test_initial_weights_depend_on_seed_and_name_alone(strategy, n, extra_draws):
    expected = initial('parameter_server', 1)
    found = initial(strategy, n, extra_draws)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_initial_weights_differ_with_the_seed_and_the_name():
    one, other = initial('parameter_server', 1), initial('parameter_server', 1, seed=2)
    same = {name for name in one if np.array_equal(one[name], other[name])}
    assert same == {'net/given'}
    assert all(len(np.unique(value)) == value.size for name, value in one.items() if name not in same)
    for name, twin in (('net/normal', 'net/twin'), ('net/tensor', 'net/twin_tensor')):
        assert not np.array_equal(one[name], one[twin])


def test_an_initializer_with_a_seed_of_its_own_keeps_it():
    def model(x, *, training):
        made = tf.random_normal_initializer(seed=7)
        a, b = (tf.get_variable(name, [4], initializer=made) for name in 'ab')
        return towers.ModelOutput(tf.reduce_mean(x) * tf.reduce_sum(a + b))

    with harness.started(model, harness.numbers(1, 2), harness.config(n=2, global_batch_size=2)) as run:
        found = run.variables()
    np.testing.assert_array_equal(found['a'], found['b'])


def dropping(x, *, training):
    """Two plain dropouts, one with a seed of its own, and uniform numbers; a metric carries them out."""
    w = harness.variable('w', 1.0)
    kept = [tf.nn.dropout(tf.ones([64]), rate=0.5, seed=seed) for seed in (3, None)]
    drawn = tf.random_uniform([64], seed=3)
    return towers.ModelOutput(tf.reduce_mean(w * x), metrics={'drawn': towers.Metric((tf.stack([*kept, drawn])[None],), lambda x: x)})


@harness.each_case
def test_a_models_own_draws_differ_between_towers_and_steps_and_repeat_with_the_run(strategy, n):
    def masks(seed):
        made = []

        def model(x, *, training):
            output = dropping(x, training=training)
            made.append(output.metrics['drawn'].sums[0])
            return output

        with harness.started(model, harness.numbers(*range(8)), harness.config(strategy, n, global_batch_size=4, seed=seed)) as run:
            return np.array([[value[0] for value in run.session.run(made)] for _ in range(2)])  # [step, tower, draw, 64]

    first, again, other = masks(1), masks(1), masks(2)
    np.testing.assert_array_equal(first, again)
    streams = first.reshape(2 * n, 3, 64).tolist() + other.reshape(2 * n, 3, 64).tolist()
    for draw in range(3):
        assert len({tuple(stream[draw]) for stream in streams}) == len(streams)


def helpers(x, *, training):
    """The stateless helpers: what each example drew travels in a metric, summed at its own place."""
    w = harness.variable('w', 1.0)
    place = tf.one_hot(tf.cast(x, tf.int32), 8)  # [B, 8]: examples are numbered 0..7
    drawn = [
        towers.random_uniform(tf.shape(x)[0], [3]),
        towers.random_uniform(tf.shape(x)[0], [3], minval=2.0, maxval=4.0),
        towers.dropout(tf.ones([tf.shape(x)[0], 3]), 0.5, training=True),
    ]
    sums = tuple(tf.matmul(place, d, transpose_a=True) for d in drawn)
    noisy = w * (1 + tf.reduce_mean(drawn[0], 1)) * x
    return towers.ModelOutput(tf.reduce_mean(noisy), metrics={'drawn': towers.Metric(sums, lambda *x: x)})


@functools.cache
def drawn_by_helpers(strategy, n, examples, pipeline):
    settings = harness.config(strategy, n, global_batch_size=8, input_pipeline=pipeline, learning_rate=0.001)
    with harness.started(helpers, harness.numbers(*range(examples)), settings) as run:
        fetches = [run.program.step.metrics['drawn'].sums, run.program.step.report['loss'], run.program.step.ops]
        results = [run.session.run(fetches)[:2] for _ in range(2)]
    return np.array([sums for sums, _ in results]), np.array([loss for _, loss in results])


@pytest.mark.parametrize(('examples', 'pipeline'), [(8, 'global'), (3, 'sharded')])
@harness.each_case
def test_helpers_draw_the_same_for_every_number_of_towers(strategy, n, examples, pipeline):
    drawn, losses = drawn_by_helpers(strategy, n, examples, pipeline)
    expected, expected_losses = drawn_by_helpers('parameter_server', 1, examples, 'global')
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=FP32_SAME_ORDER)


def test_helpers_draw_anew_for_each_example_step_and_call():
    drawn, _ = drawn_by_helpers('parameter_server', 1, 8, 'global')  # [step, call, example, 3]
    uniform, scaled, dropped = drawn[:, 0], drawn[:, 1], drawn[:, 2]
    assert len(np.unique(uniform)) == uniform.size and 0 <= uniform.min() and uniform.max() < 1
    assert 2 <= scaled.min() and scaled.max() < 4 and not np.allclose(scaled, 2 + 2 * uniform)
    assert set(np.unique(dropped)) == {0.0, 2.0} and 10 < np.sum(dropped > 0) < 38
