"""Towers as they are built: what is recorded, what is left behind, and the errors of models; the laws are in conformance."""

import functools
import itertools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import config, randomness
from towers.graph import build, devices, gradients, strategies, writes
from towers.input import inputs

PLACEMENT = devices.place(config.DeviceConfig(num_gpus=2, device='cpu'))
ONE = devices.place(config.DeviceConfig(num_gpus=1, device='cpu')).towers
PROTO = tf.ConfigProto(device_count={'CPU': 3}, allow_soft_placement=False, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def strategy():
    return strategies.parameter_server(parameter_device='/cpu:0', seed=1)


def source(*values, training=True):
    opened = inputs.open_source(harness.numbers(*values), host='/cpu:0')
    if not training:
        return inputs.evaluation(opened, 2, PLACEMENT.towers)
    return inputs.training(opened, config.InputConfig(global_batch_size=4), PLACEMENT.towers)


def train(model, *values):
    draws = functools.partial(randomness.Draws, 1, tf.constant(0, tf.int64))
    return build.training(model, source(*values or (1, 2, 3, 4)), PLACEMENT.towers, scope=strategy().scope, draws=draws)


def loss_of(x, name='w'):
    return tf.reduce_mean(harness.variable(name, 1.0) * x)


def test_what_is_recorded_of_each_tower(graph):
    def model(x, *, training):
        assert training
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.square(harness.variable('v', 2.0), name='by_hand'))
        mean = harness.variable('mean', 0.0, trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_add(tf.reduce_mean(x)))
        tf.summary.scalar('x', tf.reduce_mean(x))
        return towers.ModelOutput(loss_of(x), metrics={'x': tf.reduce_mean(x)}, predictions=x)

    first, second = train(model, 1, 2, 3)
    assert [output.tower.index for output in (first, second)] == [0, 1]
    assert [v.op.name for v in first.variables] == ['v', 'w'] and all(
        a is b for a, b in zip(first.variables, second.variables, strict=True)
    )
    assert [g is None for g in first.gradients] == [True, False]
    assert [penalty.op.name for penalty in (*first.penalties, *second.penalties)] == ['tower_0/by_hand', 'tower_1/by_hand']
    assert [(w.variable.op.name, w.kind) for w in second.state] == [('mean', 'assign_add')]
    assert [len(output.summaries) for output in (first, second)] == [1, 1]
    assert [output.output.predictions.device for output in (first, second)] == ['/device:CPU:0'] * 2  # the input's own tensors
    assert [output.output.loss.device for output in (first, second)] == ['/device:CPU:1', '/device:CPU:2']
    assert [output.gradients[1].device for output in (first, second)] == ['/device:CPU:1', '/device:CPU:2']
    assert first.output.loss.dtype == tf.float32 and first.output.loss.op.name.startswith('tower_0/')


def test_seed_and_scopes_are_left_as_they_were(graph):
    tf.set_random_seed(5)
    train(lambda x, *, training: towers.ModelOutput(loss_of(x)))
    assert graph.seed == 5 and graph.get_name_scope() == '' and tf.get_variable_scope().name == ''
    assert tf.get_variable_scope().custom_getter is None and not tf.get_variable_scope().reuse
    tf.Variable(1.0)  # no creator of a tower is left behind


def everything(x, *, training):
    """All that a model leaves in a graph, in collections and elsewhere."""
    w = tf.get_variable('w', [2], regularizer=tf.nn.l2_loss)
    free = [tf.Variable(2.0, name='free'), tf.Variable(3.0, name='free')]
    mean = harness.variable('mean', 0.0, trainable=False, collections=[tf.GraphKeys.GLOBAL_VARIABLES, 'means'])
    seen = harness.variable('seen', 0.0, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    own = tf.Variable(0.0, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    words = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(['a'], [1.0]), 0.0)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(tf.reduce_mean(x)))
    tf.add_to_collection('mine', w)
    tf.summary.scalar('x', tf.reduce_mean(x))
    loss = tf.losses.absolute_difference(x, towers.dropout(x, 0.5, training=training) * tf.reduce_sum(w) * free[0] + free[1])
    return towers.ModelOutput(loss + words.lookup(tf.constant('a')) + seen + own)


def built(surveyed):
    """A graph with one tower: its operations, its collections, and tower 0's output."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(5)
        given = inputs.training(inputs.open_source(harness.numbers(1, 2), host='/cpu:0'), config.InputConfig(batch_size=2), ONE)
        how = {'scope': strategy().scope, 'draws': functools.partial(randomness.Draws, 1, tf.constant(0, tf.int64))}
        if surveyed:
            build.survey(everything, given, ONE[0], **how)
        [output] = build.training(everything, given, ONE, **how)
        found = {key: [item.name for item in graph.get_collection(key)] for key in graph.get_all_collection_keys() if isinstance(key, str)}
        return [op.name for op in graph.get_operations()], found, output, graph.seed


def test_of_a_survey_only_the_variables_stay():
    (names, collections, output, seed), (plain, expected, alone, _) = built(True), built(False)
    assert collections == expected and {'means', 'mine'} < expected.keys() and seed == 5
    assert sorted(name for name in names if not name.startswith('survey/')) == sorted(plain)
    assert [v.op.name for v in output.variables] == [v.op.name for v in alone.variables] == ['w', 'free', 'free_1']
    assert [p.op.name for p in output.penalties] == [p.op.name for p in alone.penalties]
    needed = writes.ancestors([tensor.op for tensor in (*output.gradients, output.output.loss, *[write.value for write in output.state])])
    assert not [operation.name for operation in needed if operation.name.startswith('survey/')]


def test_a_model_that_makes_other_variables_each_time_is_told_of():
    names = itertools.count()
    given = source(1, 2, 3, 4)
    how = {'scope': strategy().scope, 'draws': functools.partial(randomness.Draws, 1, tf.constant(0, tf.int64))}

    def model(x, *, training):
        return towers.ModelOutput(loss_of(x, name=f'w{next(names)}'))

    build.survey(model, given, PLACEMENT.towers[0], **how)
    with pytest.raises(ValueError, match=r"tower_0 made the variable 'w1', which an earlier build of it did not share; .* is what shares"):
        build.training(model, given, PLACEMENT.towers, **how)


def test_inference_has_metrics_and_predictions_and_counts_no_stand_in(graph):
    def model(x, *, training):
        assert not training
        logits = harness.variable('w', 2.0) * x
        return towers.ModelOutput(loss=tf.reduce_mean(logits), metrics={'mean': tf.reduce_mean(x)}, predictions={'y': logits})

    data = source(1, 2, 3, 4, 5, training=False)
    outputs = build.inference(model, data, PLACEMENT.towers, scope=strategy().scope)
    assert not any(output.gradients or output.state or output.penalties for output in outputs)
    fetches = [(o.output.predictions['y'], o.metrics['mean'].sums, o.examples) for o in outputs]
    with tf.Session(config=PROTO) as session:
        session.run([tf.global_variables_initializer(), data.initializer])
        found = [session.run(fetches) for _ in range(2)]
    assert [[y.tolist() for y, _, _ in step] for step in found] == [[[2, 4], [6, 8]], [[10], [10]]]
    assert [[sums for _, sums, _ in step] for step in found] == [[(3, 2), (7, 2)], [(5, 1), (0, 0)]]
    assert [[int(n) for _, _, n in step] for step in found] == [[2, 2], [1, 0]]


def test_a_model_may_leave_the_loss_out_of_inference():
    def model(x, *, training):
        return towers.ModelOutput(predictions=harness.variable('w', 1.0) * x)

    outputs = build.inference(model, source(1, 2, 3, 4, training=False), PLACEMENT.towers, scope=strategy().scope)
    assert [output.output.loss for output in outputs] == [None, None]


def objectives(x, *, names):
    variables = {name: harness.variable(name, 1.0) for name in 'ab'}
    loss = loss_of(x, 'c')
    return tuple(towers.Objective(name, loss + variables[name], (variables[name],)) for name in names)


def with_penalty_of_batch(x):
    made = objectives(x, names='ab')
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.reduce_mean(x, name='activity'))
    return towers.ModelOutput(objectives=made)


@pytest.mark.parametrize(
    ('output', 'message'),
    [
        (lambda x: loss_of(x), r'A model must return a towers.ModelOutput, got .*Tensor; wrap the loss: ModelOutput\(loss\)'),
        (lambda x: (loss_of(x), {}), r'A model must return a towers.ModelOutput, got tuple'),
        (lambda x: towers.ModelOutput(), r'A model in training must return a loss, got None; give ModelOutput\(loss=...\)'),
        (lambda x: towers.ModelOutput(harness.variable('w', 1.0) * x), r'must be a scalar mean .*, got shape \(2,\); use tf.reduce_mean'),
        (lambda x: towers.ModelOutput(tf.reduce_mean(x)), r'The model made no trainable variable; expected at least one tf.get_variable'),
        (
            lambda x: towers.ModelOutput(loss_of(x), objectives=(towers.Objective('a', tf.reduce_mean(x), ()),)),
            r'A model returns a loss or objectives, got both; leave ModelOutput.loss out',
        ),
        (
            lambda x: towers.ModelOutput(objectives=objectives(x, names='aa')),
            r"The variable 'a' belongs to two objectives; give each variable to one",
        ),
        (with_penalty_of_batch, r"The penalty 'tower_0/activity' depends on the batch and could be of any objective; add it to the loss"),
        (lambda x: towers.ModelOutput(loss_of(x), metrics={'m': x}), r"Metric 'm' must be a scalar mean, got shape \(2,\)"),
    ],
)
def test_errors_say_what_to_return(output, message):
    with pytest.raises(ValueError, match=message):
        train(lambda x, *, training: output(x))


def test_the_chain_of_an_update_stops_at_its_writes():
    w = tf.get_variable('w', initializer=tf.constant(1.0), use_resource=True)
    value = tf.constant(2.0, name='value')
    write = w.assign(value)
    with tf.control_dependencies([write]):
        done = tf.no_op('done')
    assert value.op in writes.ancestors([done]) and value.op not in writes.ancestors([done], through_writes=False)
    assert {done, write.op} <= writes.ancestors([done], through_writes=False)


@pytest.mark.parametrize(
    ('first', 'second', 'expected'),
    [
        ('dense', 'dense', [[2, 2], [2, 2]]),
        ('dense', 'sparse', [[1, 1], [2, 2]]),
        ('sparse', 'sparse', [[0, 0], [2, 2]]),
        ('sparse', 'none', [[0, 0], [1, 1]]),
        ('none', 'dense', [[1, 1], [1, 1]]),
    ],
)
@pytest.mark.parametrize('dtype', [tf.float32, tf.float16])
def test_a_penaltys_gradient_is_added_in_any_form(first, second, expected, dtype):
    """The loss reaches the table in one way, the penalty in the other; a sparse sum of half precision is fp32 too."""

    def use(table, form):
        return {'dense': lambda: tf.reduce_sum(table), 'sparse': lambda: tf.reduce_sum(tf.gather(table, [1])), 'none': lambda: 0.0}[form]()

    def model(x, *, training):
        table = harness.variable('table', np.ones([2, 2]), dtype=dtype, regularizer=lambda v: use(v, second) if second != 'none' else None)
        data = use(table, first)
        penalty = tf.losses.get_regularization_loss()
        return towers.ModelOutput(loss_of(x) + tf.cast(data, tf.float32) + tf.cast(penalty, tf.float32))

    outputs = train(model)
    [found] = [[o.gradients[k] for o in outputs] for k, v in enumerate(outputs[0].variables) if v.op.name == 'table']
    assert all(g is None or g.dtype == tf.float32 for g in found)
    sparse = 'dense' not in (first, second)
    assert isinstance(found[0], tf.IndexedSlices) == sparse
    total = tf.add_n([tf.convert_to_tensor(g) for g in found if g is not None])
    with tf.Session(config=PROTO) as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_allclose(session.run(total), expected)


def test_slopes_of_a_loss_without_penalties_are_its_gradients():
    w = tf.get_variable('w', initializer=tf.constant([1.0, 2.0]), use_resource=True)
    penalty = tf.nn.l2_loss(w)
    loss = tf.reduce_sum(3 * w) + 2 * penalty
    slopes = gradients.of(towers.ModelOutput(loss), (w,), tf.constant(0.5), shared=[penalty])
    with tf.Session(config=PROTO) as session:
        session.run(tf.global_variables_initializer())
        found = session.run([slopes.variables[0], slopes.penalties[0][0]])
    np.testing.assert_allclose(found[0], [1.5, 1.5])
    assert found[1] == 1.0


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('named', [True, False])
def test_metrics_that_count_by_themselves_are_refused(training, named):
    """Their pair would pass for (value, weight) and give wrong numbers in silence."""

    def model(x, *, training):
        pair = tf.metrics.mean(x, name='streamed')
        return towers.ModelOutput(loss_of(x), metrics={'average': pair} if named else {})

    what = "The metric 'average'" if named else 'The model'
    with pytest.raises(ValueError, match=rf'^{what} uses tf\.metrics, .*streamed/total.*towers\.accuracy.*\(value, weight\)'):
        if training:
            train(model)
        else:
            build.inference(model, source(1, 2, training=False), PLACEMENT.towers, scope=strategy().scope)
