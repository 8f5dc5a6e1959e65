"""An input in shards: every example once in each pass, whoever reads it and wherever it goes on; what can't be cut is refused."""

import contextlib
import itertools
import logging

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers as towers_lib
from towers import config, structs
from towers.input import cutting, inputs, positions, schedule, shards

N, SIZE, SHARDS = 50, 8, 6  # a pass has six batches of 8 and one of 2
EACH = 2  # towers on a machine
FILES = [9, 1, 14, 3, 8, 2, 7, 6]  # records of each


def rows(n=N):
    return tf.data.Dataset.range(n)


def files():
    firsts = np.cumsum([0, *FILES[:-1]])
    return tf.data.Dataset.from_tensor_slices(np.stack([firsts, FILES], 1))


def records(file):
    return tf.data.Dataset.range(file[0], file[0] + file[1])


def same(x):
    return x


def padded(x):
    return {'id': x, 'tokens': tf.fill([1 + x % 3], x)}


def known():
    """The records that a table has."""
    numbers = tf.constant([x for x in range(N) if x % 7 != 1], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, numbers), -1)
    return files().flat_map(records).map(table.lookup).filter(lambda x: x >= 0)


def queued():
    queue = tf.queue.FIFOQueue(9, tf.int64, [])
    return rows().map(lambda x: x + queue.dequeue())


DATASETS = {
    'in order': rows,
    'shuffle': lambda: rows().shuffle(N),
    'shuffle, map, shuffle': lambda: rows().shuffle(N, seed=3).map(same, num_parallel_calls=2).shuffle(5).prefetch(2),
    'files': lambda: files().flat_map(records),
    'files, interleave, shuffle': lambda: files().shuffle(8).interleave(records, cycle_length=2).shuffle(6).map(same),
    'files of few examples': lambda: files().flat_map(records).filter(lambda x: tf.not_equal(x % 7, 1)),
    'files of few examples, by a table': known,
    'padded': lambda: rows().shuffle(N).map(padded),
    'pairs': lambda: rows().map(lambda x: (x, {'twice': 2 * x})),
    'sparse': lambda: rows().map(lambda x: {'id': x, 'more': tf.sparse.from_dense(tf.one_hot(x % 4, 4, dtype=tf.int64))}),
    'cache': lambda: rows().map(same).cache().shuffle(N),
    'taken': lambda: rows(70).take(N).map(same),
}


def wanted(name):
    return [x for x in range(N) if 'few' not in name or x % 7 != 1]


def towers(machines):
    return [structs.Tower(i, (f'/cpu:{1 + i % 4}',), f'/cpu:{i // EACH}') for i in range(machines * EACH)]


class Reader:
    """The batches of an input in shards over so many machines, which CPU devices stand in for."""

    def __init__(self, make, machines, *, count=SHARDS, seed=1, known=None, **settings):
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.set_random_seed(seed)
            placed = towers(machines)
            hosts = list(dict.fromkeys(tower.host for tower in placed))
            threads = {f'{name[:5]}_op_parallelism_threads': number for name, number in harness.THREADS.items()}
            self.session = tf.Session(config=tf.ConfigProto(device_count={'CPU': 5}, **threads))
            opened = inputs.open_source(make, host=hosts[0])
            self.cut = cutting.cut(opened.passes, count, hosts, ask=self.session.run, known=known)
            section = config.InputConfig(global_batch_size=SIZE, **settings)
            self.input = shards.training(self.cut, section, placed, seed=seed)
            self.session.run([tf.local_variables_initializer(), tf.tables_initializer()])
            self.session.run(self.input.initializer)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.session.close()

    def step(self):
        """The ids of a step, in the order of the global batch."""
        batches = [(batch.features, batch.examples, batch.first) for batch in self.input.batches]
        fetches = [batches, self.input.examples, self.input.mark.advance]
        found, total, _ = self.session.run(fetches)
        ids = []
        for features, count, first in found:
            own = ids_of(features)
            assert len(own) == max(count, 1)  # a row stands in
            assert not count or first == len(ids)
            ids += own[:count].tolist()
        assert len(ids) == total
        return ids

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def place(self):
        return self.session.run(self.input.taken).tolist()

    def go_to(self, place):
        self.input.go_to(self.session, place, None)


def ids_of(features):
    if isinstance(features, dict):
        return features['id']
    return features[0] if isinstance(features, tuple) else features


CASES = [*itertools.product(DATASETS, (2,)), ('shuffle', 1), ('files', 3), ('files of few examples, by a table', 1)]


@pytest.mark.parametrize(('name', 'machines'), CASES)
def test_each_pass_has_every_example_once_in_whole_batches(name, machines):
    expected = wanted(name)
    count = -(-len(expected) // SIZE)
    with Reader(DATASETS[name], machines, count=4 if 'files' in name else SHARDS) as reader:
        assert sum(reader.cut.examples) == reader.input.epoch_examples == len(expected)
        for number in range(3):
            found = reader.steps(count)
            assert [len(ids) for ids in found] == [SIZE] * (count - 1) + [len(expected) - SIZE * (count - 1)]
            assert sorted(itertools.chain(*found)) == expected
            assert reader.place() == [number, count, *reader.cut.examples]


def test_passes_over_shuffled_shards_differ_and_those_of_others_do_not():
    orders = {}
    for name in ('shuffle', 'in order', 'files, interleave, shuffle'):
        with Reader(DATASETS[name], 2) as reader:
            orders[name] = [list(itertools.chain(*reader.steps(7))) for _ in range(2)]
    assert [first == second for first, second in orders.values()] == [False, True, False]
    with Reader(DATASETS['shuffle'], 2, seed=2) as reader:
        assert list(itertools.chain(*reader.steps(7))) != orders['shuffle'][0]
    with Reader(DATASETS['shuffle'], 2) as reader:
        assert list(itertools.chain(*reader.steps(7))) == orders['shuffle'][0]


@pytest.mark.parametrize('name', ['shuffle, map, shuffle', 'files of few examples'])
def test_a_pass_goes_on_where_others_left_it_on_any_number_of_machines(name):
    expected = wanted(name)
    count = -(-len(expected) // SIZE)
    with contextlib.ExitStack() as closing:
        readers = {machines: closing.enter_context(Reader(DATASETS[name], machines, count=4)) for machines in (1, 2, 3)}
        found, place = [], None
        for machines, steps in ((3, 2), (2, 1), (3, count - 3), (1, 3), (2, count - 3), (3, 1)):  # also at the end of a pass
            if place is not None:
                readers[machines].go_to(place)
                assert readers[machines].place() == place
            found += readers[machines].steps(steps)
            place = readers[machines].place()
            assert place[:2] == [(len(found) - 1) // count, (len(found) - 1) % count + 1]
            assert sum(place[2:]) == min(SIZE * place[1], len(expected))
    for number in range(2):
        mine = found[count * number : count * (number + 1)]
        assert [len(ids) for ids in mine] == [SIZE] * (count - 1) + [len(expected) - SIZE * (count - 1)]
        assert sorted(itertools.chain(*mine)) == expected


def test_on_as_many_machines_the_same_examples_follow_a_place():
    with Reader(DATASETS['files, interleave, shuffle'], 2, count=8) as reader:
        found, places = [], []
        for _ in range(16):
            found.append(reader.step())
            places.append(reader.place())
        for number in (6, 13):  # the end of a pass
            reader.go_to(places[number])
            assert reader.steps(2) == found[number + 1 : number + 3]


@pytest.mark.parametrize('machines', [1, 2, 3, 7])
@pytest.mark.parametrize('examples', [[5], [3, 0, 9, 1], [1] * 12, [100, 1, 1], [7, 7, 7, 6, 6]], ids=str)
def test_a_schedule_gives_the_batch_in_proportion_and_takes_nothing_back(examples, machines):
    owner = schedule.owners(examples, machines)
    with tf.Graph().as_default(), tf.Session() as session:
        order = tf.range(len(examples) - 1, -1, -1, dtype=tf.int64)
        made = schedule.made(tf.constant(examples, tf.int64), tf.constant(owner, tf.int64), order, size=4, machines=machines)
        before = made.before()
        given, found, own, first = session.run(
            [made.given, made.rows, [made.own(machine) for machine in range(machines)], schedule.taken(made, before, made.given[0])]
        )
    held = [sum(count for count, machine in zip(examples, owner, strict=True) if machine == index) for index in range(machines)]
    assert given[-1].tolist() == held
    assert found.min() >= 0
    assert found.sum(1).tolist() == [min(4, sum(examples) - 4 * step) for step in range(-(-sum(examples) // 4))]
    ideal = np.minimum(4 * np.arange(1, len(given) + 1), sum(examples))[:, np.newaxis] * np.array(held) / sum(examples)
    assert np.abs(given - ideal).max() < 2
    assert sorted(itertools.chain(*own)) == [shard for shard, count in enumerate(examples) if count]
    assert first.sum() == min(4, sum(examples))
    for mine in own:
        begun = [shard for shard in mine if first[shard]]
        assert all(first[shard] == examples[shard] for shard in begun[:-1])  # one after the other
        assert begun == list(mine[: len(begun)])


def test_shards_go_to_machines_by_their_size():
    assert schedule.owners([5, 5, 5, 5, 5, 5], 3) == (0, 1, 2, 0, 1, 2)
    assert schedule.owners([1, 9, 1, 1, 8], 2) == (1, 0, 0, 1, 1)
    assert set(schedule.owners([0, 0, 4, 1], 2)[2:]) == {0, 1}


def cut_of(make, count=SHARDS, machines=1, **how):
    """The examples of the shards of a dataset."""
    with Reader(make, machines, count=count, **how) as reader:
        return reader.cut.examples


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(range(10)), tf.int64, [])


REFUSED = {
    'endless': (lambda: rows().repeat(), SHARDS, r'--input_shards=6 needs a dataset that ends, got an endless one; use take\(n\)'),
    'few': (
        lambda: rows(4).map(same),
        6,
        'can not be cut into --input_shards=6: no place of it has more than 4 elements; give --input_shards=4',
    ),
    'generator': (generated, 2, 'can not be cut into --input_shards=2: .*; begin it with from_tensor_slices of file names or of numbers'),
    'filtered before a batch': (lambda: rows().filter(lambda x: x > 3).batch(2).unbatch(), 2, 'of no place is it known how many elements'),
    'few with examples': (
        lambda: files().flat_map(records).filter(lambda x: x < 12),
        8,
        '3 shards have examples, 4 machines need one each',
    ),
    'queue': (
        queued,
        SHARDS,
        "uses 'input/fifo_queue' .*which is in one place only; expected operations that each pipeline can have for itself",
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_can_not_be_cut_is_refused(case):
    make, count, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        cut_of(make, count, {'few with examples': 4, 'queue': 2}.get(case, 1))


def test_examples_are_counted_where_they_are_not_known_and_no_earlier_count_is(caplog):
    counted = [9 + 8, 1 + 2, 14 + 7, 3 + 6]
    with caplog.at_level(logging.INFO, logger='absl'):
        assert cut_of(lambda: rows().map(same).shuffle(5)) == (9, 9, 8, 8, 8, 8)
        assert cut_of(lambda: files().flat_map(records).apply(tf.data.experimental.assert_cardinality(8)), 8) == (1,) * 8
        assert 'counted' not in caplog.text
        assert list(cut_of(DATASETS['files'], 4, 3)) == counted
        assert caplog.text.count('The examples of 4 shards are counted') == 1
        assert list(cut_of(DATASETS['files'], 4, 3, known=counted)) == counted
    assert caplog.text.count('are counted') == 1
    assert f'The dataset is cut into 4 shards behind the TensorSliceDataset made at {__file__}' in caplog.text


def test_another_number_of_examples_than_was_counted_is_an_error():
    with Reader(DATASETS['files'], 1, count=4, known=[17, 4, 20, 9]) as reader:
        with pytest.raises(tf.errors.FailedPreconditionError, match='expected to contain 4 elements but contained only 3'):
            reader.steps(7)


def test_data_without_a_position_is_refused_as_without_shards():
    with Reader(lambda: rows().map(lambda x: x + tf.random.uniform([], 0, 2, tf.int64, seed=3)), 2) as reader:
        with reader.graph.as_default(), pytest.raises(ValueError, match="position can't be saved: RandomUniformInt in the MapDataset"):
            positions.require(reader.session, reader.input)


def test_shards_need_a_pipeline_for_each_machine():
    with pytest.raises(ValueError, match='--input_shards=4 gives each machine a pipeline of its own, got --input_pipeline=sharded'):
        harness.config(input_shards=4, input_pipeline='sharded')


def test_a_passes_end_and_its_gradient_are_those_of_the_examples():
    """A step moves the variable by the mean of its examples, on towers with unequal parts of them too; training ends by itself."""
    steps = []

    def model(batch, *, training):
        seen = tf.one_hot(batch['id'], N)
        return towers_lib.ModelOutput(
            tf.reduce_mean(batch['x']) * harness.variable('w', 0.0),
            metrics={'ids': towers_lib.Metric((tf.reduce_sum(seen, 0),), lambda ids: ids)},
        )

    def dataset():
        return rows().shuffle(N).map(lambda x: {'id': x, 'x': tf.cast(x, tf.float32)})

    settings = harness.config(n=3, global_batch_size=SIZE, input_shards=SHARDS, train_epochs=2)
    with harness.started(model, dataset, settings) as run:
        step = run.program.step
        assert run.program.total_steps == 14
        before = 0.0
        for _ in range(14):
            ids = run.session.run([step.metrics['ids'].sums[0], step.ops])[0]
            after = run.variables()['w']
            np.testing.assert_allclose(before - after, np.flatnonzero(ids).mean(), rtol=1e-4)
            before = after
            steps.append(ids)
        with pytest.raises(tf.errors.OutOfRangeError):
            run.session.run(step.ops)
    np.testing.assert_array_equal(np.sum(steps[:7], 0), np.ones(N))
    np.testing.assert_array_equal(np.sum(steps[7:], 0), np.ones(N))
