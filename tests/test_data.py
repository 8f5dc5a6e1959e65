"""The zoo's datasets: what they hold, how they shuffle, and that their position can be saved."""

import collections
import gzip
import pickle

import dataset_files
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import data
from towers.input import passes


def _digits_rows():
    with gzip.open(data.digits.__file__.replace('digits.py', 'digits.csv.gz'), 'rt') as lines:
        return np.loadtxt(lines, delimiter=',', dtype=np.int64)


def _digits(folder):
    rows = _digits_rows()
    test = np.arange(len(rows)) % 5 == 0
    pick = {'train': rows[~test], 'test': rows[test]}
    return data.load('digits'), {k: (v[:, :64].reshape(-1, 8, 8, 1) / 16, v[:, 64]) for k, v in pick.items()}


def _bytes_set(name, folder, written):
    return data.load(name, str(folder)), {k: (images / 127.5 - 1, labels) for k, (images, labels) in written.items()}


def _unpacked_beside(folder):
    written = dataset_files.write_cifar(folder / 'cifar-10-batches-bin')
    return _bytes_set('cifar10', folder, written)


# Each makes (Splits, split -> (images, labels) as numpy reads them) in a folder.
CASES = {
    'digits': _digits,
    'idx': lambda folder: _bytes_set('idx', folder, dataset_files.write_idx(folder)),
    'idx packed': lambda folder: _bytes_set('idx', folder, dataset_files.write_idx(folder, packed=True)),
    'idx dotted': lambda folder: _bytes_set('idx', folder, dataset_files.write_idx(folder, mark='.')),
    'idx dotted packed': lambda folder: _bytes_set('idx', folder, dataset_files.write_idx(folder, mark='.', packed=True)),
    'cifar10': lambda folder: _bytes_set('cifar10', folder, dataset_files.write_cifar(folder)),
    'cifar10 folder above': _unpacked_beside,
    'cifar100': lambda folder: _bytes_set('cifar100', folder, dataset_files.write_cifar(folder, coarse=True)),
    'images': lambda folder: _bytes_set('images', folder, dataset_files.write_images(folder)),
    'tfrecord': lambda folder: _bytes_set('tfrecord', folder, dataset_files.write_tfrecord(folder)),
    'synthetic': lambda folder: (data.synthetic.load(shape=(4, 6, 2), classes=3, examples=(dataset_files.TRAIN, dataset_files.TEST)), None),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    return CASES[request.param](tmp_path)


def _read(dataset, *, passes=1):
    """Images and labels of `passes` passes, in order."""
    with tf.Graph().as_default(), tf.Session() as session:
        iterator = tf.data.make_initializable_iterator(dataset().batch(64).repeat(passes))
        batch, parts = iterator.get_next(), []
        session.run(iterator.initializer)
        try:
            while True:
                parts.append(session.run(batch))
        except tf.errors.OutOfRangeError:
            return tuple(np.concatenate([part[key] for part in parts]) for key in ('image', 'label'))


def _counted(images, labels):
    return collections.Counter((np.round(x, 4).tobytes(), int(y)) for x, y in zip(images.astype(np.float32), labels, strict=True))


def test_examples_have_the_promised_form_and_number(case):
    splits, _ = case
    for dataset, examples in ((splits.train, splits.train_examples), (splits.test, splits.test_examples)):
        with tf.Graph().as_default(), tf.Session() as session:
            made = dataset()
            assert made.element_spec == {'image': tf.TensorSpec(splits.shape, tf.float32), 'label': tf.TensorSpec([], tf.int64)}
            assert session.run(made.cardinality()) == examples
        images, labels = _read(dataset)
        assert len(images) == len(labels) == examples
        assert 0 <= labels.min() and labels.max() < splits.classes


@pytest.mark.parametrize('make', [CASES[name] for name in CASES if name != 'synthetic'])
def test_every_example_of_the_files_comes_once(make, tmp_path):
    splits, expected = make(tmp_path)
    images, labels = _read(splits.test)
    np.testing.assert_allclose(images, expected['test'][0], atol=1e-6)
    np.testing.assert_array_equal(labels, expected['test'][1])
    assert _counted(*_read(splits.train)) == _counted(*expected['train'])


def test_digits_have_1437_and_360_examples():
    splits = data.load('digits')
    assert (splits.train_examples, splits.test_examples, splits.shape, splits.classes) == (1437, 360, (8, 8, 1), 10)
    images, _ = _read(splits.train)
    assert images.min() == 0 and images.max() == 1


def test_training_is_shuffled_by_the_seed_anew_in_each_pass(case):
    splits, _ = case
    images, _ = _read(splits.train, passes=2)
    first, second = np.split(images, 2)
    again, _ = _read(splits.train, passes=2)
    np.testing.assert_array_equal(images, again)
    assert not np.array_equal(first, second)
    test, _ = _read(splits.test, passes=2)
    np.testing.assert_array_equal(*np.split(test, 2))


@pytest.mark.parametrize('name', ['digits', 'synthetic'])
def test_another_seed_is_another_order(name):
    orders = [_read(data.load(name, seed=seed).train)[1].tolist() for seed in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 3


def test_a_position_at_any_batch_of_three_passes_is_restored_exactly(case):
    splits, _ = case
    size = splits.train_examples // 4 + 1  # the last batch of a pass is smaller
    positions, read = [], []
    for restoring in (False, True):
        with tf.Graph().as_default(), tf.Session() as session:
            repeated = passes.of(splits.train()).repeated(lambda data, size=size: data.batch(size), None, may_be_empty=False)
            iterator = tf.data.make_initializable_iterator(repeated.prefetch(2))
            batch = iterator.get_next()[1]['image']
            saveable = tf.data.experimental.make_saveable_from_iterator(iterator)
            position = tf.io.serialize_tensor(saveable.specs[0].tensor)
            given = tf.placeholder(tf.string, [])
            restore = saveable.restore([tf.io.parse_tensor(given, tf.variant)], None)
            session.run(iterator.initializer)
            for number in range(12):
                if restoring:
                    session.run(restore, {given: positions[number]})
                    for expected in read[number + 1 :]:
                        np.testing.assert_array_equal(session.run(batch), expected)
                else:
                    read.append(session.run(batch))
                    positions.append(session.run(position))


def test_datasets_travel_to_another_process(case):
    splits, _ = case
    copy = pickle.loads(pickle.dumps(splits))
    for dataset, other in ((splits.train, copy.train), (splits.test, copy.test)):
        np.testing.assert_array_equal(_read(dataset)[0], _read(other)[0])


@pytest.mark.parametrize('name', ['idx', 'idx packed', 'cifar10', 'cifar100'])
def test_files_are_not_embedded_in_the_graph(name, tmp_path):
    splits, _ = CASES[name](tmp_path)
    with tf.Graph().as_default() as graph:
        tf.data.make_initializable_iterator(splits.train())
        size = graph.as_graph_def().ByteSize()
    assert size < 16_000 < dataset_files.TRAIN * np.prod(splits.shape)


def test_synthetic_classes_are_patterns_with_noise_and_splits_differ():
    splits = data.synthetic.load(seed=3, shape=(16, 16, 1), classes=4, examples=(400, 100))
    train, test = _read(splits.train), _read(splits.test)
    means = [np.stack([images[labels == y].mean(0) for y in range(4)]) for images, labels in (train, test)]
    np.testing.assert_allclose(means[0], means[1], atol=0.8)
    np.testing.assert_allclose((train[0] - means[0][train[1]]).std(), 1, atol=0.05)
    assert means[0].std() > 0.8 and not set(_counted(*train)) & set(_counted(*test))
    other = _read(data.synthetic.load(seed=4, shape=(16, 16, 1), classes=4, examples=(400, 100)).test)
    assert abs(other[0] - test[0]).max() > 1


def test_no_bytes_are_transposed_of_which_the_runtime_complains_on_some_processors(case):
    splits, _ = case
    with tf.Graph().as_default() as graph:
        splits.train()
        definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    assert [node.name for node in nodes if node.op == 'Transpose' and node.attr['T'].type == tf.uint8.as_datatype_enum] == []
