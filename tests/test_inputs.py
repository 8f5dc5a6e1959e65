"""Structures and shapes of batches, their split, positions and the errors of inputs; the laws of data are in conformance."""

import collections
import functools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config
from towers.graph import devices
from towers.input import inputs, splitting

PIPELINES = ('global', 'sharded')
each_pipeline = pytest.mark.parametrize('pipeline', PIPELINES)
Pair = collections.namedtuple('Pair', 'a b')


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def place(n):
    return devices.place(config.DeviceConfig(num_gpus=n, device='cpu')).towers


def session():
    settings = config.DeviceConfig(device='cpu', **harness.THREADS)
    return tf.Session(
        config=tf.ConfigProto(
            device_count={'CPU': 5},
            intra_op_parallelism_threads=settings.intra_op_threads,
            inter_op_parallelism_threads=settings.inter_op_threads,
        )
    )


def open_source(make):
    return inputs.open_source(make, host='/cpu:0')


def training(make, n, size, **settings):
    return inputs.training(open_source(make), config.InputConfig(global_batch_size=size, **settings), place(n))


def read(source, steps):
    """[step][tower] -> (features, examples, first), the stand-ins included, and each step's number of examples."""
    fetches = [[(b.features, b.examples, b.first) for b in source.batches], source.examples]
    with session() as s:
        s.run(source.initializer)
        found = [s.run(fetches) for _ in range(steps)]
    return [parts for parts, _ in found], [int(total) for _, total in found]


@pytest.mark.parametrize('towers', [1, 2, 3, 4, 8])
@pytest.mark.parametrize('rows', [1, 2, 3, 5, 8, 13])
def test_bounds_give_the_first_towers_one_more_and_empty_ones_row_0(rows, towers):
    with session() as s:
        counts, first = s.run(splitting.bounds(tf.constant(rows, tf.int64), towers))
    parts = np.array_split(np.arange(rows), towers)
    assert counts.tolist() == [len(part) for part in parts]
    assert first.tolist() == [part[0] if len(part) else 0 for part in parts]


STRUCTURES = {
    'bare': lambda i, x: i,
    'pair': lambda i, x: (i, x),
    'single': lambda i, x: (i,),
    'dict': lambda i, x: {'id': i, 'more': {'x': x}},
    'mixed': lambda i, x: ({'id': i}, (x, tf.as_string(i))),
    'named': lambda i, x: Pair(i, x),
}


@pytest.mark.parametrize('examples', [6, 5], ids=['static', 'dynamic'])
@pytest.mark.parametrize('structure', STRUCTURES)
@each_pipeline
def test_any_structure_reaches_the_towers_as_it_is(pipeline, structure, examples):
    def make():
        data = tf.data.Dataset.from_tensor_slices((np.arange(examples), np.arange(examples * 2, dtype=np.float32).reshape(-1, 2)))
        return data.map(STRUCTURES[structure])

    source = training(make, 2, 3, input_pipeline=pipeline)
    steps, totals = read(source, 2)
    assert totals == [3, examples - 3]
    expected = [STRUCTURES[structure](i, np.array([2.0 * i, 2 * i + 1])) if structure != 'mixed' else None for i in range(examples)]
    seen = []
    for parts, total in zip(steps, totals, strict=True):
        assert [(int(n), int(first)) for _, n, first in parts] == [(total - total // 2, 0), (total // 2, total - total // 2)]
        for features, n, _ in parts:
            assert tf.nest.flatten(features)[0].shape[0] == n
            rows = [[leaf[k] for leaf in tf.nest.flatten(features)] for k in range(n)]
            seen += [tf.nest.pack_sequence_as(features, row) for row in rows]
    if structure == 'mixed':
        expected = [({'id': i}, (np.array([2.0 * i, 2 * i + 1]), str(i).encode())) for i in range(examples)]
    for found, wanted in zip(seen, expected, strict=True):
        tf.nest.assert_same_structure(found, wanted)
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
            np.testing.assert_array_equal(a, b)


@each_pipeline
def test_whole_batches_have_static_shapes_and_counts(pipeline):
    make = harness.rows(np.zeros([6, 4], np.float32))
    source = training(make, 2, 3, input_pipeline=pipeline)
    assert [b.features.shape.as_list() for b in source.batches] == [[2, 4], [1, 4]]
    assert [int(tf.get_static_value(b.examples)) for b in source.batches] == [2, 1]
    assert int(tf.get_static_value(source.examples)) == 3
    partial = training(harness.rows(np.zeros([7, 4], np.float32)), 2, 3, input_pipeline=pipeline)
    assert [b.features.shape.as_list() for b in partial.batches] == [[None, 4]] * 2


@each_pipeline
def test_ragged_shapes_are_padded_to_the_global_batch(pipeline):
    def make():
        def example(n):
            image = tf.ensure_shape(tf.fill([n, 2, 5 - n], n), [None, 2, None])
            return {'word': tf.range(n), 'size': n, 'image': image, 'text': tf.as_string(tf.range(n))}

        return tf.data.Dataset.range(1, 5).map(example)

    source = training(make, 2, 4, input_pipeline=pipeline)
    assert [b.features['image'].shape.as_list() for b in source.batches] == [[2, None, 2, None]] * 2
    [parts], _ = read(source, 1)
    image = np.concatenate([features['image'] for features, _, _ in parts])
    for n in range(1, 5):
        np.testing.assert_array_equal(image[n - 1], np.pad(np.full([n, 2, 5 - n], n), [(0, 4 - n), (0, 0), (0, n - 1)]))
    assert parts[0][0]['text'].tolist() == [[b'0', b'', b'', b''], [b'0', b'1', b'', b'']]
    words = [features['word'].tolist() for features, _, _ in parts]
    assert words == [[[0, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 2, 3]]]
    assert [features['size'].tolist() for features, _, _ in parts] == [[1, 2], [3, 4]]


@pytest.mark.parametrize('examples', [4, 3])
@each_pipeline
def test_sparse_and_ragged_tensors_are_split_by_rows(pipeline, examples):
    def make():
        data = tf.data.Dataset.range(examples)
        return data.map(lambda i: {
            'i': i,
            'sparse': tf.sparse.from_dense(tf.one_hot(i, 5, dtype=tf.int64) * (i + 1)),
            'ragged': tf.RaggedTensor.from_row_lengths(tf.fill([i + 1], i), [i + 1]),
        })  # fmt: skip

    source = training(make, 2, 4, input_pipeline=pipeline)
    fetches = [
        (
            b.features['i'],
            tf.sparse.to_dense(b.features['sparse']),
            b.features['ragged'].to_list if False else b.features['ragged'].values.values,
        )
        for b in source.batches
    ]
    with session() as s:
        s.run(source.initializer)
        found = s.run(fetches)
    parts = np.array_split(np.arange(examples), 2)
    for (ids, sparse, ragged), part in zip(found, parts, strict=True):
        assert ids.tolist() == part.tolist()
        np.testing.assert_array_equal(sparse, np.eye(5, dtype=np.int64)[part] * (part + 1)[:, None])
        assert ragged.tolist() == [i for i in part for _ in range(i + 1)]


@each_pipeline
def test_batches_end_with_the_epoch_and_epochs_are_counted(pipeline):
    source = training(lambda: tf.data.Dataset.range(5), 2, 4, input_pipeline=pipeline, train_epochs=2)
    steps, totals = read(source, 4)
    assert totals == [4, 1, 4, 1] and source.epoch_examples == 5
    assert [features.tolist() for features, _, _ in steps[1]] == [[4], [4]]  # the second tower's is a stand-in
    assert [int(n) for _, n, _ in steps[1]] == [1, 0]
    with session() as s:
        s.run(source.initializer)
        for _ in range(4):
            s.run(source.batches[0].features)
        with pytest.raises(tf.errors.OutOfRangeError):
            s.run(source.batches[0].features)


@pytest.mark.parametrize(('at', 'prefetch', 'padded'), [(3, 0, True), (5, 0, False), (2, 2, False), (4, 1, True), (4, None, False)])
@each_pipeline
def test_a_position_restores_the_next_batch_in_another_graph(pipeline, at, prefetch, padded):
    """Also next to the odd last batch of an epoch (3, 6, ...), and the next epochs are in the same order."""

    def make():
        data = tf.data.Dataset.range(10).shuffle(10, seed=3)
        return data.map(lambda i: tf.fill([i], i)) if padded else data

    settings = {'input_pipeline': pipeline, 'prefetch': prefetch}
    source = training(make, 2, 4, **settings)
    features = [b.features for b in source.batches]
    with session() as s:
        s.run(source.initializer)
        for _ in range(at):
            s.run(features)
        position = s.run(source.position)
        expected = [s.run(features) for _ in range(5)]
        assert s.run(source.position) != position
    with tf.Graph().as_default(), session() as s:
        again = training(make, 2, 4, **settings)
        assert again.fingerprint == source.fingerprint
        fed = tf.placeholder(tf.string, [])
        restore = again.restore_position(fed)
        s.run(again.initializer)
        s.run(restore, {fed: position})
        found = [s.run([b.features for b in again.batches]) for _ in range(5)]
    assert [[part.tolist() for part in step] for step in found] == [[part.tolist() for part in step] for step in expected]


def test_a_position_of_the_global_pipeline_serves_any_number_of_towers():
    source = training(lambda: tf.data.Dataset.range(10), 1, 4)
    with session() as s:
        s.run(source.initializer)
        s.run(source.batches[0].features)
        position = s.run(source.position)
        other = training(lambda: tf.data.Dataset.range(10), 4, 4)
        restore = other.restore_position(tf.constant(position))
        s.run(other.initializer)
        s.run(restore)
        assert np.concatenate(s.run([b.features for b in other.batches])).tolist() == [4, 5, 6, 7]
    assert other.fingerprint == source.fingerprint


def test_fingerprints_differ_where_positions_can_not_be_exchanged():
    def fingerprint(n=2, size=4, examples=8, dtype=np.int64, **settings):
        return training(harness.rows(np.zeros([examples], dtype)), n, size, **settings).fingerprint

    changed = [
        fingerprint(), fingerprint(size=2), fingerprint(examples=9), fingerprint(dtype=np.int32), fingerprint(train_epochs=3),
        fingerprint(input_pipeline='sharded'), fingerprint(input_pipeline='sharded', n=1),
    ]  # fmt: skip
    assert len(set(changed)) == len(changed)
    assert fingerprint() == fingerprint(n=4)


def test_a_fingerprint_holds_sizes_of_buffers_also_inside_and_no_seeds():
    def fingerprint(make):
        with tf.Graph().as_default():
            return training(make, 2, 4).fingerprint

    def shuffled(buffer, seed=None, inside=False):
        def inner(number):
            return tf.data.Dataset.range(number, number + 2)

        made = tf.data.Dataset.range(8).shuffle(buffer, seed)
        return made.flat_map(lambda number: inner(number).shuffle(2, seed=1) if inside else inner(number))

    changed = [functools.partial(shuffled, 3), functools.partial(shuffled, 5), functools.partial(shuffled, 3, inside=True)]
    assert len({fingerprint(make) for make in changed}) == 3
    assert fingerprint(changed[0]) == fingerprint(functools.partial(shuffled, 3, 7)) == fingerprint(functools.partial(shuffled, 3, 9))


@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('examples', [1, 4, 7, 12])
def test_evaluation_passes_over_every_example_once(n, examples):
    source = inputs.evaluation(open_source(lambda: tf.data.Dataset.range(examples)), 2, place(n))
    assert source.position is None and source.epoch_examples == examples
    steps = -(-examples // (2 * n))
    parts, totals = read(source, steps)
    assert sum(totals) == examples
    assert [i for step in parts for features, count, _ in step for i in features[:count].tolist()] == list(range(examples))
    with session() as s:
        s.run(source.initializer)
        assert s.run(source.ended) == (False,)
        for _ in range(steps - 1):
            s.run(source.batches[0].features)
        assert s.run(source.ended) == (True,)


def test_a_source_knows_its_size():
    sizes = [
        open_source(make)
        for make in (
            lambda: tf.data.Dataset.range(5),
            lambda: tf.data.Dataset.range(5).filter(lambda i: i > 2),
            lambda: tf.data.Dataset.range(5).repeat(),
        )
    ]
    assert [(s.size, s.endless) for s in sizes] == [(5, False), (None, False), (None, True)]


def test_a_filtered_dataset_is_read_to_its_end():
    source = training(lambda: tf.data.Dataset.range(9).filter(lambda i: i % 2 > 0), 2, 3, train_epochs=1)
    steps, totals = read(source, 2)
    assert totals == [3, 1] and [f.tolist() for f, _, _ in steps[0]] == [[1, 3], [5]] and source.epoch_examples is None


def test_deterministic_order_whatever_the_user_left_open():
    def make():
        return tf.data.Dataset.range(64).map(lambda i: i, num_parallel_calls=4, deterministic=None)

    [parts], _ = read(training(make, 2, 64), 1)
    assert np.concatenate([features for features, _, _ in parts]).tolist() == list(range(64))


@pytest.mark.parametrize(
    ('make', 'settings', 'message'),
    [
        (lambda: [1, 2], {}, r'A dataset function must return a tf.data.Dataset of single examples, got list'),
        (lambda: tf.data.Dataset.range(0), {}, r'The dataset has no examples; expected at least one'),
        (lambda: tf.data.Dataset.range(8), {'global_batch_size': 3}, r'Global batch 3 is smaller than 4 towers; .* or --num_gpus=3'),
        (lambda: tf.data.Dataset.range(8).repeat(), {'train_epochs': 2}, r'--train_epochs=2 needs a dataset that ends, got an endless one'),
    ],
)
def test_errors_say_what_to_do(make, settings, message):
    with pytest.raises(ValueError, match=message):
        inputs.training(open_source(make), config.InputConfig(**{'global_batch_size': 8, **settings}), place(4))


def test_evaluation_needs_an_end():
    with pytest.raises(ValueError, match=r'Evaluation needs a dataset that ends, got an endless one; use take\(n\)'):
        inputs.evaluation(open_source(lambda: tf.data.Dataset.range(8).repeat()), 2, place(2))


def test_operations_stay_under_one_scope(graph):
    training(lambda: tf.data.Dataset.range(7), 2, 4)
    assert {op.name.split('/')[0] for op in graph.get_operations()} == {'input'}
