"""Every optimizer by name against its formula in numpy, decoupled decay, types, devices, names and the order of writes."""

import contextlib
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config, structs
from towers.graph import optimizers

RATE = 0.1
CPUS = tf.ConfigProto(device_count={'CPU': 3}, allow_soft_placement=False)
START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]], np.float32)


def steepest(g, t, s):
    return -RATE * g


def momentum(g, t, s):
    s['m'] = 0.9 * s.get('m', 0) + g
    return -RATE * s['m']


def nesterov(g, t, s):
    s['m'] = 0.9 * s.get('m', 0) + g
    return -RATE * (g + 0.9 * s['m'])


def adam(g, t, s):
    s['m'] = 0.9 * s.get('m', 0) + 0.1 * g
    s['v'] = 0.999 * s.get('v', 0) + 0.001 * g * g
    return -RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * s['m'] / (np.sqrt(s['v']) + 1e-8)


def rmsprop(g, t, s):
    s['v'] = 0.9 * s.get('v', 1) + 0.1 * g * g
    s['m'] = 0.9 * s.get('m', 0) + RATE * g / np.sqrt(s['v'] + 1e-10)
    return -s['m']


def adagrad(g, t, s):
    s['v'] = s.get('v', 0.1) + g * g
    return -RATE * g / np.sqrt(s['v'])


def adagrad_da(g, t, s):
    s['v'] = s.get('v', 0.1) + g * g
    before, s['sum'] = s.get('w', START), s.get('sum', 0) + g
    s['w'] = -RATE * s['sum'] / np.sqrt(s['v'])
    return s['w'] - before


def adadelta(g, t, s):
    s['v'] = 0.9 * s.get('v', 0) + 0.1 * g * g
    change = np.sqrt(s.get('d', 0) + 1e-8) / np.sqrt(s['v'] + 1e-8) * g
    s['d'] = 0.9 * s.get('d', 0) + 0.1 * change * change
    return -RATE * change


def ftrl(g, t, s):
    before, n = s.get('w', START), s.get('n', 0.1)
    s['n'] = n + g * g
    s['z'] = s.get('z', 0) + g - (np.sqrt(s['n']) - np.sqrt(n)) / RATE * before
    s['w'] = -s['z'] * RATE / np.sqrt(s['n'])
    return s['w'] - before


FORMULAS = {
    'sgd': steepest, 'momentum': momentum, 'nesterov': nesterov, 'adam': adam, 'lazy_adam': adam, 'adamw': adam, 'rmsprop': rmsprop,
    'adagrad': adagrad,
    'adagrad_da': adagrad_da, 'adadelta': adadelta, 'ftrl': ftrl, 'proximal_sgd': steepest, 'proximal_adagrad': adagrad,
}  # fmt: skip


def update_of(gradients, variables, *, device='/cpu:0', scope=contextlib.nullcontext):
    return structs.Update(device, scope, tuple(gradients), tuple(variables), ())


def apply(name, gradients, variables, *, weight_decay=0.0, after=(), factory=None, **update):
    factory = factory or optimizers.make(config.OptimizerConfig(optimizer=name, weight_decay=weight_decay))
    update = update_of(gradients, variables, **update)
    return optimizers.apply(factory, update, learning_rate=tf.constant(RATE), weight_decay=weight_decay, after=after)


def make_variable(name='w', value=START, dtype=tf.float32, device='/cpu:0'):
    with tf.device(device):
        return tf.get_variable(name, initializer=tf.constant(value, dtype), use_resource=True)


@contextlib.contextmanager
def started():
    with tf.Session(config=CPUS) as session:
        session.run(tf.global_variables_initializer())
        yield session


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def test_every_name_of_the_config_is_there():
    names = config.OptimizerConfig.__dataclass_fields__['optimizer'].type.__args__
    assert set(names) == set(optimizers.OPTIMIZERS) == set(FORMULAS)


@pytest.mark.parametrize('name', FORMULAS)
def test_five_steps_are_the_formula(name):
    w, fed = make_variable(), tf.placeholder(tf.float32, [3, 2])
    op = apply(name, [fed], [w], weight_decay=0.0)
    expected, state = START.astype(np.float64), {}
    random = np.random.RandomState(0)
    with started() as session:
        for t in range(1, 6):
            g = random.randn(3, 2)
            session.run(op, {fed: g})
            expected = expected + FORMULAS[name](g, t, state)
            np.testing.assert_allclose(session.run(w), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('name', FORMULAS)
def test_a_sparse_step_is_the_formula_on_its_rows_alone(name):
    w = make_variable()
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [-0.5, 1.0], [0.25, 0.5]]), tf.constant([2, 0, 2]), None)
    op = apply(name, [slices], [w])
    dense = np.array([[-0.5, 1.0], [0, 0], [1.25, 2.5]])
    expected = START + FORMULAS[name](dense, 1, {})
    expected[1] = START[1]
    with started() as session:
        session.run(op)
        np.testing.assert_allclose(session.run(w), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('name', FORMULAS)
def test_the_loss_falls(name, sparse):
    w = make_variable()
    rows = tf.gather(w, [2, 0, 2]) if sparse else tf.identity(w)
    with tf.device('/cpu:1'):
        loss = tf.reduce_mean(tf.square(rows - 0.5))
    gradients = tf.gradients(loss, [w], colocate_gradients_with_ops=True)
    assert isinstance(gradients[0], tf.IndexedSlices) == sparse
    op = apply(name, gradients, [w], after=[loss])
    with started() as session:
        first = session.run(loss)
        for _ in range(40):
            session.run(op)
        assert session.run(loss) < (1.0 if name == 'adadelta' else 0.7) * first  # adadelta starts with tiny steps


@pytest.mark.parametrize('name', ['sgd', 'momentum', 'adam', 'adamw'])
def test_decay_takes_the_old_value_before_the_step(name):
    u, v, idle = make_variable('u'), make_variable('v', 2 * START, device='/cpu:1'), make_variable('idle', device='/cpu:2')
    loss = tf.reduce_sum(u * v)  # each one's gradient is the other, old
    op = apply(name, [*tf.gradients(loss, [u, v]), None], [u, v, idle], weight_decay=0.5, after=[loss])
    expected = [START.astype(np.float64), 2 * START.astype(np.float64), START.astype(np.float64)]
    states = ({}, {})
    with started() as session:
        for t in range(1, 31):
            seen, _ = session.run([loss, op])
            np.testing.assert_allclose(seen, np.sum(expected[0] * expected[1]), rtol=1e-4)
            gradients = expected[1], expected[0]
            steps = [FORMULAS[name](g, t, s) for g, s in zip(gradients, states, strict=True)] + [0.0]
            expected = [w - RATE * 0.5 * w + step for w, step in zip(expected, steps, strict=True)]
            np.testing.assert_allclose(session.run([u, v, idle]), expected, rtol=2e-4, atol=1e-5)


def test_no_decay_makes_no_operation(graph):
    apply('sgd', [tf.ones([3, 2])], [make_variable()])
    assert not [op.name for op in graph.get_operations() if op.type == 'AssignSubVariableOp']


def read_late(w):
    with tf.device('/cpu:2'):
        slow = tf.reduce_sum(tf.linalg.matmul(tf.random.normal([400, 400]), tf.ones([400, 400])))
    with tf.control_dependencies([slow]):
        return w.read_value() + 0.0


def test_no_gradient_sees_another_ones_update():
    u, v = make_variable('u'), make_variable('v')
    op = apply('sgd', [read_late(v), tf.ones([3, 2])], [u, v])
    with started() as session:
        for _ in range(10):
            before = session.run([u, v])
            session.run(op)
            np.testing.assert_allclose(session.run([u, v]), [before[0] - RATE * before[1], before[1] - RATE], rtol=1e-4, atol=1e-6)


def test_readers_that_must_come_first_do():
    w = make_variable()
    seen = read_late(w)
    op = apply('momentum', [tf.ones([3, 2])], [w], after=[seen])
    with started() as session:
        for _ in range(10):
            before = session.run(w)
            found, _ = session.run([seen, op])
            np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16, tf.float64])
def test_gradients_are_cast_to_the_variable_when_applied(dtype):
    w, table = make_variable(dtype=dtype), make_variable('table', dtype=dtype, device='/cpu:1')
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    slices = tf.IndexedSlices(tf.ones([2, 2], wide), tf.constant([1, 1]), None)
    op = apply('momentum', [tf.ones([3, 2], wide), slices], [w, table], weight_decay=1.0)
    with started() as session:
        session.run(op)
        dense, sparse = (value.astype(np.float64) for value in session.run([w, table]))
    np.testing.assert_allclose(dense, 0.9 * START - RATE, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(sparse, 0.9 * START - RATE * np.array([[0], [2], [0]]), rtol=1e-2, atol=1e-2)


def test_updates_and_slots_are_on_their_variables_devices(graph):
    variables = [make_variable(f'w{i}', device=f'/cpu:{i}') for i in range(3)]
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), None)
    op = apply('momentum', [tf.ones([3, 2]), slices, tf.ones([3, 2])], variables, weight_decay=0.1, device='/cpu:2')
    for i, w in enumerate(variables):
        assert graph.get_tensor_by_name(f'w{i}/Momentum:0').device == w.device
    with started() as session:  # placement is hard: a slot elsewhere than its variable fails here
        session.run(op)
    assert op.name == 'apply/update'


@contextlib.contextmanager
def rooted(seen):
    """A context of creators, as strategies give: names without a scope, and a record of what is made."""

    def creator(next_creator, **kwargs):
        with tf.name_scope(None):
            seen.append(next_creator(**kwargs))
        return seen[-1]

    with tf.variable_creator_scope(creator):
        yield


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('name', FORMULAS)
def test_variables_have_a_classic_programs_names_and_pass_the_scope(name, gated):
    def names(step):
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            with tf.variable_scope('net'):
                w = make_variable()
            step(w)
            return [variable.op.name for variable in tf.global_variables()]

    def classic(w):
        optimizers.make(config.OptimizerConfig(optimizer=name))(tf.constant(RATE)).apply_gradients([(tf.ones([3, 2]), w)])

    seen = []

    def ours(w):
        gradients = [tf.ones([3, 2])]

        def change():
            with tf.control_dependencies([apply(name, gradients, [w], scope=lambda: rooted(seen))]):
                return tf.constant(True)

        with tf.name_scope('outer'):
            tf.cond(tf.placeholder_with_default(True, []), change, lambda: tf.constant(False)) if gated else change()

    assert names(ours) == names(classic) == ['global_step', 'net/w', *(variable.op.name for variable in seen)]


def test_a_gated_update_is_the_plain_one_or_nothing():
    w, gate, fed = make_variable(), tf.placeholder(tf.bool, []), tf.placeholder(tf.float32, [3, 2])

    def change():
        with tf.control_dependencies([apply('adam', [fed], [w], weight_decay=0.5)]):
            return tf.constant(True)

    done = tf.cond(gate, change, lambda: tf.constant(False))
    expected, state, g = START.astype(np.float64), {}, np.ones([3, 2])
    with started() as session:
        for t in range(1, 4):
            assert not session.run(done, {gate: False, fed: 100 * g})
            assert session.run(done, {gate: True, fed: t * g})
            expected = expected * (1 - RATE * 0.5) + adam(t * g, t, state)
            np.testing.assert_allclose(session.run(w), expected, rtol=2e-5)


def test_operations_stay_under_apply(graph):
    w, g = make_variable(), tf.ones([3, 2])
    before = len(graph.get_operations())
    apply('sgd', [g], [w], weight_decay=0.1, scope=lambda: rooted([]))
    new = [op.name for op in graph.get_operations()[before:] if not op.name.startswith('Const')]  # the learning rates
    assert new and all(name == 'apply' or name.startswith('apply/') for name in new), new


def test_a_users_factory_serves_too():
    w = make_variable()
    op = apply(None, [tf.ones([3, 2])], [w], factory=lambda rate: tf.train.GradientDescentOptimizer(2 * rate))
    with started() as session:
        session.run(op)
        np.testing.assert_allclose(session.run(w), START - 0.2, rtol=1e-6)


def test_a_factory_makes_a_new_optimizer_each_time():
    factory = optimizers.make(config.OptimizerConfig(optimizer='adam'))
    assert factory(tf.constant(0.1)) is not factory(tf.constant(0.1))


@pytest.mark.parametrize('name', ['adam', 'adamw', 'rmsprop', 'adadelta'])
def test_epsilon_reaches_the_optimizer(name):
    w = make_variable()
    op = apply(name, [tf.ones([3, 2])], [w], factory=optimizers.make(config.OptimizerConfig(optimizer=name, epsilon=1e12)))
    with started() as session:
        session.run(op)
        moved = np.abs(session.run(w) - START).max()
    assert (moved < 1e-3) == (name != 'adadelta')  # adadelta divides one epsilon by the other: steps of the gradient's size


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (
            {'optimizer': 'sgd', 'epsilon': 0.1},
            '--epsilon=0.1 is for --optimizer=adam|lazy_adam|adamw|rmsprop|adadelta, got --optimizer=sgd;',
        ),
        (
            {'optimizer': 'adam', 'momentum': 0.5},
            '--momentum=0.5 is for --optimizer=momentum|nesterov|rmsprop, got --optimizer=adam; leave',
        ),
        ({'beta2': 0.5}, '--beta2=0.5 is for --optimizer=adam|lazy_adam|adamw, got --optimizer=momentum'),
        ({'rho': 0.5}, '--rho=0.5 is for --optimizer=rmsprop|adadelta, got --optimizer=momentum'),
        (
            {'boundaries': (30.0, 60.5)},
            '--boundaries=30,60.5 is for --schedule=piecewise, got --schedule=constant; leave it out, or choose',
        ),
        ({'decay_every': 1.0}, '--decay_every=1.0 is for --schedule=exponential, got --schedule=constant'),
        ({'schedule': 'cosine', 'decay_rate': 0.5}, '--decay_rate=0.5 is for --schedule=piecewise|exponential, got --schedule=cosine'),
        ({'schedule_unit': 'epochs'}, '--schedule_unit=epochs is for a schedule or a warm-up, got neither'),
        ({'nan_limit': 3}, '--nan_limit=3 is for --nan_policy=skip|rollback, got stop'),
        ({'init_exclude': ('a', 'b')}, '--init_exclude=a,b is for a warm start, got no --init_checkpoint; give it too, or leave this out'),
        ({'init_rename': ('a:b',)}, '--init_rename=a:b is for a warm start'),
    ],
)
def test_what_would_have_no_effect_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config.Config(**given)


@pytest.mark.parametrize('weight_decay, warned', [(0.0, True), (0.01, False)])
def test_adamw_without_decay_says_that_it_is_adam(weight_decay, warned, caplog):
    with caplog.at_level('WARNING'):
        optimizers.make(config.OptimizerConfig(optimizer='adamw', weight_decay=weight_decay))
    assert ('--weight_decay=0 is adam' in caplog.text) == warned
