"""Towers on several machines give the numbers of one process; what crosses the wire is counted."""

import collections
import dataclasses
import functools
import threading

import harness
import numpy as np
import processes
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import loop, marks
from towers.jobs import connecting, program

MACHINES, PS, EACH, BATCH, ROWS = 3, 2, 2, 12, 30  # the last batch of a pass has 6 rows, one for each tower
DATA = {
    'x': np.random.RandomState(1).rand(ROWS, 5).astype(np.float32),
    'word': np.random.RandomState(2).randint(0, 9, [ROWS, 3]),
}


@pytest.fixture(scope='module')
def machines(tmp_path_factory):
    """Three worker processes, and two for parameters."""
    made = processes.Machines(tmp_path_factory.mktemp('machines'), MACHINES, ps=PS)
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


def site(link, config, machines):
    """The site of a link with the first of its machines only."""
    whole = link.site(config)
    towers = whole.placement.towers[: machines * config.num_gpus]
    return dataclasses.replace(whole, placement=dataclasses.replace(whole.placement, towers=towers))


@pytest.mark.parametrize(
    ('strategy', 'count', 'each', 'more'),
    [
        ('parameter_server', MACHINES, EACH, {}),
        ('balanced', MACHINES, EACH, {}),
        ('mirrored', MACHINES, EACH, {}),
        ('parameter_server', MACHINES, EACH, {'input_pipeline': 'sharded'}),
        ('parameter_server', MACHINES, EACH, {'batch_norm': 'first'}),
        ('parameter_server', MACHINES, EACH, {'on_ps': True}),
        ('parameter_server', 1, EACH, {}),
        ('balanced', 1, EACH, {}),
        ('mirrored', 1, EACH, {}),
        ('parameter_server', 1, 1, {}),
        ('parameter_server', 1, EACH, {'on_ps': True}),
    ],
    ids=lambda value: ','.join(value) if isinstance(value, dict) else None,
)
def test_law_22_machines_give_the_numbers_of_one_process(machines, link, strategy, count, each, more):
    settings = {'global_batch_size': BATCH, 'optimizer': 'momentum', 'learning_rate': 0.1, 'clip_norm': 0.5, 'l2': 0.01, **more}
    more = {'ps_hosts': machines.flags['ps_hosts']} if settings.pop('on_ps', False) else {}
    config = machines.config(strategy=strategy, n=each, **settings, **more)
    made = program.at(site(link, config, count), model, dataset, config)
    assert [tower.devices[0] for tower in made.placement.towers] == [
        f'/job:worker/task:{machine}/cpu:{1 + tower if each > 1 else 0}' for machine in range(count) for tower in range(each)
    ]
    if strategy == 'parameter_server':
        tasks = [f'ps/task:{task}' for task in range(PS)] if 'ps_hosts' in more else ['master/task:0']
        assert {v.device for v in made.graph.get_collection('trainable_variables')} == {f'/job:{task}/device:CPU:0' for task in tasks}
    reports, (found, counts) = made_steps(made, 5)
    assert counts == [5] * len(made.step.marks)
    alone = program.make(model, dataset, harness.config(strategy, count * each, **settings))
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


def narrow(x, *, training, layers=30):
    for layer in range(layers):
        x = tf.tanh(x * tf.get_variable(f'scale{layer}', [8]) + tf.get_variable(f'shift{layer}', [8]))
        mean = tf.get_variable(f'mean{layer}', [8], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_sub(0.1 * (mean - tf.reduce_mean(x, 0))))
    return towers.ModelOutput(tf.reduce_mean(x), metrics={name: tf.reduce_mean(x**2) for name in 'abc'})


def counted(found, machine, *, out):
    """Messages that a machine sent or got in a traced step, and their bytes."""
    name = f'/job:worker/task:{machine}'
    own = [crossed for (start, end), crossed in found.items() if name == (start if out else end)]
    return sum(count for _, count in own), sum(size for size, _ in own)


@pytest.mark.parametrize(
    ('strategy', 'most', 'first'),  # messages to a machine and from it
    [('parameter_server', (2, 3), (4, 4)), ('mirrored', (8, 8), (14, 19))],
)
def test_small_tensors_cross_as_one(machines, link, strategy, most, first):
    """Weights and moving means to each machine; gradients, moving means, loss and metrics from it; the others are signs and counts.

    The first machine is told of the others' batches, and with `mirrored` it adds up.
    """
    config = machines.config(n=2, global_batch_size=12, strategy=strategy)
    found = traced(program.at(link.site(config), narrow, harness.rows(np.ones([12, 8], np.float32)), config))
    weights = 90 * 8 * 4
    for machine in range(MACHINES):
        (into, size), (out, _) = (counted(found, machine, out=out) for out in (False, True))
        assert (into, out) <= (most if machine else first)
        assert weights <= size < 1.2 * weights or (strategy, machine) == ('mirrored', 0)


def between(made):
    """(from, to) -> number of the tensors and signs that go from one task to another in a step, by the graph."""
    step = made.step
    todo = [*step.ops, *[tensor.op for tensor in step.report.values()], *[mark.advance for mark in step.marks]]
    needed, found = set(), collections.defaultdict(set)
    while todo:
        if (operation := todo.pop()) in needed:
            continue
        needed.add(operation)
        sources = [*[(tensor.name, tensor.op) for tensor in operation.inputs], *[(f'^{op.name}', op) for op in operation.control_inputs]]
        for name, source in sources:
            todo.append(source)
            if (start := task(source)) != (end := task(operation)):
                found[start, end].add((name, operation.device))
    return {ends: len(names) for ends, names in found.items()}


def task(operation):
    spec = tf.DeviceSpec.from_string(operation.device)
    return f'{spec.job} {spec.task}'


# Settings -> for 1, 2 and 3 machines the messages (to, from) each, and those between all tasks.
SHARED = ([[(2, 4)], [(3, 4), (2, 3)], [(4, 4), (2, 3), (2, 3)]], [6, 11, 16])
MESSAGES = {
    ('parameter_server',): SHARED,
    ('parameter_server', 'one tower each'): SHARED,
    ('parameter_server', 'first'): SHARED,
    ('parameter_server', 'ps'): ([[(3, 6)], [(4, 6), (3, 5)], [(5, 6), (3, 5), (3, 5)]], [35, 43, 51]),
    ('balanced',): ([[(10, 11)], [(15, 17), (14, 16)], [(20, 21), (18, 20), (18, 20)]], [21, 53, 91]),
    ('mirrored',): ([[(10, 13)], [(12, 16), (9, 8)], [(14, 19), (9, 8), (9, 8)]], [23, 40, 57]),
}


@pytest.mark.parametrize('count', [1, 2, 3])
@pytest.mark.parametrize('settings', MESSAGES, ids=' '.join)
def test_so_many_messages_cross_where_no_machine_with_towers_holds_the_variables(machines, link, settings, count):
    """One message brings the variables to each machine, or one from each parameter task, and one brings back what comes of them."""
    more = {'ps_hosts': machines.flags['ps_hosts']} if 'ps' in settings else {}
    more['batch_norm'] = 'first' if 'first' in settings else 'mean'
    config = machines.config(n=1 if 'one tower each' in settings else 2, global_batch_size=12, strategy=settings[0], **more)
    few = functools.partial(narrow, layers=4)
    found = between(program.at(site(link, config, count), few, harness.rows(np.ones([12, 8], np.float32)), config))
    pairs = [
        tuple(sum(number for ends, number in found.items() if ends[side] == f'worker {index}') for side in (1, 0)) for index in range(count)
    ]
    machine, whole = MESSAGES[settings]
    assert (pairs, sum(found.values())) == (machine[count - 1], whole[count - 1])


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
