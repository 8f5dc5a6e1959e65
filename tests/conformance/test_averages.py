"""Moving averages of the variables: they follow each applied update, and no skipped one, for every strategy and number of towers."""

import harness
import numpy as np
import pytest
import runs
import tensorflow.compat.v1 as tf

import towers
from towers.graph import averages

NAME = 'w/ExponentialMovingAverage'


def linear(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))


def expected(decay, gradients):
    w, average = 1.0, None
    for gradient in gradients:
        w -= gradient
        average = w if average is None else decay * average + (1 - decay) * w
    return w, average


@harness.each_case
def test_an_average_follows_the_updates(strategy, n):
    settings = harness.config(strategy, n, global_batch_size=4, ema_decay=0.75)
    _, variables = harness.train(linear, harness.numbers(1, 2, 3, 4, 2, 2, 2, 2, 0, 0, 0, 4), settings, steps=3)
    w, average = expected(0.75, [2.5, 2.0, 1.0])
    np.testing.assert_allclose([variables['w'], variables[NAME]], [w, average], rtol=harness.FP32_SAME_ORDER)


@harness.each_case
def test_a_step_that_is_held_back_leaves_it(strategy, n):
    settings = harness.config(strategy, n, global_batch_size=4, ema_decay=0.5, nan_policy='skip')
    _, variables = harness.train(linear, harness.numbers(1, 1, 1, 1, 1, np.nan, 1, 1, 2, 2, 2, 2), settings, steps=3)
    w, average = expected(0.5, [1.0, 2.0])
    np.testing.assert_allclose([variables['w'], variables[NAME]], [w, average], rtol=harness.FP32_SAME_ORDER)


@harness.each_strategy
def test_there_is_none_unless_asked_for(strategy):
    _, variables = harness.train(linear, harness.numbers(1, 2), harness.config(strategy, 2, global_batch_size=2))
    assert NAME not in variables


def test_half_precision_is_averaged_in_single():
    with tf.Graph().as_default():
        variable = tf.get_variable('h', [3], tf.float16, use_resource=True)
        [average] = averages.make([variable])
    assert (average.dtype.base_dtype, average.op.name, average.trainable) == (tf.float32, averages.name_of(variable), False)


def scored(batch, *, training):
    weight = tf.get_variable('w', [], use_resource=True)
    return towers.ModelOutput(tf.reduce_mean(batch * weight), predictions={'made': batch * weight})


@pytest.mark.parametrize(('use', 'value'), [(False, 2.0), (True, 7.0)])
def test_evaluation_and_predictions_take_the_averages_where_asked(tmp_path, use, value):
    runs.publish(tmp_path, 3, **{'w': np.float32(2), NAME: np.float32(7)})
    settings = runs.config(tmp_path, use_ema=use)
    assert towers.evaluate(scored, harness.numbers(1, 1, 1), settings)['loss'] == value
    [prediction] = towers.predict(scored, harness.numbers(1), settings, examples=[{'example': 3.0}])
    assert prediction['made'] == 3 * value


def test_averages_that_are_not_there_are_missed_by_name(tmp_path):
    runs.publish(tmp_path, 3, w=np.float32(2))
    with pytest.raises(ValueError, match=NAME):
        towers.evaluate(scored, harness.numbers(1), runs.config(tmp_path, use_ema=True))


@pytest.mark.parametrize('decay', [-0.1, 1.0])
def test_a_decay_is_below_one(decay):
    with pytest.raises(ValueError, match=r'--ema_decay must be in \[0, 1\)'):
        harness.config(ema_decay=decay)
