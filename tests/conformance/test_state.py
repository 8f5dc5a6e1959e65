"""Laws 9, 10 and 13: the step, moving statistics and canonical variables, for every strategy and number of towers."""

import functools
import itertools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER

import towers
from towers.graph import writes
from towers.jobs import program
from towers.run import session as session_lib

UPDATES = tf.GraphKeys.UPDATE_OPS


def moving(name, value=0.0, **settings):
    return harness.variable(name, value, trainable=False, **settings)


def loss_of(x):
    return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 1.0) * x))


@harness.each_case
def test_law_9_global_step_counts_updates(strategy, n):
    with harness.started(
        lambda x, *, training: loss_of(x), harness.numbers(*range(8)), harness.config(strategy, n, global_batch_size=4)
    ) as run:
        reports = run.steps(3)
        assert [r['step'] for r in reports] == [1, 2, 3]
        assert [r['examples_seen'] for r in reports] == [4, 8, 12]
        assert run.variables()['global_step'] == 3 and run.program.step.global_step.dtype.base_dtype == tf.int64


@harness.each_case
def test_law_9_whatever_hooks_read_as_the_step_is_read_before_it_changes(strategy, n, tmp_path):
    made = program.make(lambda x, *, training: loss_of(x), harness.numbers(1, 2, 3, 4), harness.config(strategy, n, global_batch_size=4))
    with made.graph.as_default():
        hook = tf.train.StepCounterHook(output_dir=str(tmp_path))
        hook.begin()
        [step] = made.step.ops
        for read in (hook.before_run(None).fetches, tf.train.get_global_step()):
            assert made.graph.as_graph_element(read).op in writes.ancestors([step])


@harness.each_case
def test_laws_9_and_21_stock_hooks_see_the_right_step_and_the_graph_stays_as_it_was(strategy, n, tmp_path):
    def model(x, *, training):
        tf.add_to_collection(UPDATES, moving('mean').assign(tf.reduce_mean(x)))
        return loss_of(x)

    made = program.make(model, harness.numbers(*range(8)), harness.config(strategy, n, global_batch_size=4))
    with made.graph.as_default():
        saver = tf.train.Saver(dict(made.step.saved), max_to_keep=9, save_relative_paths=True)
    hooks = [
        tf.train.StopAtStepHook(last_step=5),
        tf.train.CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver),
        tf.train.StepCounterHook(every_n_steps=2, output_dir=str(tmp_path)),
        tf.train.NanTensorHook(made.step.report['loss']),
    ]

    def initialize(session):
        for operation in (made.init, made.step.input.initializer, made.step.sync):
            session.run(operation)

    steps = []
    with session_lib.MasterSession(made.graph, hooks, connect=made.site.session, initialize=initialize) as session:
        size = len(made.graph.get_operations())
        while not session.should_stop():
            steps.append(int(session.run([made.step.step, made.step.ops])[0]))
    assert steps == [1, 2, 3, 4, 5]
    assert made.graph.finalized and len(made.graph.get_operations()) == size
    saved = {int(path.name.split('-')[1].split('.')[0]) for path in tmp_path.glob('model.ckpt-*.index')}
    assert saved == {0, 2, 4, 5}  # at the start, at every second step and at the end
    for step in saved:
        found = tf.train.load_checkpoint(str(tmp_path / f'model.ckpt-{step}'))
        assert found.get_tensor('global_step') == step


def every_form(x, *, training):
    """A moving mean with decay .9, written in each way that models write it."""
    batch = tf.reduce_mean(x)
    v = {name: moving(name) for name in ('assign', 'assign_sub', 'assign_add', 'op', 'grouped', 'identity', 'function', 'old')}
    change = {name: 0.1 * (batch - variable) for name, variable in v.items()}
    updates = [
        v['assign'].assign(v['assign'] * 0.9 + batch * 0.1),
        tf.assign_sub(v['assign_sub'], -change['assign_sub']),
        v['assign_add'].assign_add(change['assign_add'], read_value=False),
        v['op'].assign(v['op'] + change['op']).op,
        tf.group(tf.no_op(), v['grouped'].assign_add(change['grouped'])),
        tf.assign(v['function'], tf.function(lambda old: old * 0.9 + batch * 0.1)(v['function'])),
    ]
    with tf.control_dependencies([v['identity'].assign_add(change['identity'])]):
        updates.append(tf.identity(batch))
    with tf.control_dependencies([v['old'].assign_sub(-change['old']), *updates[:2]]):
        updates.append(tf.no_op())  # it also leads to writes that stand in the collection already
    for update in updates:
        tf.add_to_collection(UPDATES, update)
    return loss_of(x)


@harness.each_case
def test_law_10_moving_statistics_are_the_mean_of_the_towers_in_each_form(strategy, n):
    with harness.started(every_form, harness.numbers(0, 10, 0, 10), harness.config(strategy, n, global_batch_size=4)) as run:
        run.steps(1)
        first = run.variables()
        run.steps(99)
        last = run.variables()
    for name in ('assign', 'assign_sub', 'assign_add', 'op', 'grouped', 'identity', 'function', 'old'):
        np.testing.assert_allclose(first[name], 0.5, rtol=FP32_SAME_ORDER, err_msg=name)
        np.testing.assert_allclose(last[name], 4.99987, rtol=1e-5, err_msg=name)


@harness.each_case
def test_law_10_the_same_values_on_fresh_runs(strategy, n):
    """Writes of one variable keep their order, and what they are made of is read before anything is written."""

    def model(x, *, training):
        twice, shadow, counted = moving('twice'), moving('shadow'), moving('counted', 0, dtype=tf.int32)
        w = harness.variable('w', 1.0)
        updates = [twice.assign_sub(0.1 * (twice - tf.reduce_mean(x))), twice.assign_sub(0.1 * (twice - tf.reduce_max(x)))]
        updates += [shadow.assign(w), counted.assign_add(3)]
        for update in updates:
            tf.add_to_collection(UPDATES, update)
        return towers.ModelOutput(tf.reduce_mean(w * x))

    data = harness.numbers(0, 0.7, 0.1, 0.9)
    with harness.started(model, data, harness.config(strategy, n, global_batch_size=4, learning_rate=0.1)) as run:
        found = []
        for _ in range(8):
            run.session.run([run.program.init, run.program.step.input.initializer])
            run.session.run(run.program.step.sync)
            run.steps(4)
            found.append(run.variables())
        operations = run.program.graph.get_operations()
        first, second = [op for op in operations if op.type == 'AssignSubVariableOp' and op.inputs[0].op.name == 'twice'][-2:]
        assert first in writes.ancestors([second])
    assert all(variables == found[0] for variables in found)
    assert found[0]['counted'] == 12  # not a float: tower 0's alone
    np.testing.assert_allclose(found[0]['shadow'], found[0]['w'] + 0.1 * 0.425, rtol=FP32_SAME_ORDER)  # as before the last step


@harness.each_case
def test_law_10_towers_count_by_their_examples(strategy, n):
    def model(x, *, training):
        mean = moving('mean')
        tf.add_to_collection(UPDATES, mean.assign_add(0.1 * (tf.reduce_mean(x) - mean)))
        return loss_of(x)

    settings = harness.config(strategy, n, global_batch_size=5)
    _, variables = harness.train(model, harness.numbers(1, 2, 3, 4, 5, 7), settings, steps=2)  # then one example alone
    np.testing.assert_allclose(variables['mean'], 0.9 * 0.3 + 0.7, rtol=FP32_SAME_ORDER)


@pytest.mark.parametrize(('statistics', 'expected'), [('mean', [0.5, 0.1]), ('first', [0.0, 0.1])])
@harness.each_split
def test_law_10_mean_of_variances_and_the_first_towers_own(strategy, n, statistics, expected):
    def model(x, *, training):
        for name, value in zip(('mean', 'variance'), tf.nn.moments(x, [0]), strict=True):
            variable = moving(name)
            tf.add_to_collection(UPDATES, variable.assign_sub(0.1 * (variable - value)))
        return loss_of(x)

    data = harness.numbers(*[-1, 1, 9, 11] * (n // 2))
    _, variables = harness.train(model, data, harness.config(strategy, n, global_batch_size=2 * n, batch_norm=statistics))
    np.testing.assert_allclose([variables['mean'], variables['variance']], expected, rtol=FP32_SAME_ORDER, atol=FP32_SAME_ORDER)


def in_cond(x):
    mean = moving('mean')
    return tf.cond(tf.reduce_mean(x) > 0, lambda: mean.assign(1.0), lambda: mean.assign(2.0))


def in_function(x):
    mean = moving('mean')
    return tf.function(lambda: mean.assign(tf.reduce_mean(x)), autograph=False)()


def beside_a_plain_one(x):
    return tf.group(moving('other').assign(1.0), in_cond(x))


def in_nested_function(x):
    mean = moving('mean')
    inner = tf.function(lambda: mean.assign_add(1.0), autograph=False)
    return tf.function(lambda: inner() + 1.0, autograph=False)()


def scattered(x):
    return tf.scatter_update(moving('table', [0.0, 0.0]), [1], [2.0])


def nothing(x):
    return tf.identity(x)


HIDDEN = r'holds no write to a variable that Towers can read'


@pytest.mark.parametrize(
    ('update', 'message'),
    [
        (in_cond, rf"The update 'tower_0/cond.*' {HIDDEN}, hidden in 'tower_0/cond' \(If\); add a plain assign"),
        (in_function, rf'{HIDDEN}, hidden in .*\(StatefulPartitionedCall\)'),
        (beside_a_plain_one, rf"{HIDDEN}, hidden in 'tower_0/cond'"),
        (in_nested_function, rf'{HIDDEN}, hidden in'),
        (scattered, rf'{HIDDEN}, hidden in .*\(ResourceScatterUpdate\)'),
        (nothing, rf'{HIDDEN}; add a plain assign'),
        (lambda x: tf.get_variable('w', []).assign(1.0), r"writes the trainable variable 'w'; expected one made with trainable=False"),
        (lambda x: tf.get_local_variable('count', []).assign(1.0), r'writes no global variable; expected one made with trainable=False'),
    ],
)
@harness.each_strategy
def test_law_10_a_write_that_can_not_be_read_is_named(strategy, update, message):
    def model(x, *, training):
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
            output = loss_of(x)
            tf.add_to_collection(UPDATES, update(x))
        return output

    with pytest.raises(ValueError, match=message):
        harness.train(model, harness.numbers(1, 2), harness.config(strategy, 2, global_batch_size=2))


@pytest.mark.parametrize('collected', [True, False])
@pytest.mark.parametrize('write', [lambda x: moving('mean').assign(tf.reduce_mean(x)), in_cond, in_function, scattered])
def test_law_10_a_loss_that_depends_on_a_write_is_refused(write, collected):
    def model(x, *, training):
        written = write(x)
        if collected:
            tf.add_to_collection(UPDATES, written)
        with tf.control_dependencies([written]):
            return towers.ModelOutput(tf.identity(loss_of(x).loss))

    with pytest.raises(ValueError, match=r"The loss depends on the write 'tower_0/.*', which N towers would make N times"):
        harness.train(model, harness.numbers(1, 2), harness.config('parameter_server', 2, global_batch_size=2))


def test_law_10_functions_that_only_draw_or_read_are_no_writes():
    def model(x, *, training):
        w, mean = harness.variable('w', 1.0), moving('mean')
        noisy = tf.function(lambda: w * x + mean + tf.random.uniform([]) * 0, autograph=False)()
        noisy = tf.cond(tf.reduce_mean(x) > 0, lambda: noisy * w, lambda: noisy)
        with tf.control_dependencies([mean.assign_add(1.0)]):
            tf.add_to_collection(UPDATES, tf.identity(noisy))
        return towers.ModelOutput(tf.reduce_mean(noisy))

    [report], variables = harness.train(model, harness.numbers(1, 2), harness.config('parameter_server', 2, global_batch_size=2))
    assert report['loss'] == 1.5 and variables['mean'] == 1 and variables['w'] == 1 - 2 * 1.5


@harness.each_strategy
def test_law_10_towers_with_other_updates_are_named(strategy):
    turns = itertools.cycle([True, False])

    def model(x, *, training):
        a, b = moving('a'), moving('b')
        tf.add_to_collection(UPDATES, (a if next(turns) else b).assign(tf.reduce_mean(x)))
        return loss_of(x)

    with pytest.raises(ValueError, match=r"tower_1 and tower_0 update different state: 'a' \(assign\), 'b' \(assign\); expected the same"):
        harness.train(model, harness.numbers(1, 2), harness.config(strategy, 2, global_batch_size=2))


def network(x, *, training):
    """A model with much of what creates variables: layers, default-named scopes, a frozen one, a moving average of weights."""
    with tf.variable_scope('layer'):
        w = tf.get_variable('kernel', [2, 3])
    with tf.variable_scope(None, 'dense'):
        b = tf.get_variable('bias', [3], initializer=tf.zeros_initializer())
    with tf.variable_scope(None, 'dense'):
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())
    frozen = tf.get_variable('frozen', [3], initializer=tf.ones_initializer(), trainable=False)
    average = tf.train.ExponentialMovingAverage(0.5)
    tf.add_to_collection(UPDATES, average.apply(tf.trainable_variables()))
    assert all(average.average(v) is not None for v in (w, b, scale))
    output = (tf.matmul(x, w) + b) * frozen * scale
    return towers.ModelOutput(tf.reduce_mean(tf.square(output)))


@functools.cache
def classic_names(optimizer):
    """Names and shapes of the same model in a plain one-device program of TensorFlow."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        loss = network(tf.placeholder(tf.float32, [None, 2]), training=True).loss
        made = {'adam': tf.train.AdamOptimizer, 'rmsprop': tf.train.RMSPropOptimizer}[optimizer](0.1)
        made.minimize(loss, global_step=step)
        return {v.op.name: v.shape.as_list() for v in tf.global_variables()}


@pytest.mark.parametrize('optimizer', ['adam', 'rmsprop'])
@harness.each_case
def test_law_13_names_and_shapes_are_those_of_a_classic_program(strategy, n, optimizer):
    data = harness.rows(np.arange(16, dtype=np.float32).reshape(8, 2))
    settings = harness.config(strategy, n, global_batch_size=8, optimizer=optimizer, learning_rate=0.01)
    with harness.started(network, data, settings) as run:
        names = {name: variable.shape.as_list() for name, variable in run.program.step.saved.items()}
        assert names == {**classic_names(optimizer), 'examples_seen': [], 'skipped_steps': []}
        assert not [name for name in names if 'tower' in name or 'replica' in name]
        start = run.variables()['layer/kernel']
        run.steps(1)
        once = run.variables()
        run.steps(1)
        twice = run.variables()
    np.testing.assert_allclose(once['layer/kernel/ExponentialMovingAverage'], start, rtol=FP32_SAME_ORDER)
    mean = (start + once['layer/kernel']) / 2
    np.testing.assert_allclose(twice['layer/kernel/ExponentialMovingAverage'], mean, rtol=FP32_SAME_ORDER)
    assert np.all(once['frozen'] == 1)


def by_class(counter):
    return tf.Variable(1.0, name='free')


def by_counter(counter):
    return harness.variable(f'made_{next(counter)}', 1.0)


@pytest.mark.parametrize(('make', 'name'), [(by_class, 'free'), (by_counter, 'made_1')])
@harness.each_split
def test_law_13_a_variable_of_a_later_tower_is_an_error_naming_it(strategy, n, make, name):
    counter = itertools.count()

    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(make(counter) * x))

    message = rf"tower_1 made the variable '{name}', which tower_0 did not share; .* get_variable inside the model, .* is what shares"
    with pytest.raises(ValueError, match=message):
        harness.train(model, harness.numbers(1, 2, 3, 4), harness.config(strategy, n, global_batch_size=4))


@harness.each_strategy
def test_law_13_one_tower_may_make_a_variable_in_any_way(strategy):
    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(tf.Variable(1.0, name='free') * x))

    _, variables = harness.train(model, harness.numbers(1, 2, 3, 4), harness.config(strategy, 1, global_batch_size=4))
    assert variables['free'] == 1 - 2.5


@harness.each_split
def test_law_13_reuse_stays_in_the_models_scope(strategy, n):
    with harness.started(lambda x, *, training: loss_of(x), harness.numbers(1, 2, 3, 4), harness.config(strategy, n, global_batch_size=4)):
        assert not tf.get_variable_scope().reuse
        with pytest.raises(ValueError, match='Variable w already exists'):
            tf.get_variable('w', [])
        assert tf.trainable_variables() == [v for v in tf.global_variables() if v.op.name == 'w']
