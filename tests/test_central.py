"""The sum of the towers' outputs on one device, against numpy."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph.reduce import central

PROTO = tf.ConfigProto(device_count={'CPU': 4}, allow_soft_placement=False, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def run(fetches):
    with tf.Session(config=PROTO) as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches)


def make(name='w', value=((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), **settings):
    return tf.get_variable(name, initializer=tf.constant(value), use_resource=True, **settings)


def slices(rows, values):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows), tf.constant([3, 2]))


def output(index, *, gradients=(), variables=(), state=(), examples=1, loss=0.0, weight=None, share=None, metrics=None):
    """A tower's output; `weight` is the model's own, `share` what the gradients were weighted with."""
    own = None if weight is None else tf.constant(weight)
    return structs.TowerOutput(
        tower=structs.Tower(index, (f'/cpu:{index + 1}',), '/cpu:0'),
        output=structs.ModelOutput(tf.constant(loss), weight=own),
        examples=tf.constant(examples, tf.int64),
        weight=tf.constant(0.5 if share is None else share),
        gradients=tuple(gradients),
        variables=tuple(variables),
        state=tuple(state),
        penalties=(),
        metrics=metrics or {},
        summaries=(),
    )


def test_dense_gradients_are_added_on_the_device_asked_for():
    w = make()
    g = [tf.fill([3, 2], float(k)) for k in range(3)]
    total = central.total([output(k, gradients=[g[k]], variables=[w]) for k in range(3)], device='/cpu:3')
    assert total.gradients[0].device == '/device:CPU:3' and total.variables == (w,)
    np.testing.assert_array_equal(run(total.gradients[0]), np.full([3, 2], 3.0))


def test_sparse_gradients_are_joined_and_keep_their_shape():
    w = make()
    added = central.add([slices([1], [[1, 2]]), None, slices([1, 0], [[3, 4], [5, 6]])], w)
    assert isinstance(added, tf.IndexedSlices)
    values, indices, shape = run([added.values, added.indices, added.dense_shape])
    assert values.tolist() == [[1, 2], [3, 4], [5, 6]] and indices.tolist() == [1, 1, 0] and shape.tolist() == [3, 2]
    alone = slices([2], [[1, 1]])
    assert central.add([None, alone], w) is alone


def test_a_dense_gradient_makes_the_sum_dense_and_repeated_rows_add_up():
    w = make()
    added = central.add([slices([1, 1], [[1, 2], [3, 4]]), tf.ones([3, 2]), None], w)
    np.testing.assert_array_equal(run(added), [[1, 1], [5, 7], [1, 1]])
    assert central.dense(added, w) is added


def test_a_gradient_that_no_tower_has_is_none_and_said_once(caplog):
    assert central.add([None, None], make('net/w')) is None
    assert [r.getMessage() for r in caplog.records] == ["No gradient reaches the variable 'net/w' in any tower; it is not trained."]


@pytest.mark.parametrize('own', [False, True])
def test_loss_weight_and_examples(own):
    """Shares of one batch add up to a constant 1; a model's own weights are added, and one of 0 adds nothing to the loss."""
    given = [(2.0, 1.0, 3), (4.0, 3.0, 2), (float('nan'), 0.0, 1)] if own else [(2.0, 0.25, 1), (4.0, 0.75, 3), (float('nan'), 0.0, 0)]
    outputs = [output(k, loss=x, weight=w if own else None, share=w, examples=n) for k, (x, w, n) in enumerate(given)]
    total = central.total(outputs, device='/cpu:0')
    assert central.normalised(outputs) == (not own)
    assert (tf.get_static_value(total.weight) == 1) == (not own)
    loss, weight, examples = run([total.loss, total.weight, total.examples])
    assert (loss, weight, examples) == ((14.0, 4.0, 6) if own else (3.5, 1.0, 4))


def test_metrics_are_added_part_by_part():
    def metrics(k):
        return {
            'a': structs.Metric((tf.constant(float(k)), tf.constant([k, 1])), lambda x, y: x),
            'b': structs.Metric((tf.constant(k),), abs),
        }

    total = central.total([output(k, metrics=metrics(k)) for k in range(3)], device='/cpu:0').metrics
    a, b = run([total['a'].sums, total['b'].sums])
    assert (a[0], a[1].tolist(), b) == (3.0, [3, 3], (3,))
    assert total['b'].result is abs


def writes(*pairs):
    return [structs.StateWrite(variable, kind, tf.constant(value)) for variable, kind, value in pairs]


@pytest.mark.parametrize(('statistics', 'expected'), [('mean', [0.25 * 1 + 0.75 * 5, 0.25 * 2 + 0.75 * 6, 7]), ('first', [1, 2, 7])])
def test_state_is_the_mean_by_examples_or_the_first_towers(statistics, expected):
    """In whatever order a tower lists its writes; what isn't a float is tower 0's; an empty tower adds nothing."""
    m, v = make('m', 0.0), make('v', 0.0)
    count = make('count', 0)
    outputs = [
        output(0, state=writes((m, 'assign', 1.0), (v, 'assign_sub', 2.0), (count, 'assign_add', 7)), examples=1),
        output(1, state=writes((count, 'assign_add', 9), (v, 'assign_sub', 6.0), (m, 'assign', 5.0)), examples=3),
        output(2, state=writes((m, 'assign', float('nan')), (v, 'assign_sub', float('inf')), (count, 'assign_add', 9)), examples=0),
    ]
    total = central.total(outputs, device='/cpu:0', statistics=statistics)
    assert [(w.variable.op.name, w.kind) for w in total.state] == [('m', 'assign'), ('v', 'assign_sub'), ('count', 'assign_add')]
    np.testing.assert_allclose(run([w.value for w in total.state]), expected)


def test_several_writes_of_one_variable_are_matched_in_order():
    m = make('m', 0.0)
    outputs = [output(k, state=writes((m, 'assign', 1.0 + k), (m, 'assign', 10.0 + k)), examples=1) for k in range(2)]
    assert run([w.value for w in central.total(outputs, device='/cpu:0').state]) == [1.5, 10.5]


def test_towers_that_write_different_state_are_named():
    m, v = make('m', 0.0), make('v', 0.0)
    outputs = [output(0, state=writes((m, 'assign', 1.0))), output(1, state=writes((m, 'assign', 1.0), (v, 'assign_add', 1.0)))]
    with pytest.raises(ValueError, match=r"tower_1 and tower_0 update different state: 'v' \(assign_add\); expected the same updates"):
        central.total(outputs, device='/cpu:0')
