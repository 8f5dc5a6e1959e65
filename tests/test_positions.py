"""The input's position: refused by name where it can't be saved, left out on request."""

import logging

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import config
from towers.graph import devices
from towers.input import inputs, positions


def rows():
    return tf.data.Dataset.range(10)


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(range(10)), tf.int64, [])


def noisy(x):
    return tf.cast(x, tf.float32) + tf.random.uniform([])


def table():
    values = tf.lookup.KeyValueTensorInitializer(tf.range(9, dtype=tf.int64), tf.range(1, 10, dtype=tf.int64))
    found = tf.lookup.StaticHashTable(values, -1)
    return rows().map(found.lookup)


REFUSED = {
    'generator': (generated, 'PyFunc in the FlatMapDataset', 'A generator or Python function can only start anew'),
    'python': (lambda: rows().map(lambda x: tf.ensure_shape(tf.py_func(abs, [x], tf.int64), [])), 'PyFunc in the MapDataset', 'make it of'),
    'random': (
        lambda: rows().map(noisy),
        'RandomUniform in the MapDataset',
        r'stateless_uniform, or .* towers\.random_uniform',
    ),
    'inside': (lambda: rows().flat_map(lambda _: rows().map(noisy)), 'RandomUniform in the FlatMapDataset', 'Draw with'),
    'checked': (lambda: rows().map(lambda x: tf.debugging.check_numerics(x / 2, 'x')), 'CheckNumerics in the MapDataset', 'Leave it out'),
}
FINE = {
    'in order': rows,
    'shuffle without a seed': lambda: rows().shuffle(4),
    'asserted': lambda: rows().map(lambda x: tf.debugging.Assert(x >= 0, [x]) and x),
    'stateless': lambda: rows().map(lambda x: tf.random.stateless_uniform([], [x, 1])),
    'table': table,
    'cache': lambda: rows().cache(),
}


def required(make, **settings):
    """The input of a dataset, with its position required in a session."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        place = devices.place(config.DeviceConfig(num_gpus=1, device='cpu'))
        source = inputs.training(inputs.open_source(make, host='/cpu:0'), config.InputConfig(batch_size=4, **settings), place.towers)
        options = {f'{name[:5]}_op_parallelism_threads': count for name, count in harness.THREADS.items()}
        with tf.Session(config=tf.ConfigProto(**options)) as session:
            session.run([tf.tables_initializer(), source.initializer])
            positions.require(session, source)
            return source


@pytest.mark.parametrize('pipeline', ['global', 'sharded'])
@pytest.mark.parametrize('kind', REFUSED)
def test_data_without_a_position_is_refused_by_name(kind, pipeline):
    make, place, remedy = REFUSED[kind]
    message = rf"The input's position can't be saved: {place} made at {__file__}:\d+ has a state of its own\. .*{remedy}.*--noexact_resume"
    with pytest.raises(ValueError, match=message):
        required(make, input_pipeline=pipeline)


@pytest.mark.parametrize('kind', FINE)
def test_data_with_a_position_is_taken(kind):
    assert required(FINE[kind]).position is not None


def test_on_request_no_position_is_saved(caplog):
    with caplog.at_level(logging.INFO, logger='absl'):
        source = required(generated, exact_resume=False)
    assert (source.position, source.restore_position) == (None, None)
    assert 'Exact resume is off: a run that goes on from a checkpoint starts its epoch anew.' in caplog.text


def test_a_run_of_generated_data_needs_the_flag_and_says_that_its_epoch_restarts(tmp_path, caplog):
    seen = []

    def examples():
        for number in range(8):
            seen.append(number)
            yield np.float32(number)

    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('w', []))

    def train(steps, **changes):
        settings = harness.config(model_dir=str(tmp_path), global_batch_size=2, train_steps=steps, **changes)
        return towers.train(model, lambda: tf.data.Dataset.from_generator(examples, tf.float32, []), settings)

    with pytest.raises(ValueError, match=r'PyFunc in the FlatMapDataset .*--noexact_resume'):
        train(3)
    assert train(3, exact_resume=False).step == 3
    seen.clear()
    with caplog.at_level(logging.INFO, logger='absl'):
        assert train(5, exact_resume=False).steps_run == 2
    assert 'The input starts at the beginning of an epoch' in caplog.text
    assert seen[:4] == [0, 1, 2, 3]


def test_a_table_of_the_dataset_is_ready_before_the_first_step():
    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(tf.cast(batch, tf.float32)) * harness.variable('w', 1.0))

    reports, _ = harness.train(model, table, harness.config(global_batch_size=4))
    assert reports[0]['loss'] == 2.5
