"""The helpers that draw by example: their numbers, shapes and errors; that they are equal for every N is in conformance."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import randomness

PROTO = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def draws(seed=1, step=0, first=0):
    return randomness.Draws(seed, tf.constant(step, tf.int64), tf.constant(first, tf.int64))


def run(fetches):
    with tf.Session(config=PROTO) as session:
        return session.run(fetches)


def drawn(make, **settings):
    with randomness.drawing(draws(**settings)):
        return run(make())


def test_fold_is_the_same_in_every_process_and_tells_its_parts_apart():
    assert randomness.fold(1, 'tower', 0) == 1614717248
    found = {randomness.fold(*parts) for parts in [(1,), (2,), (1, 1), (1, 'a'), (1, 'b'), (1, 'a', 'b'), (1, 'ab'), (1, '1')]}
    assert len(found) == 8 and all(0 <= value < 2**31 for value in found)


@pytest.mark.parametrize('shape', [(), (1,), (3,), (4,), (5, 2)])
def test_an_examples_numbers_depend_on_its_place_in_the_global_batch(shape):
    whole = drawn(lambda: towers.random_uniform(7, shape))
    assert whole.shape == (7, *shape) and whole.dtype == np.float32
    assert len(np.unique(whole)) == whole.size
    for first in (0, 2, 6):
        part = drawn(lambda first=first: towers.random_uniform(tf.constant(7 - first), shape), first=first)
        np.testing.assert_array_equal(part, whole[first:])


def test_seed_step_and_call_each_give_other_numbers():
    base = drawn(lambda: towers.random_uniform(5, [3]))
    others = [
        drawn(lambda: towers.random_uniform(5, [3]), seed=2),
        drawn(lambda: towers.random_uniform(5, [3]), step=1),
        drawn(lambda: [towers.random_uniform(5, [3]), towers.random_uniform(5, [3])])[1],
        drawn(lambda: towers.random_uniform(5, [3]), step=2**40),
    ]
    np.testing.assert_array_equal(drawn(lambda: towers.random_uniform(5, [3])), base)
    for other in others:
        assert not np.any(other == base)


def test_numbers_are_uniform_in_their_bounds():
    found = drawn(lambda: towers.random_uniform(4000, [5], minval=-2.0, maxval=6.0))
    assert -2 <= found.min() < -1.99 and 5.99 < found.max() < 6
    np.testing.assert_allclose([found.mean(), found.std()], [2, 8 / np.sqrt(12)], atol=0.05)  # 20000 draws: 3 sigma of the mean
    rows = np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]
    assert abs(rows) < 0.03


@pytest.mark.parametrize('dtype', [tf.float32, tf.float16, tf.float64])
def test_dropout_keeps_its_share_and_the_mean(dtype):
    x = np.full([500, 4, 5], 3.0)
    found = drawn(lambda: towers.dropout(tf.constant(x, dtype), 0.25, training=True))
    assert found.dtype == dtype.as_numpy_dtype
    np.testing.assert_allclose(np.unique(found), [0, 4], rtol=1e-3)
    np.testing.assert_allclose(np.mean(found > 0), 0.75, atol=0.015)


@pytest.mark.parametrize(('rate', 'training'), [(0.0, True), (0.5, False)])
def test_no_dropout_is_the_tensor_itself(rate, training):
    x = tf.ones([2, 3])
    assert towers.dropout(x, rate, training=training) is x


def test_gradients_pass_what_is_kept():
    with randomness.drawing(draws()):
        x = tf.ones([4, 3])
        y = towers.dropout(x, 0.5, training=True)
        kept, slope = run([y, tf.gradients(y, x)[0]])
    np.testing.assert_array_equal(kept, slope)


@pytest.mark.parametrize('rate', [-0.1, 1.0, 50])
def test_a_rate_outside_its_range_is_an_error(rate):
    with pytest.raises(ValueError, match=rf'Dropout rate must be in \[0, 1\), got {rate}'):
        towers.dropout(tf.ones([2, 3]), rate, training=True)


def test_open_dimensions_are_an_error_that_says_what_to_do():
    with (
        randomness.drawing(draws()),
        pytest.raises(ValueError, match=r'needs static dimensions after the first, got .*; set them with tf.ensure_shape'),
    ):
        towers.dropout(tf.placeholder(tf.float32, [None, None]), 0.5, training=True)


def test_draws_outside_a_model_in_training_are_an_error():
    message = 'Draws by example need the step and the batch: call towers.dropout and random_uniform in a model in training'
    with pytest.raises(ValueError, match=message):
        towers.random_uniform(3)
    with pytest.raises(RuntimeError), randomness.drawing(draws()):
        raise RuntimeError
    with pytest.raises(ValueError, match=message):
        towers.random_uniform(3)
