"""The links from a total to the gradient that is applied: laws 5, 6 and 8 and their corners, against numpy."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config, structs
from towers.graph import chain, finite

CPUS = tf.ConfigProto(device_count={'CPU': 4}, allow_soft_placement=False)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


@contextlib.contextmanager
def started():
    with tf.Session(config=CPUS) as session:
        session.run(tf.global_variables_initializer())
        yield session


def make_variable(value, name='w', *, dtype=tf.float32, device='/cpu:0'):
    with tf.device(device):
        return tf.get_variable(name, initializer=tf.constant(value, dtype), use_resource=True)


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices), None)


def total_of(gradients, variables, weight=1.0, loss=0.0):
    return structs.Sum(
        gradients=tuple(gradients),
        variables=tuple(variables),
        weight=tf.constant(weight),
        loss=tf.constant(loss),
        state=(),
        examples=tf.constant(1, tf.int64),
        metrics={},
    )


def values(total, session):
    """The gradients as dense arrays, None where there is none."""
    dense = []
    for gradient, variable in zip(total.gradients, total.variables, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
        dense.append(None if gradient is None else session.run(gradient))
    return dense


def check(found, expected):
    for one, value in zip(found, expected, strict=True):
        assert (one is None) == (value is None)
        if value is not None:
            np.testing.assert_allclose(one, value, rtol=1e-6)


def test_mean_divides_gradients_and_loss_by_the_weight():
    variables = make_variable([1.0, 2.0], 'a'), make_variable(np.ones([3, 1]), 'b', device='/cpu:1'), make_variable(1.0, 'c')
    total = chain.mean(total_of([tf.constant([3.0, 6.0]), slices([[1], [2]], [2, 2]), None], variables, 4.0, 10.0), normalised=False)
    with started() as session:
        check(values(total, session), [[0.75, 1.5], [[0], [0], [0.75]], None])
        assert isinstance(total.gradients[1], tf.IndexedSlices)
        assert session.run([total.loss, total.weight]) == [2.5, 1.0]


def test_a_normalised_total_is_left_alone(graph):
    total = total_of([tf.constant(3.0)], [make_variable(1.0)])
    before = len(graph.get_operations())
    assert chain.mean(total, normalised=True) is total
    assert len(graph.get_operations()) == before


def test_weight_zero_gives_zeros_whatever_the_gradients_held():
    total = total_of([tf.constant([np.nan, np.inf, 5.0])], [make_variable(np.ones(3))], weight=0.0, loss=np.nan)
    total = chain.mean(total, normalised=False)
    with started() as session:
        np.testing.assert_array_equal(values(total, session)[0], [0, 0, 0])
        assert session.run([total.loss, total.weight]) == [0, 0]


def test_mean_hides_no_fault_when_there_is_weight():
    total = chain.mean(total_of([tf.constant([np.nan, np.inf, 5.0])], [make_variable(np.ones(3))], weight=2.0), normalised=False)
    with started() as session:
        np.testing.assert_array_equal(values(total, session)[0], [np.nan, np.inf, 2.5])


@pytest.mark.parametrize('bad', [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('sparse', [False, True])
def test_finite(bad, sparse):
    found = [[1.0], [1e30 if bad is None else bad]]
    gradient = slices(found, [0, 1]) if sparse else tf.constant(found)
    variables = make_variable(np.ones([2, 1])), make_variable(1.0, 'other', device='/cpu:1'), make_variable(1.0, 'unused')
    flag = finite.everywhere(total_of([gradient, tf.constant(1.0), None], variables))
    with started() as session:
        assert flag.dtype == tf.bool and session.run(flag) == (bad is None)


@pytest.mark.parametrize('bad', [None, np.nan, np.inf])
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.float16, tf.bfloat16])
def test_finite_looks_at_other_tensors_too(bad, dtype):
    other = tf.constant([1.0, 2.0 if bad is None else bad], dtype)
    flag = finite.everywhere(total_of([tf.constant(1.0)], [make_variable(1.0)]), [other, tf.constant([3]), tf.constant('text')])
    with started() as session:
        assert session.run(flag) == (bad is None)


@pytest.mark.parametrize(
    ('entries', 'dtype', 'found'),
    [
        ([3e38, 3e38], tf.float32, False),  # the sum overflows
        ([np.inf, -np.inf], tf.float32, False),
        ([3e38, -3e38], tf.float32, True),
        ([1e300, 1.0], tf.float64, True),
        ([60000.0, 60000.0], tf.float16, True),
        ([70000.0, 1.0], tf.float16, False),  # not in the type of the variable
    ],
)
def test_finite_is_the_sum_in_the_variables_type(entries, dtype, found):
    gradient = tf.constant(entries, tf.float64 if dtype == tf.float64 else tf.float32)
    flag = finite.everywhere(total_of([gradient, tf.constant(1.0)], [make_variable([1.0, 1.0], dtype=dtype), make_variable(1.0, 'other')]))
    with started() as session:
        assert session.run(flag) == found


@pytest.mark.parametrize('what', ['finite', 'norm', 'penalty'])
def test_one_number_moves_from_each_device(what, graph):
    variables = [make_variable([1.0, 2.0], f'w{i}', device=f'/cpu:{i % 2 + 1}') for i in range(6)]
    total = total_of([tf.constant([1.0, 2.0])] * 6, variables)
    {'finite': finite.everywhere, 'norm': chain.global_norm, 'penalty': lambda total: chain.add_penalties(total, [], 0.1)}[what](total)
    [sums] = [op.inputs for op in graph.get_operations() if op.type == 'AddN' and all(tensor.op.type == 'AddN' for tensor in op.inputs)]
    assert sorted(tensor.device[-1] for tensor in sums) == ['1', '2']
    assert [len(tensor.op.inputs) for tensor in sums] == [3, 3]


def test_without_gradients_all_is_finite_and_the_norm_zero():
    total = total_of([None], [make_variable(1.0)])
    with started() as session:
        assert session.run(finite.everywhere(total)) and session.run(chain.global_norm(total)) == 0
        assert values(chain.clip(total, 1.0), session) == [None]


def test_law_6_clipping_acts_on_the_mean():
    w = make_variable([0.0, 0.0])
    total = chain.mean(total_of([tf.constant([3.0, 4.0]) + tf.constant([-3.0, 0.0])], [w], weight=2.0), normalised=False)
    with started() as session:
        np.testing.assert_allclose(values(chain.clip(total, 1.0), session)[0], [0, 1], rtol=1e-6)


@pytest.mark.parametrize('norm', [1.0, 5.0, 100.0])
def test_clip_is_the_global_norm_over_all_variables_with_rows_summed_first(norm):
    variables = make_variable([0.0] * 2, 'a'), make_variable(np.ones([3, 2]), 'b', device='/cpu:1'), make_variable(1.0, 'c')
    total = total_of([tf.constant([3.0, 4.0]), slices([[4, 1], [-4, 1], [0, 12]], [2, 2, 0]), None], variables)
    expected = [np.array([3.0, 4.0]), np.array([[0, 12.0], [0, 0], [0, 2.0]]), None]
    length = np.sqrt(9 + 16 + 144 + 4)
    clipped = chain.clip(total, norm)
    with started() as session:
        np.testing.assert_allclose(session.run(chain.global_norm(total)), length, rtol=1e-6)
        np.testing.assert_allclose(session.run(chain.global_norm(clipped)), min(norm, length), rtol=1e-6)
        check(values(clipped, session), [None if value is None else value * min(1, norm / length) for value in expected])
        assert sorted(session.run(clipped.gradients[1].indices)) == [0, 2]


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_norm_that_is_not_finite_makes_all_gradients_nan(bad):
    total = total_of([tf.constant([1.0, bad]), tf.constant(2.0)], [make_variable([0.0, 0.0]), make_variable(1.0, 'other')])
    with started() as session:
        assert all(np.isnan(value).all() for value in values(chain.clip(total, 1.0), session))


def test_zero_gradients_stay_zero_when_clipped():
    with started() as session:
        total = chain.clip(total_of([tf.zeros([2])], [tf.get_variable('z', [2])]), 1.0)
        np.testing.assert_array_equal(values(total, session)[0], [0, 0])


@pytest.mark.parametrize('spelling', ['penalty', 'l2', 'both'])
def test_law_8_the_penalty_counts_once_after_the_division(spelling):
    w = make_variable(1.0)
    penalties = [0.1 * 0.5 * tf.square(w.read_value())] if spelling != 'l2' else []
    total = chain.mean(total_of([tf.constant(0.0)], [w], weight=4.0), normalised=False)
    total, penalty = chain.add_penalties(total, penalties, 0.0 if spelling == 'penalty' else 0.1)
    with started() as session:
        times = 2 if spelling == 'both' else 1
        np.testing.assert_allclose(session.run(penalty), 0.05 * times, rtol=1e-6)
        np.testing.assert_allclose(1.0 - values(total, session)[0], 1 - 0.1 * times, rtol=1e-6)  # 0.9 at learning rate 1


def test_penalties_reach_every_kind_of_gradient():
    start = np.array([[1.0, -2.0], [3.0, 4.0]])
    names = ('dense', 'sparse', 'none', 'unused')
    a, b, c, d = (make_variable(start * (i + 1), name, device=f'/cpu:{i}') for i, name in enumerate(names))
    b_rows = tf.gather(b.read_value(), [1, 1])
    penalties = [tf.reduce_sum(a.read_value() ** 3), 0.5 * tf.reduce_sum(tf.square(b_rows)), tf.reduce_sum(c.read_value())]
    before = [tf.constant(start, tf.float32), slices([[1, 1]], [0]), None, None]
    total, penalty = chain.add_penalties(total_of(before, [a, b, c, d]), penalties, 0.0)
    expected = [start + 3 * start**2, np.array([[1, 1], 2 * 2 * start[1]]), np.ones([2, 2]), None]
    with started() as session:
        check(values(total, session), expected)
        sums = np.sum(start**3) + np.sum((2 * start[1]) ** 2) + np.sum(3 * start)
        np.testing.assert_allclose(session.run(penalty), sums, rtol=1e-6)


def test_sparse_penalties_keep_a_sparse_gradient_sparse(caplog):
    w = make_variable([[1.0], [2.0], [3.0]])
    penalty = tf.reduce_sum(tf.square(tf.gather(w, [2, 0])))
    with caplog.at_level('WARNING'):
        total, _ = chain.add_penalties(total_of([slices([[10], [1]], [2, 2])], [w]), [penalty], 0.0)
    assert isinstance(total.gradients[0], tf.IndexedSlices) and not caplog.text
    with started() as session:
        np.testing.assert_allclose(values(total, session)[0], [[2], [0], [17]])


@pytest.mark.parametrize('spelling', ['penalty', 'l2'])
def test_a_penalty_on_all_rows_makes_sparse_dense_and_says_so_once(spelling, caplog):
    tables = [make_variable([[1.0], [2.0], [3.0]], f'table{i}') for i in range(2)]
    w = make_variable(1.0, 'other')
    penalties = [0.25 * tf.reduce_sum(tf.square(t.read_value())) for t in tables] if spelling == 'penalty' else []
    before = [*(slices([[10], [1]], [2, 2]) for _ in tables), tf.constant(1.0)]
    with caplog.at_level('WARNING'):
        total, _ = chain.add_penalties(total_of(before, [*tables, w]), penalties, 0.5 if spelling == 'l2' else 0.0)
    assert len(caplog.records) == 1 and 'dense of table0, table1:' in caplog.text
    with started() as session:
        for found in values(total, session)[:2]:
            np.testing.assert_allclose(found, [[0.5], [1], [12.5]])
    assert not any(isinstance(gradient, tf.IndexedSlices) for gradient in total.gradients)


def test_no_penalty_makes_no_change():
    total = total_of([tf.constant(1.0)], [make_variable(1.0)])
    found, penalty = chain.add_penalties(total, [], 0.0)
    with started() as session:
        assert found is total and session.run(penalty) == 0.0 and penalty.dtype == tf.float32


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16])
def test_half_precision_variables_keep_fp32_gradients(dtype):
    a, b = make_variable([1.0, 2.0], dtype=dtype), make_variable([1.0, 2.0], 'b', dtype=dtype)
    penalties = [tf.reduce_sum(a.read_value()), tf.reduce_sum(b.read_value())]
    options = config.OptimizerConfig(l2=2.0**-20, clip_norm=1e9)
    total, penalty, _ = chain.run(total_of([tf.constant([0.5, 0.5]), None], [a, b], 2.0), options, normalised=False, penalties=penalties)
    assert [gradient.dtype for gradient in total.gradients] == [tf.float32] * 2 and penalty.dtype == tf.float32
    with started() as session:
        np.testing.assert_allclose(values(total, session)[0], [1.25 + 2.0**-20, 1.25 + 2.0**-19], rtol=1e-7)
        np.testing.assert_allclose(values(total, session)[1], [1 + 2.0**-20, 1 + 2.0**-19], rtol=1e-7)
        np.testing.assert_allclose(session.run(penalty), 6 + 5 * 2.0**-20, rtol=1e-7)


def test_the_order_is_mean_then_penalty_then_clip_then_links():
    w = make_variable([0.0, 8.0])
    seen = []

    def doubled(total):
        seen.append('doubled')
        return dataclasses.replace(total, gradients=tuple(2 * gradient for gradient in total.gradients))

    def shifted(total):
        seen.append('shifted')
        return dataclasses.replace(total, gradients=tuple(gradient + 1 for gradient in total.gradients))

    options = config.OptimizerConfig(l2=1.0, clip_norm=5.0)
    total, penalty, _ = chain.run(total_of([tf.constant([12.0, 0.0])], [w], 2.0), options, normalised=False, links=[doubled, shifted])
    with started() as session:
        np.testing.assert_allclose(values(total, session)[0], [7, 9], rtol=1e-6)  # (12, 0) / 2 + (0, 8), to norm 5, * 2 + 1
        assert session.run(penalty) == 32
    assert seen == ['doubled', 'shifted']


def test_a_link_that_returns_something_else_is_named():
    def careless(total):
        return total.gradients

    with pytest.raises(ValueError, match="Link 'careless' must return a Sum with 1 gradients, got .*; return dataclasses.replace"):
        chain.follow(total_of([tf.constant(1.0)], [make_variable(1.0)]), [careless])


def test_each_variables_operations_are_on_its_device(graph):
    variables = [make_variable(np.ones([3, 1]) * i, f'w{i}', device=f'/cpu:{i}') for i in range(1, 4)]
    before = len(graph.get_operations())
    options = config.OptimizerConfig(l2=0.1, clip_norm=1.0)
    total, _, _ = chain.run(total_of([tf.ones([3, 1]), slices([[1], [1]], [1, 1]), None], variables), options, normalised=False)
    for gradient, variable in zip(total.gradients, variables, strict=True):
        assert gradient.device == variable.device
    used = {op.device for op in graph.get_operations()[before:] if op.type in ('DivNoNan', 'L2Loss', 'AddV2', 'TensorScatterAdd')}
    assert used <= {variable.device for variable in variables} | {''}
    with started() as session:
        assert np.isfinite(np.concatenate(values(total, session))).all()
