"""Towers on several machines give the numbers of one process; what crosses the wire is counted."""

import collections
import threading

import harness
import numpy as np
import processes
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import loop, marks
from towers.jobs import connecting, program

MACHINES, EACH, BATCH, ROWS = 3, 2, 12, 30  # the last batch of a pass has 6 rows, one for each tower
DATA = {
    'x': np.random.RandomState(1).rand(ROWS, 5).astype(np.float32),
    'word': np.random.RandomState(2).randint(0, 9, [ROWS, 3]),
}


@pytest.fixture(scope='module')
def machines(tmp_path_factory):
    """Three worker processes, and one for parameters."""
    made = processes.Machines(tmp_path_factory.mktemp('machines'), MACHINES, ps=1)
    yield made
    made.close()


@pytest.fixture(scope='module')
def link(machines):
    """The master's link to them, in this process."""
    with connecting.connected(harness.config(**machines.flags), threading.Event()) as made:
        yield made


def dataset():
    other = tf.lookup.KeyValueTensorInitializer(tf.range(9, dtype=tf.int64), tf.range(8, -1, -1, dtype=tf.int64))
    words = tf.lookup.StaticHashTable(other, -1)
    rows = tf.data.Dataset.from_tensor_slices(DATA).shuffle(ROWS).cache()
    return rows.map(lambda row: {'x': row['x'], 'word': words.lookup(row['word']), 'double': row['x'] * 2})


def model(batch, *, training):
    """Dense and sparse variables, a moving mean, a draw by example, a penalty of its own and a metric."""
    with tf.variable_scope('net'):
        x = tf.matmul(batch['double'], tf.get_variable('w', [5, 4])) + tf.get_variable('b', [4])
        mean = tf.get_variable('mean', [4], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(mean * 0.9 + 0.1 * tf.reduce_mean(x, 0)))
        x += tf.reduce_mean(tf.nn.embedding_lookup(tf.get_variable('table', [9, 4]), batch['word']), 1)
    x = towers.dropout(x, 0.3, training=training)
    penalty = 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    return towers.ModelOutput(tf.reduce_mean(x**2) + penalty, metrics={'positive': tf.reduce_mean(tf.cast(x > 0, tf.float32))})


def made_steps(made, count):
    """The reports, metrics and variables of so many steps."""
    step = made.step
    sums = {name: metric.sums for name, metric in step.metrics.items()}
    with made.graph.as_default(), made.site.session(made.graph) as session:
        for operation in (made.init, step.input.initializer, step.sync):
            session.run(operation)
        call = session.make_callable([step.report, sums, step.ops, [mark.advance for mark in step.marks]])
        reports = [call()[:2] for _ in range(count)]
        return reports, session.run([dict(step.saved), [mark.count for mark in step.marks]])


@pytest.mark.parametrize(
    ('strategy', 'more'),
    [
        ('parameter_server', {}),
        ('balanced', {}),
        ('mirrored', {}),
        ('parameter_server', {'input_pipeline': 'sharded'}),
        ('parameter_server', {'on_ps': True}),
    ],
    ids=['parameter_server', 'balanced', 'mirrored', 'sharded', 'ps'],
)
def test_law_22_machines_give_the_numbers_of_one_process(machines, link, strategy, more):
    more = {'ps_hosts': machines.flags['ps_hosts']} if 'on_ps' in more else more
    settings = {'global_batch_size': BATCH, 'optimizer': 'momentum', 'learning_rate': 0.1, 'clip_norm': 0.5, 'l2': 0.01}
    config = machines.config(strategy=strategy, n=EACH, **settings, **more)
    made = program.at(link.site(config), model, dataset, config)
    assert [tower.devices[0] for tower in made.placement.towers] == [
        f'/job:worker/task:{machine}/cpu:{1 + tower}' for machine in range(MACHINES) for tower in range(EACH)
    ]
    if strategy == 'parameter_server':
        job = 'ps' if 'ps_hosts' in more else 'master'
        assert {v.device for v in made.graph.get_collection('trainable_variables')} == {f'/job:{job}/task:0/device:CPU:0'}
    if strategy == 'parameter_server':
        job = 'ps' if 'ps_hosts' in more else 'master'
        assert {v.device for v in made.graph.get_collection('trainable_variables')} == {f'/job:{job}/task:0/device:CPU:0'}
    reports, (found, counts) = made_steps(made, 5)
    assert counts == [5] * len(made.step.marks)
    alone = program.make(model, dataset, harness.config(strategy, MACHINES * EACH, **settings))
    expected, (values, _) = made_steps(alone, 5)
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_allclose(found[name], value, atol=harness.FP32_SAME_ORDER, rtol=harness.FP32_SAME_ORDER, err_msg=name)
    for got, wanted in zip(tf.nest.flatten(reports), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=harness.FP32_SUM)


@harness.each_strategy
def test_a_call_of_several_steps_gives_the_numbers_of_calls_of_one(machines, link, strategy):
    config = machines.config(strategy=strategy, n=EACH, global_batch_size=BATCH, optimizer='momentum', learning_rate=0.1)
    reports, (expected, counts) = made_steps(program.at(link.site(config), model, dataset, config), 7)
    made = program.at(link.site(config), model, dataset, config)
    with made.graph.as_default(), made.site.session(made.graph) as session:
        several = loop.make(made.step, marks.whole(made.step))
        init = tf.local_variables_initializer()
        for operation in (made.init, init, made.step.input.initializer, made.step.sync):
            session.run(operation)
        for most in (5, 2):
            session.run(several.set_most, {several.given: most})
            values = session.run(several.results)
        found = session.run([dict(made.step.saved), [mark.count for mark in made.step.marks]])
    assert found[1] == counts
    np.testing.assert_equal(found[0], expected)
    np.testing.assert_equal({name: values[tensor.name] for name, tensor in made.step.report.items()}, reports[-1][0])


def traced(made):
    """What crosses in a step: the most of several traced ones, since TensorFlow's record of one may lack some of it."""
    step, most = made.step, {}
    with made.graph.as_default(), made.site.session(made.graph) as session:
        for operation in (made.init, step.input.initializer, step.sync):
            session.run(operation)
        for number in range(20):
            metadata = tf.RunMetadata()
            session.run([step.report, step.ops], options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
            before = dict(most)
            most.update({pair: max(tuple(found), most.get(pair, (0, 0))) for pair, found in crossing(metadata).items()})
            machines = {f'/job:worker/task:{machine}' for machine in range(MACHINES)}
            if number >= 4 and most == before and machines <= {end for _, end in most}:
                return most
    raise AssertionError('no step was recorded whole')


def crossing(metadata):
    """(from, to) -> (bytes, number of tensors) that went from one task to another in a traced step."""
    found = collections.defaultdict(lambda: [0, 0])
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name == 'RecvTensor':
                ends = node.timeline_label.split(' from ')[1].split(' to ')
                pair = tuple(end.split('/device')[0].replace('/replica:0', '') for end in ends)
                if pair[0] != pair[1]:
                    found[pair][0] += node.output[0].tensor_description.allocation_description.requested_bytes
                    found[pair][1] += 1
    return found


@pytest.mark.parametrize(('strategy', 'each'), [('parameter_server', 1), ('parameter_server', 4), ('mirrored', 4)])
def test_weights_and_gradients_cross_once_for_each_machine(machines, link, strategy, each):
    def wide(x, *, training):
        for layer in range(3):  # 12 MB, each weight used twice
            w = tf.get_variable(f'w{layer}', [1000, 1000])
            x = tf.matmul(tf.nn.relu(tf.matmul(x, w)), w)
        return towers.ModelOutput(tf.reduce_mean(x), metrics={'mean': tf.reduce_mean(x)})

    config = machines.config(strategy=strategy, n=each, global_batch_size=12)
    made = program.at(link.site(config), wide, harness.rows(np.ones([12, 1000], np.float32)), config)
    found = traced(made)
    weights = 3 * 1000 * 1000 * 4
    for machine in range(1 if strategy == 'mirrored' else 0, MACHINES):  # mirrored adds up on the first machine
        name = f'/job:worker/task:{machine}'
        into = sum(size for (_, end), (size, _) in found.items() if end == name)
        out = sum(size for (start, _), (size, _) in found.items() if start == name)
        assert weights <= into <= 1.001 * weights
        assert weights <= out <= 1.001 * weights


def narrow(x, *, training):
    for layer in range(30):
        x = tf.tanh(x * tf.get_variable(f'scale{layer}', [8]) + tf.get_variable(f'shift{layer}', [8]))
        mean = tf.get_variable(f'mean{layer}', [8], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_sub(0.1 * (mean - tf.reduce_mean(x, 0))))
    return towers.ModelOutput(tf.reduce_mean(x), metrics={name: tf.reduce_mean(x**2) for name in 'abc'})


def counted(found, machine, *, out):
    """Messages that a machine sent or got in a traced step, and their bytes."""
    name = f'/job:worker/task:{machine}'
    own = [crossed for (start, end), crossed in found.items() if name == (start if out else end)]
    return sum(count for _, count in own), sum(size for size, _ in own)


@pytest.mark.parametrize(('strategy', 'most_in', 'most_out', 'first_out'), [('parameter_server', 2, 3, 4), ('mirrored', 8, 8, 19)])
def test_small_tensors_cross_as_one(machines, link, strategy, most_in, most_out, first_out):
    """Weights and moving means to each machine; gradients, moving means, loss and metrics from it; the others are signs and counts."""
    config = machines.config(n=2, global_batch_size=12, strategy=strategy)
    found = traced(program.at(link.site(config), narrow, harness.rows(np.ones([12, 8], np.float32)), config))
    weights = 90 * 8 * 4
    # The first machine's reads are made while it is not known yet which there will be; with `mirrored` it sends the sums to the others.
    for machine in range(1, MACHINES):
        assert counted(found, machine, out=True)[0] <= most_out and counted(found, machine, out=False)[0] <= most_in
        assert weights <= counted(found, machine, out=False)[1] < 1.2 * weights
    assert counted(found, 0, out=True)[0] <= first_out


@harness.each_strategy
def test_a_step_that_is_not_finite_is_held_back_and_kept_on_every_machine(machines, link, strategy):
    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 2.0) * x))

    values = np.ones(MACHINES * EACH, np.float32)
    values[4] = np.nan
    config = machines.config(n=EACH, global_batch_size=len(values), strategy=strategy, nan_policy='skip')
    made = program.at(link.site(config), model, harness.rows(values), config)
    with made.graph.as_default(), made.site.session(made.graph) as session:
        for operation in (made.init, made.step.input.initializer, made.step.sync):
            session.run(operation)
        reports = [session.run([made.step.report, made.step.ops])[0] for _ in range(2)]
        finding = made.recorder.find(session)
        assert [(report['step'], report['skipped']) for report in reports] == [(0, 1), (0, 2)]
        assert session.run(made.step.saved['w']) == 2
    assert (
        str(finding)
        == 'on tower 4: the input holds 1 nan in 1 values, the first at [0]; the loss is nan; the gradient of w holds 1 nan in 1 values'
    )
