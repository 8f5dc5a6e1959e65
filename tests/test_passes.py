"""Passes over a dataset: positions that are exact with any shuffle, orders that differ, and ends that are none."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.input import passes

N, SIZE = 23, 5  # batches of 5, 5, 5, 5, 3 in each pass


def rows(n=N):
    return tf.data.Dataset.range(n)


def files():
    """Four files of 5, 6, 7 and 5 records."""
    return tf.data.Dataset.from_tensor_slices(np.array([[0, 5], [5, 6], [11, 7], [18, 5]]))


def records(file):
    return tf.data.Dataset.range(file[0], file[0] + file[1]).map(lambda x: x)


def same(x):
    return x


PIPELINES = {
    'in order': rows,
    'shuffle': lambda: rows().shuffle(N, seed=3),
    'shuffle without a seed': lambda: rows().shuffle(7),
    'shuffle, parallel map': lambda: rows().shuffle(N, seed=3).map(same, num_parallel_calls=tf.data.AUTOTUNE),
    'shuffle, prefetch': lambda: rows().shuffle(N, seed=3).prefetch(3),
    'files, flat_map, shuffle': lambda: files().shuffle(4, seed=1).flat_map(records).shuffle(6, seed=2),
    'files, interleave, shuffle, map': lambda: (
        files()
        .shuffle(4)
        .interleave(records, cycle_length=2, num_parallel_calls=2, deterministic=True)
        .shuffle(6)
        .map(same, num_parallel_calls=2)
    ),
    'shuffle, batch, unbatch': lambda: rows().shuffle(N, seed=3).batch(4).map(same).unbatch(),
    'shuffle, cache, shuffle': lambda: rows().shuffle(N, seed=3).cache().shuffle(6, seed=2),
    'in order, cache': lambda: rows().cache(),
    'shuffle, concatenate': lambda: rows(9).shuffle(9, seed=3).concatenate(rows(14).map(lambda x: x + 9).shuffle(14, seed=3)),
    'random numbers': lambda: tf.data.Dataset.zip((rows(), tf.data.Dataset.random(seed=2, rerandomize_each_iteration=True))).map(
        lambda i, number: number * N + i
    ),
}
each_check = pytest.mark.parametrize('may_be_empty', [False, True], ids=['size known', 'size unknown'])


def batched(dataset):
    return dataset.batch(SIZE)


class Reader:
    """Batches of passes over a dataset, in a graph and session of their own."""

    def __init__(self, make, *, may_be_empty=False, count=None, arrange=batched, seed=1):
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.set_random_seed(seed)
            made = passes.of(make()).repeated(arrange, count, may_be_empty=may_be_empty).prefetch(2)
            iterator = tf.data.make_initializable_iterator(made)
            (self.place, self.batch), self._start = iterator.get_next(), iterator.initializer
            saveable = tf.data.experimental.make_saveable_from_iterator(iterator)
            self.position = tf.io.serialize_tensor(saveable.specs[0].tensor)
            self.given = tf.placeholder(tf.string, [])
            self.restore = saveable.restore([tf.io.parse_tensor(self.given, tf.variant)], None)

    def __enter__(self):
        threads = {'intra_op_parallelism_threads': harness.THREADS['intra_op_threads']}
        threads['inter_op_parallelism_threads'] = harness.THREADS['inter_op_threads']
        self.session = tf.Session(graph=self.graph, config=tf.ConfigProto(**threads))
        self.session.run(self._start)
        return self

    def __exit__(self, *error):
        self.session.close()

    def read(self, count):
        return [self.session.run(self.batch) for _ in range(count)]


CASES = [(name, False) for name in PIPELINES] + [(name, True) for name in ('in order', 'files, flat_map, shuffle')]


@pytest.mark.parametrize(('pipeline', 'may_be_empty'), CASES)
def test_passes_differ_and_what_follows_a_position_is_what_followed_it(pipeline, may_be_empty):
    with Reader(PIPELINES[pipeline], may_be_empty=may_be_empty) as reader:
        read, positions = [], []
        for _ in range(15):
            read += reader.read(1)
            positions.append(reader.session.run(reader.position))
    assert [len(batch) for batch in read] == 3 * [5, 5, 5, 5, 3]
    found = np.concatenate(read).reshape(3, N)
    np.testing.assert_array_equal(np.sort(found % N), np.broadcast_to(np.arange(N), (3, N)))
    assert len({tuple(order) for order in found}) == (1 if pipeline.startswith('in order') else 3)
    with Reader(PIPELINES[pipeline], may_be_empty=may_be_empty) as reader:
        for number, position in enumerate(positions[:-1]):
            reader.session.run(reader.restore, {reader.given: position})
            for after, batch in zip(read[number + 1 :], reader.read(14 - number), strict=True):
                np.testing.assert_array_equal(batch, after, err_msg=f'position {number}')


def test_a_shuffle_that_keeps_its_order_keeps_it():
    with Reader(lambda: rows().shuffle(N, seed=3, reshuffle_each_iteration=False)) as reader:
        first, second = (np.concatenate(reader.read(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.tolist() != sorted(first)


def test_the_order_depends_on_the_graphs_seed_and_nothing_else():
    found = []
    for seed in (1, 1, 2):
        with Reader(lambda: rows().shuffle(N), seed=seed) as reader:
            found.append(np.concatenate(reader.read(10)).tolist())
    assert found[0] == found[1] != found[2]


def test_what_a_cache_holds_is_made_in_the_first_pass_alone():
    made = []

    def slow(x):
        made.append(int(x))
        return x

    with Reader(lambda: rows().map(lambda x: tf.numpy_function(slow, [x], tf.int64)).cache().shuffle(N, seed=3)) as reader:
        reader.read(15)
    assert sorted(made) == list(range(N))


@each_check
def test_a_number_of_passes_ends(may_be_empty):
    with Reader(rows, may_be_empty=may_be_empty, count=2) as reader:
        assert np.concatenate(reader.read(10)).tolist() == 2 * list(range(N))
        with pytest.raises(tf.errors.OutOfRangeError, match='End of sequence'):
            reader.read(1)


def test_a_pass_without_examples_is_an_error():
    with Reader(lambda: rows().filter(lambda x: x > N), may_be_empty=True) as reader:
        with pytest.raises(tf.errors.InvalidArgumentError, match='A pass over the dataset gave no example; expected at least one'):
            reader.read(1)


STRUCTURES = {
    'bare': lambda x: x,
    'pair': lambda x: (x, {'twice': 2 * x}),
    'dict': lambda x: {'x': x, 'text': tf.strings.as_string(x)},
    'sparse': lambda x: {'x': tf.sparse.from_dense(tf.one_hot(x % 4, 4, dtype=tf.int64))},
    'ragged': lambda x: {'x': tf.RaggedTensor.from_row_lengths(tf.fill([x % 4], x), [x % 4])},
    'unknown rank': lambda x: tf.py_func(lambda v: v, [x], tf.int64),
}


@pytest.mark.parametrize('structure', STRUCTURES)
def test_looking_for_empty_passes_leaves_elements_as_they_are(structure):
    found = []
    for may_be_empty in (False, True):
        with Reader(lambda: rows().map(STRUCTURES[structure]), may_be_empty=may_be_empty) as reader:
            found.append(repr(reader.read(6)))
    assert found[0] == found[1]


@pytest.mark.parametrize('inner', [False, True], ids=['in a map', 'in a map inside a function'])
def test_a_closed_queue_in_a_map_is_no_end(inner):
    queues = []

    def make():
        queue = tf.queue.FIFOQueue(99, tf.int64, [])
        queues[:] = [queue.enqueue_many([tf.range(7, dtype=tf.int64)]), queue.close()]
        if inner:
            return rows(1).flat_map(lambda _: rows().map(lambda x: x + queue.dequeue()))
        return rows().map(lambda x: x + queue.dequeue())

    with Reader(make) as reader:
        for operation in queues:
            reader.session.run(operation)
        assert len(reader.read(1)[0]) == SIZE
        with pytest.raises(tf.errors.InvalidArgumentError, match='OutOfRangeError: .*queue.* is closed'):
            reader.read(1)


@pytest.mark.parametrize('cached', [False, True])
def test_a_map_keeps_the_number_of_examples(cached):
    with tf.Graph().as_default(), tf.Session() as session:
        mapped = rows().map(same).map(same, num_parallel_calls=2)
        made = passes.of(mapped.cache() if cached else mapped).make()
        assert session.run(tf.data.experimental.cardinality(made)) == N


def test_a_datasets_own_options_hold_for_its_passes():
    with tf.Graph().as_default():
        options = tf.data.Options()
        options.threading.private_threadpool_size = 3
        made = passes.of(rows().with_options(options).shuffle(4)).repeated(batched, None, may_be_empty=False)
        with pytest.warns(UserWarning, match='tf.data options'):
            assert made.options().threading.private_threadpool_size == 3


@pytest.mark.parametrize('given', [None, True, False])
def test_no_thread_tunes_the_passes_unless_it_is_asked_for(given):
    """TensorFlow's misses now and then that its iterator is closed, and holds up whatever waits for that."""
    with tf.Graph().as_default():
        options = tf.data.Options()
        if given is not None:
            options.autotune.enabled = given
        found = passes.of(rows().with_options(options)).options
        assert found.autotune.enabled == bool(given) and found.threading.private_threadpool_size == 0
