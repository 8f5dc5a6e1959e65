"""The end of the data: only that of the input's own iterators, though one that a failing run cancelled may claim to have ended."""

import harness
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import devices
from towers.input import inputs
from towers.run import ending

EXAMPLES = 6


def slow():
    """Numbers of an unknown count that are still being made when they are asked for."""
    numbers = tf.data.Dataset.range(EXAMPLES).filter(lambda number: number >= 0)
    big = [300, 300]
    return numbers.map(lambda number: number + tf.cast(0.0 * tf.reduce_sum(tf.matmul(tf.ones(big), tf.ones(big))), tf.int64))


def made(pipeline, n):
    """The input of n towers, and their placement, in the current graph."""
    settings = harness.config(n=n, batch_size=1, train_epochs=1, input_pipeline=pipeline or 'global')
    placement = devices.place(settings)
    source = inputs.open_source(slow, host=placement.towers[0].host, proto=tf.ConfigProto(device_count={'CPU': n + 1}))
    read = inputs.training(source, settings, placement.towers) if pipeline else inputs.evaluation(source, 1, placement.towers)
    return read, placement


def passes(count, pipeline, n, others):
    """For each pass over the data: its steps, whether its end was the data's, and whether an iterator says that it has ended."""
    with tf.Graph().as_default() as graph:
        read, placement = made(pipeline, n)
        made_of, initializers = [], [read.initializer]
        for batch, tower in zip(read.batches, placement.towers, strict=True):
            with tf.device(tower.devices[0]):
                made_of.append(tf.reduce_sum(batch.features))
                if others:
                    other = tf.data.make_initializable_iterator(tf.data.Dataset.range(others))
                    initializers.append(other.initializer)
                    made_of[-1] += other.get_next()
        config = tf.ConfigProto(device_count={'CPU': n + 1}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
        with tf.Session(graph=graph, config=config) as session:
            step = session.make_callable(made_of)
            for _ in range(count):
                session.run(initializers)
                steps = 0
                with pytest.raises(tf.errors.OutOfRangeError) as caught:
                    while True:
                        step()
                        steps += 1
                yield steps, ending.is_end(caught.value, session, read.ended), any(says(session, each) for each in read.ended)


def says(session, ended):
    try:
        return bool(session.run(ended))
    except tf.errors.CancelledError:
        return False


@pytest.mark.parametrize(('pipeline', 'n'), [(None, 1), (None, 2), ('sharded', 2)])
def test_another_iterator_that_ends_is_no_end_of_the_data(pipeline, n):
    claims = 0
    for steps, is_end, claimed in passes(500, pipeline, n, others=1):
        assert (steps, is_end) == (1, False)
        claims += claimed
        if claims == 3:
            return
    pytest.fail('no iterator claimed to have ended, so this test shows nothing')


@pytest.mark.parametrize(('pipeline', 'n'), [(None, 1), (None, 2), ('global', 2), ('sharded', 2)])
def test_the_own_end_is_one_though_it_cancels_the_other_towers_inputs(pipeline, n):
    assert {(steps, is_end) for steps, is_end, _ in passes(30, pipeline, n, others=0)} == {(EXAMPLES // n, True)}
