"""Gradients added by the towers among themselves: the numbers of the hub, and what a tower that stays away does."""

import time

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import structs
from towers.graph import strategies
from towers.graph.reduce import collective
from towers.jobs import program

WIDTH = 150  # 150 x 150 floats don't come with the small ones
DATA = np.random.default_rng(1).normal(size=[24, WIDTH]).astype(np.float32)


def net(batch, *, training):
    """Large and small dense gradients, a table's, a moving mean, and one that a tower alone has no use for."""
    kernel = tf.get_variable('kernel', [WIDTH, WIDTH])
    bias, scale = tf.get_variable('bias', [WIDTH]), harness.variable('scale', 1.0)
    rows = tf.nn.embedding_lookup(harness.variable('table', np.ones([7, 2])), tf.cast(tf.abs(batch[:, 0]) * 2, tf.int32))
    moving = harness.variable('moving', 0.0, trainable=False)
    hidden = tf.tanh(batch @ kernel + bias)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, moving.assign_add(0.1 * tf.reduce_mean(hidden)))
    loss = tf.reduce_mean(hidden**2) * scale + 0.01 * tf.reduce_mean(rows**2)
    return towers.ModelOutput(loss, metrics={'hidden': tf.reduce_mean(hidden)})


def trained(strategy, n, **changes):
    settings = {'global_batch_size': 8, 'optimizer': 'momentum', 'learning_rate': 0.1, **changes}
    reports, variables = harness.train(net, harness.rows(DATA), harness.config(strategy, n, **settings), steps=6)
    return [report['total_loss'] for report in reports], variables


@pytest.mark.parametrize(
    'changes', [{}, {'l2': 0.01, 'clip_norm': 0.05, 'gradient_reduction': 'sum', 'weight_decay': 0.01}], ids=['', 'chain']
)
def test_the_towers_own_sum_is_the_hubs(changes):
    losses, variables = trained('collective', 3, **changes)  # 8 examples: 3 + 3 + 2
    expected_losses, expected = trained('mirrored', 3, **changes)
    np.testing.assert_allclose(losses, expected_losses, rtol=harness.FP32_SUM)
    assert variables.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(variables[name], value, rtol=harness.FP32_SUM, atol=harness.FP32_SAME_ORDER, err_msg=name)


def test_a_run_repeats_bit_for_bit():
    first, again = trained('collective', 4), trained('collective', 4)
    assert first[0] == again[0]
    for name, value in first[1].items():
        np.testing.assert_array_equal(again[1][name], value, err_msg=name)


def test_small_gradients_cross_as_one_and_no_dense_one_meets_a_hub():
    made = program.make(net, harness.rows(DATA), harness.config('collective', 4, global_batch_size=8))
    reduced = [operation for operation in made.graph.get_operations() if operation.type == 'CollectiveReduce']
    by_device = {operation.device: [] for operation in reduced}
    for operation in reduced:
        by_device[operation.device].append((operation.get_attr('instance_key'), operation.inputs[0].shape.num_elements()))
    assert sorted(by_device) == [f'/device:CPU:{k}' for k in range(1, 5)]
    assert all(keys == [(1, 22500), (2, WIDTH + 1)] for keys in by_device.values())  # the kernel; bias and scale as one
    large = [o for o in made.graph.get_operations() if o.type == 'AddN' and o.outputs[0].shape.num_elements() == WIDTH * WIDTH]
    assert not [o for o in large if o.name.startswith('average/')]


def ring(*, timeout_secs):
    """Two towers' sums of a number, and a session."""
    outputs = []
    for index in range(2):
        with tf.device(f'/cpu:{index + 1}'):
            w = tf.get_variable(f'w{index}', initializer=0.0, use_resource=True)
            gradient = tf.identity(1.0 + index)
        one = tf.constant(1, tf.int64)
        output = structs.ModelOutput(tf.constant(0.0))
        tower = structs.Tower(index, (f'/cpu:{index + 1}',), '/cpu:0')
        outputs.append(structs.TowerOutput(tower, output, one, tf.constant(0.5), (gradient,), (w,), (), (), {}, ()))
    sums = collective.totals(outputs, device='/cpu:0', wire=collective.Wire(timeout_secs=timeout_secs))
    return [total.gradients[0] for total in sums]


def test_a_tower_that_stays_away_is_an_error_in_time_and_a_new_session_works():
    proto = tf.ConfigProto(device_count={'CPU': 3}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    with tf.Graph().as_default():
        sums = ring(timeout_secs=1.0)
        with tf.Session(config=proto) as session:
            began = time.monotonic()
            with pytest.raises(tf.errors.DeadlineExceededError, match='timed out'):
                session.run(sums[1])  # alone
            assert time.monotonic() - began < 30
        with tf.Session(config=proto) as session:
            assert session.run(sums) == [3.0, 3.0]
            assert session.run(sums[0]) == 3.0  # the first tower's brings in all


@pytest.mark.parametrize(
    ('changes', 'gpus', 'wire'),
    [
        ({}, None, collective.Wire('ring', 600.0)),
        ({'step_timeout_secs': 7.0}, None, collective.Wire('ring', 70.0)),
        ({'step_timeout_secs': 0.0}, None, collective.Wire('ring', 0.0)),
        ({}, 2, collective.Wire('nccl', 600.0)),
        ({}, 1, collective.Wire('ring', 600.0)),
    ],
)
def test_how_towers_reach_each_other(monkeypatch, changes, gpus, wire):
    told = []
    monkeypatch.setitem(strategies.STRATEGIES, 'collective', lambda **given: told.append(given['wire']))
    numbers = tuple((k, k) for k in range(gpus or 2))
    towers_ = tuple(structs.Tower(k, (f'/gpu:{k}',), '/cpu:0') for k in range(2))
    strategies.make(harness.config('collective', 2, **changes), structs.Placement(towers_, '/cpu:0', gpus is None, '', numbers))
    assert told == [wire]


@pytest.mark.parametrize('second', ['/job:worker/task:1/cpu:0', '/cpu:0'])
def test_several_machines_are_refused_in_one_line(second):
    strategy = strategies.collective_copies(parameter_device='/job:master/cpu:0', seed=1, wire=collective.Wire())
    outputs = [structs.TowerOutput(structs.Tower(0, (second,), host), *[()] * 9) for host in ('/cpu:0', second)]
    with pytest.raises(ValueError, match='^--strategy=collective is for the towers of one machine, got several tasks; use .*mirrored.$'):
        strategy.reduce(outputs)
