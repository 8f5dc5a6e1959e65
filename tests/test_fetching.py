"""Prepared callables give what `tf.Session.run` gives, for any structure, also where a structure changes between calls."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.run import fetching

Pair = collections.namedtuple('Pair', 'left right')


@pytest.fixture
def tensors():
    """A graph of three constants and a counter in a session."""
    with tf.Graph().as_default():
        count = tf.get_variable('count', [], tf.int32, tf.zeros_initializer())
        values = {'a': tf.constant(1.0), 'b': tf.constant([2.0, 3.0]), 'c': tf.constant('text'), 'n': tf.assign_add(count, 1)}
        with tf.Session() as session:
            session.run(count.initializer)
            yield session, values


def test_a_tensor_that_is_asked_for_twice_is_computed_once(tensors):
    session, v = tensors
    fetch = fetching.Fetcher(session).fetch
    assert fetch([v['n'], [v['n']], {'n': v['n']}]) == [1, [1], {'n': 1}]
    assert fetch([(v['n'],), Pair(v['n'], v['a'])]) == [(2,), Pair(2, 1.0)]


@pytest.mark.parametrize('kind', [dict, collections.OrderedDict, lambda values: collections.defaultdict(list, values)])
def test_a_structure_that_changes_is_another_one(tensors, kind):
    session, v = tensors
    fetcher, asked = fetching.Fetcher(session), kind({'x': v['a']})
    assert fetcher.fetch([asked]) == [{'x': 1.0}]
    asked['y'] = v['c']
    assert fetcher.fetch([asked]) == [{'x': 1.0, 'y': b'text'}]
    del asked['x']
    assert fetcher.fetch([asked]) == [{'y': b'text'}]


@pytest.mark.parametrize('kind', [list, type('Row', (list,), {})])
def test_a_list_that_changes_is_another_one(tensors, kind):
    session, v = tensors
    fetcher, row = fetching.Fetcher(session), kind([v['a'], v['c']])
    assert fetcher.fetch([row]) == [[1.0, b'text']]
    row.reverse()
    assert fetcher.fetch([row]) == [[b'text', 1.0]]
    nested = (kind([v['a']]), v['c'])
    assert fetcher.fetch([nested]) == [([1.0], b'text')]
    nested[0][0] = v['c']
    assert fetcher.fetch([nested]) == [([b'text'], b'text')]


def test_equal_structures_share_callables_however_often_they_are_made(tensors, monkeypatch):
    session, v = tensors
    made, make = [], session.make_callable
    monkeypatch.setattr(session, 'make_callable', lambda *args, **kwargs: made.append(args) or make(*args, **kwargs))
    fetcher, kept = fetching.Fetcher(session), (v['a'], v['b'])
    for _ in range(20):
        fetcher.fetch([kept, {'a': v['a'], 'b': [v['b']]}, (v['c'], v['a'])])
    assert len(made) <= 2  # at the second call the constant tuple is known by its identity


def test_many_structures_do_not_fill_the_memory(tensors):
    session, v = tensors
    fetcher = fetching.Fetcher(session)
    for number in range(200):
        assert fetcher.fetch([{str(number): v['a']}]) == [{str(number): 1.0}]
    assert len(fetcher._plans) <= 2 * fetching._MOST_PLANS


def test_options_bring_metadata(tensors):
    session, v = tensors
    metadata = tf.RunMetadata()
    got = fetching.Fetcher(session).fetch([v['b']], tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    np.testing.assert_array_equal(got[0], [2.0, 3.0])
    assert metadata.step_stats.dev_stats


def test_what_is_no_tensor_is_refused(tensors):
    session, v = tensors
    with pytest.raises(TypeError, match='None has invalid type'):
        fetching.Fetcher(session).fetch([v['a'], None])
