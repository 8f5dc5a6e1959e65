"""Initial values made of random operations: what is made again, with which draws."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import reseeding

PROTO = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def run(fetches):
    with tf.Session(config=PROTO) as session:
        return session.run(fetches)


def test_draws_depend_on_the_seed_and_their_order_alone():
    def make(earlier):
        tf.random_uniform([earlier])
        return tf.random_uniform([4]), tf.random_normal([4], mean=2.0) * tf.random_uniform([4], 1, 5)

    found = []
    for earlier, seed in ((1, 7), (2, 7), (2, 8)):
        with tf.Graph().as_default():
            tf.set_random_seed(earlier)
            found.append(run([reseeding.reseeded(value, seed) for value in make(earlier)]))
    for index in range(2):
        np.testing.assert_array_equal(found[0][index], found[1][index])
        assert not np.any(found[0][index] == found[2][index])
    assert len(np.unique(found[0][0])) == 4


def test_what_draws_nothing_is_left_as_it_is(graph):
    fixed = tf.constant([1.0, 2.0]) * tf.placeholder_with_default(3.0, [])
    before = len(graph.get_operations())
    assert reseeding.reseeded(fixed, 7) is fixed and len(graph.get_operations()) == before


def test_only_what_depends_on_a_draw_is_made_again(graph):
    scale = tf.placeholder_with_default([2.0, 3.0], [2], name='scale')
    drawn = tf.random_uniform([2])
    value = tf.split(tf.concat([drawn * 0 + scale, drawn * 0 + scale], 0, name='both'), 2)[1]
    before = len(graph.get_operations())
    made = reseeding.reseeded(value, 7)
    types = [op.type for op in graph.get_operations()[before:]]
    assert 'PlaceholderWithDefault' not in types and types.count('RandomUniform') == 1 and types.count('Split') == 1
    assert run(made).tolist() == [2, 3] and made is not value


def test_a_draw_in_two_places_is_one_draw():
    drawn = tf.random_normal([5])
    np.testing.assert_array_equal(run(reseeding.reseeded(drawn - drawn, 7)), np.zeros(5))
