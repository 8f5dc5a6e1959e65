"""Sparse updates by rows give what numpy gives, and where TensorFlow has the same rule what TensorFlow gives."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import rows

RATE, STEPS = 0.1, 4
IDS = [[1, 1, 4, 0], [4, 1], [3, 3, 3], [0, 5, 1, 0, 1]]  # rows repeat, and row 2 never comes


def _momentum(v, slots, row, g, t, nesterov=False):
    slots['momentum'][row] = 0.9 * slots['momentum'][row] + g
    v[row] -= RATE * (g + 0.9 * slots['momentum'][row] if nesterov else slots['momentum'][row])


def _nesterov(v, slots, row, g, t):
    _momentum(v, slots, row, g, t, nesterov=True)


def _adagrad(v, slots, row, g, t):
    slots['accumulator'][row] += g**2
    v[row] -= RATE * g / np.sqrt(slots['accumulator'][row])


def _lazy_adam(v, slots, row, g, t):
    slots['m'][row] = 0.8 * slots['m'][row] + 0.2 * g
    slots['v'][row] = 0.9 * slots['v'][row] + 0.1 * g**2
    v[row] -= RATE * np.sqrt(1 - 0.9**t) / (1 - 0.8**t) * slots['m'][row] / (np.sqrt(slots['v'][row]) + 1e-3)


RULES = {
    'momentum': (lambda rate: rows.Momentum(rate, 0.9), _momentum, {'momentum': 0.0}, lambda rate: tf.train.MomentumOptimizer(rate, 0.9)),
    'nesterov': (
        lambda rate: rows.Momentum(rate, 0.9, use_nesterov=True),
        _nesterov,
        {'momentum': 0.0},
        lambda rate: tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=True),
    ),
    'adagrad': (rows.Adagrad, _adagrad, {'accumulator': 0.1}, tf.train.AdagradOptimizer),
    'lazy_adam': (lambda rate: rows.LazyAdam(rate, 0.8, 0.9, 1e-3), _lazy_adam, {'m': 0.0, 'v': 0.0}, None),
}


def _gradients(dtype):
    random = np.random.default_rng(3)
    return [random.normal(size=(len(ids), 2)).astype(dtype) for ids in IDS]


def _run(make, dtype, ids_type):
    """The table and the slots after all steps, by TensorFlow."""
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable('table', [6, 2], dtype, tf.ones_initializer(), use_resource=True)
        values, ids = tf.placeholder(dtype, [None, 2]), tf.placeholder(ids_type, [None])
        optimizer = make(tf.constant(RATE))
        update = optimizer.apply_gradients([(tf.IndexedSlices(values, ids, tf.constant([6, 2])), table)])
        session.run(tf.global_variables_initializer())
        for step, gradient in zip(IDS, _gradients(dtype), strict=True):
            session.run(update, {values: gradient, ids: step})
        names = optimizer.get_slot_names()
        return session.run({'table': table, **{name: optimizer.get_slot(table, name) for name in names}})


@pytest.mark.parametrize('parts', [1, 2, 64])
@pytest.mark.parametrize(('dtype', 'ids_type'), [('float32', 'int32'), ('float64', 'int64')])
@pytest.mark.parametrize('name', RULES)
def test_rows_are_updated_by_the_rule_and_others_left_alone(name, dtype, ids_type, parts, monkeypatch):
    make, rule, first, stock = RULES[name]
    monkeypatch.setattr('towers.identity.cores', lambda: parts)
    made = _run(make, dtype, ids_type)
    table = np.ones((6, 2))
    slots = {slot: np.full((6, 2), value) for slot, value in first.items()}
    for number, (ids, gradient) in enumerate(zip(IDS, _gradients('float64'), strict=True), start=1):
        for row in sorted(set(ids)):
            rule(table, slots, row, gradient[np.array(ids) == row].sum(0), number)
    for key, expected in {'table': table, **slots}.items():
        np.testing.assert_allclose(made[key], expected, rtol=1e-5, atol=1e-6)
    assert made['table'][2].tolist() == [1.0, 1.0]
    if stock is not None:
        theirs = _run(stock, dtype, ids_type)
        for key, expected in theirs.items():
            np.testing.assert_allclose(made[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', RULES)
def test_the_number_of_parts_changes_nothing(name, monkeypatch):
    found = []
    for parts in (1, 3):
        monkeypatch.setattr('towers.identity.cores', lambda parts=parts: parts)
        found.append(_run(RULES[name][0], 'float32', 'int32'))
    for key, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][key])
