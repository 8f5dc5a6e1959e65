"""Predicted against measured bytes, on models of the zoo; and what the simulation imitates, alone."""

import functools
import json

import harness
import pytest
import tensorflow.compat.v1 as tf

import models
from models import data
from towers.jobs import program
from towers.planner import measured, plan, shown, simulated

WITHIN = 0.2


@functools.cache
def zoo(name):
    return data.load('synthetic', shape=(16, 16, 3)).train if name == 'resnet20' else data.load('digits').train


def made(name, n, batch, **changes):
    settings = {'optimizer': 'momentum', 'learning_rate': 0.1, 'batch_size': batch, **changes}
    return program.make(models.build(name), zoo(name), harness.config(n=n, **settings))


def parts(found, names):
    return {name: (need.parameters, need.slots, need.state) for name, need in found.devices.items() if name in names}


@pytest.mark.parametrize(
    ('name', 'n', 'batch', 'changes'),
    [
        ('mlp', 1, 16, {}),
        ('mlp', 4, 64, {}),
        ('lenet', 2, 16, {'optimizer': 'adam'}),
        ('lenet', 2, 64, {'strategy': 'mirrored'}),
        ('lenet', 4, 16, {'nan_policy': 'ignore'}),
        ('resnet20', 1, 16, {}),
        ('resnet20', 2, 32, {}),
    ],
)
def test_what_is_predicted_is_what_is_measured(name, n, batch, changes):
    program_ = made(name, n, batch, **changes)
    predicted, real = plan.predict(program_, examples=n * batch), plan.measure(program_, examples=n * batch, steps=8)
    towers_ = [tower.devices[0] for tower in program_.placement.towers]
    highest = max(real.devices[tower].activations for tower in towers_)
    assert predicted.devices[towers_[0]].activations == pytest.approx(highest, rel=WITHIN)
    totals = [sum(need.total - need.activations for need in found.devices.values()) + n * highest for found in (predicted, real)]
    assert totals[0] == totals[1]
    assert predicted.transfers.keys() == real.transfers.keys()
    for pair, count in real.transfers.items():
        assert predicted.transfers[pair] == pytest.approx(count, abs=64)  # the runtime folds a scalar or two


def variables_of(made_):
    with tf.Session(graph=made_.graph, config=made_.proto) as session:
        session.run(made_.init)
        with made_.graph.as_default():
            return {v.op.name: (v.device, session.run(v).nbytes) for v in tf.global_variables() if v.dtype.base_dtype != tf.string}


@pytest.mark.parametrize(('optimizer', 'slots'), [('sgd', 0), ('momentum', 1), ('adam', 2)])
@pytest.mark.parametrize('strategy', harness.STRATEGIES)
def test_variables_are_counted_where_they_are(optimizer, slots, strategy):
    program_ = made('mlp', 2, 4, optimizer=optimizer, strategy=strategy)
    found = plan.predict(program_, examples=8)
    sizes = variables_of(program_)
    trained = sum(sizes[v.op.name][1] for v in program_.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES) if v.op.name in sizes)
    holders = ['/cpu:0'] if strategy == 'parameter_server' else ['/cpu:1', '/cpu:2']
    for name, need in found.devices.items():
        wanted = (trained, slots * trained) if name in holders else (0, 0)
        assert (need.parameters, need.slots) == wanted, name


def simulate(*tensors, batch=1):
    return simulated.Simulation([tensor.op for tensor in tensors], batch=lambda device: batch).run()


@pytest.fixture
def graph():
    with tf.Graph().as_default() as made_:
        yield made_


def test_a_tensor_is_freed_after_its_last_reader(graph):
    a = tf.random_uniform([100])
    b = tf.concat([a, a], 0)  # 800 bytes beside the 400 of a
    c = tf.concat([b, b], 0)  # 1600 beside the 800 of b
    assert simulate(c)['/cpu:0'].bytes == 2400


def test_element_wise_operations_write_over_an_input_that_nobody_else_reads(graph):
    a = tf.random_uniform([100])
    alone = tf.nn.relu(tf.exp(a))
    assert simulate(alone)['/cpu:0'].bytes <= 800
    kept = tf.concat([a, tf.exp(a)], 0)
    assert simulate(kept)['/cpu:0'].bytes >= 1600


def test_views_take_nothing(graph):
    a = tf.random_uniform([100])
    view = tf.reshape(tf.identity(a), [10, 10])[2:4]
    assert simulate(view)['/cpu:0'].bytes <= 408 + 400


def test_an_unknown_batch_has_the_rows_it_is_given(graph):
    x = tf.placeholder(tf.float32, [None, 5])
    assert simulate(tf.concat([x, x], 1), batch=7)['/cpu:0'].bytes == 7 * (20 + 40)


def test_each_gpu_gets_a_copy_of_its_own(graph):
    """Without a GPU: only the graph is looked at."""
    with tf.device('/cpu:0'):
        a = tf.concat([tf.random_uniform([100])] * 2, 0)
    readers = []
    for number in range(2):
        with tf.device(f'/gpu:{number}'):
            readers += [tf.concat([a, a], 0), tf.concat([a, a, a], 0)]
    peaks = simulate(*readers)
    assert peaks['/gpu:0'].bytes == peaks['/gpu:1'].bytes >= 800 + 1600
    assert peaks['/cpu:0'].bytes == 1200


def test_the_peak_of_a_record_is_when_most_is_held():
    metadata = tf.RunMetadata()
    node = metadata.step_stats.dev_stats.add(device='/job:localhost/replica:0/task:0/device:CPU:1').node_stats.add(node_name='a')
    for micros, size in ((1, 100), (5, 50), (5, -100), (9, 70), (12, -50)):
        node.memory.add().allocation_records.add(alloc_micros=micros, alloc_bytes=size)
    peak = measured.peaks(metadata)['/cpu:1']
    assert (peak.bytes, peak.tensors) == (120, [('a', 120)])


@pytest.mark.parametrize(
    ('count', 'text'), [(0, '0 B'), (1023, '1023 B'), (2048, '2 KiB'), (1.5 * 2**20, '1.5 MiB'), (3 * 2**50, '3072 TiB')]
)
def test_bytes_have_the_unit_that_suits(count, text):
    assert shown.size(count) == text


def test_the_plan_is_shown_for_people_and_programs():
    program_ = made('mlp', 2, 4)
    predicted = plan.predict(program_, examples=8)
    text = '\n'.join(shown.lines(predicted, predicted))
    assert 'device  parameters' in text and ' 1.00' in text and 'from /cpu:0 to /cpu:1 (measured' in text
    for size, is_said in ((2**16, False), (2**16 - 1, True)):
        lines = shown.lines(plan.Plan({'/cpu:0': plan.Need(parameters=size)}, {}, 0, {}))
        assert any('less than 64 KiB is not predicted well' in line for line in lines) == is_said
    found = json.loads(shown.as_json(predicted))['predicted']
    assert found['devices']['/cpu:0']['parameters'] == predicted.devices['/cpu:0'].parameters
    assert set(found) == {'devices', 'transfers', 'batch', 'biggest'}
