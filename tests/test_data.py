"""The zoo's datasets: what they hold, how they shuffle, that their position can be saved, and what a bad file says."""

import collections
import gzip
import pickle

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import data

TRAIN, TEST = 70, 10  # records of the files that the tests write; the first is decoded in two blocks


def _write(path, content, *, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + '.gz' * packed).write_bytes(gzip.compress(content) if packed else content)


def _idx_bytes(values):
    sizes = b''.join(size.to_bytes(4, 'big') for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def write_idx(folder, *, mark='-', packed=False, size=(28, 20)):
    """Writes the four files; returns split -> (images [n, h, w], labels [n])."""
    random, written = np.random.default_rng(1), {}
    for split, stem, count in (('train', 'train', TRAIN), ('test', 't10k', TEST)):
        images, labels = random.integers(0, 256, (count, *size)), random.integers(0, 10, count)
        _write(folder / f'{stem}-images{mark}idx3-ubyte', _idx_bytes(images), packed=packed)
        _write(folder / f'{stem}-labels{mark}idx1-ubyte', _idx_bytes(labels), packed=packed)
        written[split] = (images[..., None], labels)
    return written


def write_cifar(folder, *, coarse=False):
    """Writes the files of CIFAR-10, or CIFAR-100 (`coarse`); returns split -> (images [n, 32, 32, 3], labels [n])."""
    random, written = np.random.default_rng(2), {}
    parts = {'train': [f'data_batch_{i}' for i in range(1, 6)], 'test': ['test_batch']}
    parts = {'train': ['train'], 'test': ['test']} if coarse else parts
    for split, count in (('train', TRAIN), ('test', TEST)):
        images, labels = random.integers(0, 256, (count, 32, 32, 3)), random.integers(0, 100 if coarse else 10, count)
        rows = [bytes([19] * coarse + [y]) + x.transpose(2, 0, 1).astype(np.uint8).tobytes() for x, y in zip(images, labels, strict=True)]
        per = count // len(parts[split])
        for number, name in enumerate(parts[split]):
            _write(folder / f'{name}.bin', b''.join(rows[number * per : (number + 1) * per]))
        written[split] = (images, labels)
    return written


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
    written = write_cifar(folder / 'cifar-10-batches-bin')
    return _bytes_set('cifar10', folder, written)


# Each makes (Splits, split -> (images, labels) as numpy reads them) in a folder.
CASES = {
    'digits': _digits,
    'idx': lambda folder: _bytes_set('idx', folder, write_idx(folder)),
    'idx packed': lambda folder: _bytes_set('idx', folder, write_idx(folder, packed=True)),
    'idx dotted': lambda folder: _bytes_set('idx', folder, write_idx(folder, mark='.')),
    'idx dotted packed': lambda folder: _bytes_set('idx', folder, write_idx(folder, mark='.', packed=True)),
    'cifar10': lambda folder: _bytes_set('cifar10', folder, write_cifar(folder)),
    'cifar10 folder above': _unpacked_beside,
    'cifar100': lambda folder: _bytes_set('cifar100', folder, write_cifar(folder, coarse=True)),
    'synthetic': lambda folder: (data.synthetic.synthetic(shape=(4, 6, 2), classes=3, examples=(TRAIN, TEST)), None),
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
    size = splits.train_examples // 4 + 1  # passes end inside of batches
    positions, read = [], []
    for restoring in (False, True):
        with tf.Graph().as_default(), tf.Session() as session:
            iterator = tf.data.make_initializable_iterator(splits.train().repeat().batch(size).prefetch(2))
            batch = iterator.get_next()['image']
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
    assert size < 12_000 < TRAIN * np.prod(splits.shape)


def test_synthetic_classes_are_patterns_with_noise_and_splits_differ():
    splits = data.synthetic.synthetic(seed=3, shape=(16, 16, 1), classes=4, examples=(400, 100))
    train, test = _read(splits.train), _read(splits.test)
    means = [np.stack([images[labels == y].mean(0) for y in range(4)]) for images, labels in (train, test)]
    np.testing.assert_allclose(means[0], means[1], atol=0.8)
    np.testing.assert_allclose((train[0] - means[0][train[1]]).std(), 1, atol=0.05)
    assert means[0].std() > 0.8 and not set(_counted(*train)) & set(_counted(*test))
    other = _read(data.synthetic.synthetic(seed=4, shape=(16, 16, 1), classes=4, examples=(400, 100)).test)
    assert abs(other[0] - test[0]).max() > 1


def _edit(path, change):
    path.write_bytes(change(path.read_bytes()))


def _flip_last(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


IDX_IMAGES, IDX_LABELS = 'train-images-idx3-ubyte', 't10k-labels-idx1-ubyte'
WHOLE = 16 + TRAIN * 28 * 20


@pytest.mark.parametrize(
    'name, change, message',
    [
        (IDX_IMAGES, lambda b: b[:-1], rf'expected {WHOLE} bytes \(sizes \[70, 28, 20\] in the header\), got {WHOLE - 1} bytes; fetch'),
        (IDX_IMAGES, lambda b: b + b'x', rf'expected {WHOLE} bytes .*, got {WHOLE + 1} bytes; fetch this file again'),
        (IDX_IMAGES, lambda b: b[:9], 'expected a header of 16 bytes and the values, got 9 bytes'),
        (IDX_IMAGES, lambda b: b'', 'expected a header of 16 bytes and the values, got 0 bytes'),
        (IDX_IMAGES, lambda b: b'\0\0\x0d\3' + b[4:], r'expected magic number 0x00000803 \(unsigned bytes, axes: 3\), got 0x00000d03'),
        (IDX_IMAGES, lambda b: _idx_bytes(np.zeros([0, 28, 20])), r'expected one example or more, got sizes \[0, 28, 20\]'),
        (IDX_LABELS, lambda b: b[:-1], r'expected 18 bytes \(sizes \[10\] in the header\), got 17 bytes'),
        (IDX_LABELS, lambda b: _idx_bytes(np.zeros([9])), 'expected 10 labels as .*t10k-images-idx3-ubyte has images, got 9'),
        (IDX_LABELS, lambda b: b[:-1] + b'\x0a', r'expected labels 0\.\.9, got 10'),
        (IDX_LABELS, lambda b: _idx_bytes(np.zeros([10, 28, 20])), r'expected magic number 0x00000801 .*, got 0x00000803'),
        ('t10k-images-idx3-ubyte', lambda b: _idx_bytes(np.zeros([10, 28, 28])), r'expected images of \(28, 20\) as in .*, got \(28, 28\)'),
    ],
)
def test_a_bad_idx_file_is_named(name, change, message, tmp_path):
    write_idx(tmp_path)
    _edit(tmp_path / name, change)
    with pytest.raises(ValueError, match=f'{tmp_path}/{name}: {message}'):
        data.load('idx', str(tmp_path))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda b: b[:-9], rf'expected {WHOLE} bytes .* uncompressed, got \d+ bytes before the stream broke \(EOFError: '),
        (lambda b: b[:3000], rf'expected {WHOLE} bytes .* uncompressed, got \d+ bytes before the stream broke \(EOFError: '),
        (lambda b: b'', 'expected a header of 16 bytes and the values uncompressed, got 0 bytes; fetch'),
        (lambda b: _flip_last(b), rf'expected {WHOLE} bytes .* got {WHOLE} bytes before the stream broke \(BadGzipFile: CRC'),
        (lambda b: gzip.decompress(b), r'got 0 bytes before the stream broke \(BadGzipFile: Not a gzipped file'),
        (lambda b: b[:40] + bytes(40) + b[80:], 'before the stream broke'),
        (lambda b: gzip.compress(gzip.decompress(b)[:-1]), f'uncompressed, got {WHOLE - 1} bytes; fetch this file again'),
    ],
)
def test_a_bad_packed_file_is_named(change, message, tmp_path):
    write_idx(tmp_path, packed=True)
    _edit(tmp_path / f'{IDX_IMAGES}.gz', change)
    with pytest.raises(ValueError, match=f'{tmp_path}/{IDX_IMAGES}.gz: .*{message}'):
        data.load('idx', str(tmp_path))


@pytest.mark.parametrize('name, coarse, file', [('cifar10', False, 'data_batch_4.bin'), ('cifar100', True, 'test.bin')])
@pytest.mark.parametrize(
    'change, message',
    [
        (lambda b: b[:-1], r'expected a multiple of (3073|3074) bytes above 0, got \d+ bytes; unpack cifar-100?-binary\.tar\.gz there'),
        (lambda b: b'', r'expected a multiple of (3073|3074) bytes above 0, got 0 bytes; unpack'),
        (lambda b: bytes([200, 200]) + b[2:], r'expected labels 0\.\.(9|99), got 200'),
    ],
)
def test_a_bad_cifar_file_is_named(name, coarse, file, change, message, tmp_path):
    write_cifar(tmp_path, coarse=coarse)
    _edit(tmp_path / file, change)
    with pytest.raises(ValueError, match=f'{tmp_path}/{file}: {message}'):
        data.load(name, str(tmp_path))


@pytest.mark.parametrize(
    'text, message',
    [
        ('1,2,3\n' * 9, r"line 1: expected 65 whole numbers of 0\.\.16, got '1,2,3'; fetch this file again"),
        ('0,' * 63 + '17,3\n' + ('0,' * 64 + '3\n') * 9, r'line 1: expected 65 whole numbers of 0\.\.16'),
        (('0,' * 64 + '3\n') * 9 + '0,' * 64 + '-3\n', 'line 10: expected 65 whole'),
        (('0,' * 64 + '12\n') * 9, r'expected labels 0\.\.9, got 12'),
        ('', 'expected at least 5 whole lines uncompressed, got 0 bytes'),
        (('0,' * 64 + '1\n') * 9 + '0,' * 64 + '1', 'expected at least 5 whole lines uncompressed, got 1299 bytes'),
    ],
)
def test_a_bad_digits_file_is_named(text, message, tmp_path):
    (tmp_path / 'digits.csv.gz').write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=f'{tmp_path}/digits.csv.gz: {message}'):
        data.load('digits', str(tmp_path))


def test_a_cut_digits_file_is_named(tmp_path):
    whole = data.digits.__file__.replace('digits.py', 'digits.csv.gz')
    with open(whole, 'rb') as source:
        (tmp_path / 'digits.csv.gz').write_bytes(source.read()[:20000])
    with pytest.raises(ValueError, match='digits.csv.gz: expected at least 5 whole lines uncompressed, got .* before the stream broke'):
        data.load('digits', str(tmp_path))


@pytest.mark.parametrize(
    'name, write, missing, message',
    [
        ('idx', write_idx, IDX_LABELS, 'Expected t10k-labels-idx1-ubyte or .* in .*, found none; put the four files of the set there'),
        ('cifar10', write_cifar, 'data_batch_3.bin', r'Expected data_batch_3.bin in .*, found none; unpack cifar-10-binary\.tar\.gz'),
        ('digits', lambda folder: _write(folder / 'x', b''), 'x', 'Expected digits.csv.gz in .*, found none; it is part of the project'),
    ],
)
def test_a_missing_file_is_named(name, write, missing, message, tmp_path):
    write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        data.load(name, str(tmp_path))


@pytest.mark.parametrize('name', ['idx', 'cifar10', 'cifar100', 'digits'])
def test_a_wrong_folder_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f'{name!r} expected a folder at {tmp_path}/none, found nothing there; --data_dir is'):
        data.load(name, str(tmp_path / 'none'))
    (tmp_path / 'file').write_bytes(b'')
    with pytest.raises(FileNotFoundError, match='found a file'):
        data.load(name, str(tmp_path / 'file'))


@pytest.mark.parametrize('name', ['idx', 'cifar10', 'cifar100'])
def test_no_folder_is_refused(name):
    with pytest.raises(ValueError, match=f'Dataset {name!r} reads files, got no folder; give --data_dir, a folder with'):
        data.load(name)


def test_an_unknown_dataset_has_near_names():
    with pytest.raises(ValueError, match=r"Unknown dataset 'cifar'; did you mean cifar10 or cifar100\? The zoo has digits, idx,"):
        data.load('cifar')


def test_synthetic_sizes_are_checked():
    with pytest.raises(ValueError, match=r'wants sizes of 1 or more, got shape=\(0, 8, 1\), classes=10, examples=\(6400, 1280\)'):
        data.synthetic.synthetic(shape=(0, 8, 1))
