"""What a tower's model sees of a variable: one read a step, whole tables never, still a variable in every use."""

import collections

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import variables

CPUS = tf.ConfigProto(device_count={'CPU': 3}, allow_soft_placement=False, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def run_once(fetches, config=CPUS):
    with tf.Session(config=config) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session.run(fetches)


def make(name='net/w', value=(1.0, 2.0, 3.0), device='/cpu:0', **settings):
    with tf.device(device):
        return harness.variable(name, value, use_resource=True, **settings)


def transfers(run, source='CPU:0'):
    """How a step sends each variable's value to each device: (variable, device) -> with how many variables it goes there, each time."""
    metadata, step = tf.RunMetadata(), run.program.step
    run.session.run([step.report, step.ops], options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    found = collections.defaultdict(list)
    for part in metadata.partition_graphs:
        nodes = {node.name: node for node in part.node}
        for node in part.node:
            if node.op in ('_Send', '_HostSend') and node.attr['send_device'].s.decode().endswith(source):
                sent = nodes.get(node.input[0].split(':')[0])
                together = list(sent.input) if sent is not None and sent.op == 'OptionalFromValue' else node.input[:1]
                for read in filter(None, (nodes.get(name.split(':')[0]) for name in together)):
                    if read.op == 'ReadVariableOp':
                        found[read.input[0], node.attr['recv_device'].s.decode()[-5:]].append(len(together))
    return found


def greedy(batch, *, training):
    """Uses each variable often and in many ways."""
    x, ids = batch
    w = harness.variable('w', np.ones([3, 3]), regularizer=tf.nn.l2_loss)
    b, table = harness.variable('b', np.ones([3])), harness.variable('table', np.ones([50, 3]))
    with tf.variable_scope('', reuse=True):
        again = tf.get_variable('w', [3, 3])
    h = tf.matmul(tf.matmul(x, w) + b, again) + b
    h += tf.nn.embedding_lookup(table, ids) + tf.gather(table, ids)
    own = tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables() if v is not table])
    return towers.ModelOutput(tf.reduce_mean(h) + 0.1 * own + 0.1 * tf.losses.get_regularization_loss())


@pytest.mark.parametrize('n', [2, 3])
def test_each_dense_variable_crosses_to_each_tower_once_and_a_table_never(n):
    data = harness.rows(np.ones([6, 3], np.float32), np.arange(6))
    with harness.started(greedy, data, harness.config('parameter_server', n, global_batch_size=6, clip_norm=1.0)) as run:
        found = transfers(run)
    assert found == {(name, f'CPU:{k + 1}'): [2 if k else 1] for name in ('w', 'b') for k in range(n)}


def test_mirrored_variables_do_not_cross_at_all():
    data = harness.rows(np.ones([6, 3], np.float32), np.arange(6))
    with harness.started(greedy, data, harness.config('mirrored', 2, global_batch_size=6, clip_norm=1.0)) as run:
        assert not [transfers(run, source) for source in ('CPU:0', 'CPU:1', 'CPU:2') if transfers(run, source)]


def test_a_view_reads_once_where_it_is_used_and_names_itself_as_the_variable(graph):
    w = make()
    seen = variables.view(w, '/cpu:2')
    before = len(graph.get_operations())
    with tf.name_scope('tower'), tf.device('/cpu:1'):
        first, second = tf.convert_to_tensor(seen), seen.value()
    assert first is second and first.device == '/device:CPU:2' and first.op.name.endswith('net/w/to_tower')
    assert [op.type for op in graph.get_operations()[before:]] == ['ReadVariableOp', 'Identity']
    assert seen.name == 'net/w:0' and seen.op is w.op and seen.shape == w.shape
    assert isinstance(seen, type(w)) and isinstance(seen, tf.Variable) == isinstance(w, tf.Variable)
    assert variables.view(w, '/cpu:2', name='other:0').name == 'other:0'


def test_a_view_equals_its_original_and_nothing_else(graph):
    w, other = make(), make('other')
    seen = variables.view(w, '/cpu:1')
    assert seen == w and w == seen and not seen != w
    assert seen != other and other != seen and seen != 1 and seen is not None
    assert seen in [other, w] and w in [seen] and {seen} == {w} and len({seen, w, other}) == 2
    assert variables.original(seen) is w and variables.original(w) is w


def test_a_view_is_assigned_as_the_variable(graph):
    w = make()
    seen = variables.view(w, '/cpu:1')
    with tf.control_dependencies([tf.convert_to_tensor(seen)]):
        first = seen.assign([4.0, 5.0, 6.0])
    with tf.control_dependencies([first]):
        second = tf.assign_sub(seen, [1.0, 1.0, 1.0])
    with tf.control_dependencies([second]):
        third = tf.scatter_add(seen, [0], [10.0])
    with tf.control_dependencies([third]):
        results = [w.read_value(), seen.read_value(), tf.identity(seen)]
    new, fresh, cached = run_once(results)
    np.testing.assert_array_equal(new, [13, 4, 5])
    np.testing.assert_array_equal(fresh, new)
    np.testing.assert_array_equal(cached, [1, 2, 3])  # the value that the step began with


def in_cond(w, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(w * x), lambda: 0.0) + tf.reduce_sum(w * x)


def in_loop(w, x):
    return tf.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s + tf.reduce_sum(w * x)), [0, 0.0])[1]


def in_function(w, x):
    return tf.function(lambda: tf.reduce_sum(w * x) * 2, autograph=False)()


def as_argument(w, x):
    return tf.function(lambda v: tf.reduce_sum(v * x) * 2, autograph=False)(w)


def in_scan(w, x):
    return tf.reduce_sum(tf.scan(lambda _, row: w * row, tf.stack([x, x]), tf.zeros_like(x)))


def in_custom_gradient(w, x):
    @tf.custom_gradient
    def double(value):
        return value * 2, lambda g: g * 2

    return tf.reduce_sum(double(w * x))


def by_slices(w, x):
    return 2 * (w[0] * x[0] + tf.reduce_sum(w[1:] * x[1:]))


def by_gathering(w, x):
    return tf.reduce_sum(tf.gather(w, [0, 0, 1, 1, 2, 2]) * tf.gather(x, [0, 0, 1, 1, 2, 2]))


def by_gathering_nd(w, x):
    return 2 * tf.reduce_sum(tf.gather_nd(w, [[0], [1], [2]]) * x)


USES = [in_cond, in_loop, in_function, as_argument, in_scan, in_custom_gradient, by_slices, by_gathering, by_gathering_nd]


@pytest.mark.parametrize('use', USES)
@harness.each_strategy
def test_a_variable_may_be_used_in_any_way(strategy, use):
    """Loss 2 * sum(w * x) over two towers, the variable created inside the branch or loop too."""

    def model(x, *, training):
        def w():
            with tf.variable_scope('', reuse=tf.AUTO_REUSE):
                return harness.variable('w', [1.0, 2.0, 3.0])

        class Lazy:  # asked for where it is used
            def __mul__(self, other):
                return w() * other

        x = x[0]
        loss = use(w(), x)
        if use in (in_cond, in_loop, in_scan):
            loss = (loss + use(Lazy(), x)) / 2
        return towers.ModelOutput(loss + 0 * tf.reduce_sum(w()))

    data = harness.rows(np.array([[1, 2, 3], [3, 2, 1]], np.float32))
    [report], found = harness.train(model, data, harness.config(strategy, 2, global_batch_size=2, learning_rate=0.1))
    np.testing.assert_allclose(report['loss'], 24, rtol=1e-6)
    np.testing.assert_allclose(found['w'], [1 - 0.4, 2 - 0.4, 3 - 0.4], rtol=1e-6)


def test_seen_as_swaps_the_trainable_collection_and_puts_it_back(graph):
    first = make('first')
    with variables.seen_as(lambda v: variables.view(v, '/cpu:1')) as localise:
        assert tf.trainable_variables()[0] is localise(first) is not first
        second = make('second')
        assert tf.trainable_variables()[1] is second
        assert localise(second) is tf.trainable_variables()[1] is not second
    assert all(a is b for a, b in zip(tf.trainable_variables(), [first, second], strict=True))
    with pytest.raises(RuntimeError), variables.seen_as(lambda v: variables.view(v, '/cpu:1')):
        raise RuntimeError
    assert tf.trainable_variables()[0] is first


def test_a_copy_is_local_beside_its_original_and_starts_at_zero(graph):
    w = make('net/layer/w', device='/cpu:0')
    with tf.name_scope('somewhere'):
        copy = variables.copy(w, 2, '/cpu:2')
        top = variables.copy(make('top'), 1, '/cpu:1')
    assert (copy.op.name, top.op.name) == ('net/layer/replica_2/w', 'replica_1/top')
    assert copy.device == '/device:CPU:2' and copy.shape == w.shape
    assert copy in tf.local_variables() and copy not in tf.global_variables() and copy not in tf.trainable_variables()
    np.testing.assert_array_equal(run_once(copy), [0, 0, 0])


def test_rooted_and_local_variables_are_named_without_the_scope_they_are_made_in(graph):
    with tf.name_scope('apply'):
        with variables.rooted():
            slot = tf.Variable(1.0, name='slot', trainable=False)
        with variables.local():
            hidden = tf.Variable(1.0, name='hidden')
    assert (slot.op.name, hidden.op.name) == ('slot', 'hidden')
    assert slot in tf.global_variables() and hidden in tf.local_variables() and hidden not in tf.trainable_variables()


@pytest.mark.parametrize(
    ('value', 'dtype'), [([1, 2, 3], tf.int64), ([True, False], tf.bool), (['a', 'b'], tf.string), ([1.0, 2.0], tf.float64)]
)
@harness.each_strategy
def test_state_of_any_type_is_shared(strategy, value, dtype):
    def model(x, *, training):
        state = tf.get_variable('state', initializer=tf.constant(value, dtype), trainable=False)
        size = tf.cast(tf.size(state), tf.float32)
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 1.0) * x * size))

    _, found = harness.train(model, harness.numbers(1, 2), harness.config(strategy, 2, global_batch_size=2))
    assert found['state'].tolist() == np.array(value, found['state'].dtype).tolist() or dtype == tf.string
    assert found['w'] == 1 - 1.5 * len(value)


def test_variables_go_where_the_fewest_bytes_are():
    place = variables.by_bytes(['/job:ps/task:0', '/job:ps/task:1'])
    sizes = [([10], tf.float32), ([4], tf.float32), ([4], tf.float32), ([1], tf.float64), ([], tf.float32)]
    assert [place({'shape': shape, 'dtype': dtype})[-1] for shape, dtype in sizes] == ['0', '1', '1', '1', '0']
