"""Encoded images in folders and in TFRecord files: each fault is told by its file and record, or left out and counted."""

import contextlib
import logging
import shutil

import dataset_files
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import data
from models.data import headers
from scripts import _flags, _zoo
from towers.input import passes

FLOWER = dataset_files.png(np.full([6, 5, 3], 90))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """Folders `images` and `tfrecord` of whole data."""
    folder = tmp_path_factory.mktemp('whole')
    dataset_files.write_images(folder / 'images')
    dataset_files.write_tfrecord(folder / 'tfrecord')
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy of `written` to be damaged."""
    return shutil.copytree(written, tmp_path / 'data')


def labels_of(dataset):
    """The labels of one pass; an error of the pass is raised."""
    with tf.Graph().as_default(), tf.Session() as session:
        repeated = passes.of(dataset()).repeated(lambda each: each.batch(16), 1, may_be_empty=False)
        iterator = tf.data.make_initializable_iterator(repeated)
        label, found = iterator.get_next()[1]['label'], []
        session.run(iterator.initializer)
        while True:
            try:
                found += session.run(label).tolist()
            except tf.errors.OutOfRangeError:
                return found


def change(path, place, value):
    content = bytearray(path.read_bytes())
    content[place] ^= value
    path.write_bytes(bytes(content))


def cut(path, left):
    path.write_bytes(path.read_bytes()[:left])


SHARD = 'train-00001-of-00002'
RECORDS = {
    'cut': (lambda path: cut(path, -30), 34, r'it is cut: it begins at byte \d+ and the file ends at byte \d+'),
    'cut in a header': (lambda path: path.write_bytes(path.read_bytes() + b'\x05\0\0\0\0\0'), 35, 'it is cut'),
    'empty': (lambda path: cut(path, 0), 0, 'the file is empty'),
    'a bit of the length': (lambda path: change(path, 0, 4), 0, 'its length, at byte 0, does not match its checksum'),
    'a bit of the data': (lambda path: change(path, 40, 1), 0, 'its data does not match its checksum'),
    'no example': (lambda path: dataset_files.write_records(path, [b'\xff\xff']), 0, r'it is no tf\.train\.Example'),
    'no label': (
        lambda path: dataset_files.write_records(path, [dataset_files.example(FLOWER, 1, keys=('image/encoded', 'label'))]),
        0,
        'it has no feature image/class/label',
    ),
    'a negative label': (
        lambda path: dataset_files.write_records(path, [dataset_files.example(FLOWER, -1)]),
        0,
        r'its label is \[-1\], expected one number from 0 on',
    ),
}


@pytest.mark.parametrize('fault', RECORDS)
def test_a_damaged_record_is_named_before_anything_trains(folder, fault):
    damage, record, reason = RECORDS[fault]
    path = folder / 'tfrecord' / SHARD
    damage(path)
    with pytest.raises(ValueError, match=rf'^{path}: record {record} is bad: {reason}.*\. Restore .*--max_bad_records=1 or more'):
        data.load('tfrecord', str(folder / 'tfrecord'))


def test_bad_records_are_left_out_up_to_a_number(folder, caplog):
    place = folder / 'tfrecord'
    change(place / SHARD, 40, 1)
    cut(place / SHARD, -30)
    images, labels = dataset_files.colours()['test']
    records = [dataset_files.example(dataset_files.png(image), label) for image, label in zip(images, labels, strict=True)]
    records[3] = dataset_files.example(b'no image', 0)
    records[5] = dataset_files.example(dataset_files.png(images[5][:, :4]), 0)
    dataset_files.write_records(place / 'test-00000-of-00001', records)
    names = [f'{place / SHARD}: record {number}' for number in (34, 0)] + [f'{place}/test-00000-of-00001: record {n}' for n in (3, 5)]
    with caplog.at_level(logging.WARNING, logger='absl'):
        splits = data.load('tfrecord', str(place), max_bad_records=4)
    assert sorted(splits.left_out) == sorted(names)
    assert (splits.train_examples, splits.test_examples) == (68, 8)
    assert [len(labels_of(split)) for split in (splits.train, splits.test)] == [68, 8]
    assert labels_of(splits.test) == [label for number, label in enumerate(labels) if number not in (3, 5)]
    for text in (
        'record 34: it is cut',
        'record 0: its data does not',
        'record 3: Unknown image file format',
        'record 5: it is 6 x 4 pixels',
    ):
        assert text in caplog.text
    assert 'Left out 4 of 80 images, at most 4 by --max_bad_records.' in caplog.text
    with pytest.raises(ValueError, match=r'So are 1 more\. .*--max_bad_records=2 or more'):
        data.load('tfrecord', str(place), max_bad_records=1)


def test_bad_images_are_left_out_up_to_a_number(folder, monkeypatch):
    place = folder / 'images'
    paths = sorted((place / 'train').rglob('*.png'))
    for path, damage in zip(paths[10:], [lambda p: cut(p, 0), lambda p: cut(p, 60), lambda p: change(p, 50, 1)], strict=False):
        damage(path)
    paths[0].write_text('no image, and the first')
    splits = data.load('images', str(place), max_bad_records=4)
    assert sorted(splits.left_out) == [str(path) for path in (paths[0], *paths[10:13])]
    assert splits.train_examples == len(labels_of(splits.train)) == 66 and splits.shape == (6, 5, 3)
    with pytest.raises(ValueError, match=rf'^{paths[10]} is bad: the file is empty\. Restore'):
        data.load('images', str(place))
    found = [dict.fromkeys(range(3), 'x'), {}]
    monkeypatch.setattr(data.images.encoded, 'faults', lambda indices, form: found)
    with pytest.raises(ValueError, match=r'So are 3 more\. .*--max_bad_records=4 or more'):
        data.load('images', str(place), max_bad_records=3)


@pytest.mark.parametrize('by_file', [False, True], ids=['classes', 'labels.txt'])
def test_with_known_classes_a_record_is_looked_at_when_it_is_read(folder, by_file):
    place = folder / 'tfrecord'
    change(place / SHARD, 40, 1)
    if by_file:
        (place / 'labels.txt').write_text('0:rose\n1:lily\n2:tulip\n')
    splits = data.load('tfrecord', str(place), **({} if by_file else {'classes': 3}))
    assert (splits.classes, splits.train_examples) == (3, 70)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf'\[{place / SHARD}: record 0 cannot be read or decoded: it is damaged'):
        labels_of(splits.train)


@pytest.mark.parametrize('name', ['images', 'tfrecord'])
def test_what_happens_to_a_file_after_the_start_is_told_by_its_name(folder, name):
    splits = data.load(name, str(folder / name))
    path = folder / name / {'images': 'train/class 1/030.png', 'tfrecord': SHARD}[name]
    path.unlink()
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf'\[{path}(: record \d+)? cannot be read or decoded'):
        labels_of(splits.train)


def test_a_label_that_is_no_class_is_told(folder):
    place = folder / 'tfrecord'
    splits = data.load('tfrecord', str(place), classes=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf'\[{place}/train-\d+-of-00002: record \d+ has label 2, expected 0\.\.1\.\]'):
        labels_of(splits.train)


def test_images_of_other_sizes_are_told_or_made_alike(folder):
    place = folder / 'images'
    other = place / 'train' / 'class 2' / '069.png'
    wide = np.zeros([8, 16, 3])
    wide[:, 4:12] = 200  # the middle, which is kept
    other.write_bytes(dataset_files.png(wide))
    splits = data.load('images', str(place))
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf'\[{other} is 8 x 16 pixels, expected 6 x 5; --data_args=size=... makes'):
        labels_of(splits.train)
    splits = data.load('images', str(place), size=4)
    assert splits.shape == (4, 4, 3) and len(labels_of(splits.train)) == 70
    with tf.Graph().as_default(), tf.Session() as session:
        iterator = tf.data.make_initializable_iterator(data.load('images', str(place), size=4, channels=1).test().batch(10))
        image = iterator.get_next()['image']
        session.run(iterator.initializer)
        assert session.run(image).shape == (10, 4, 4, 1)
        alone = tf.data.make_initializable_iterator(data.images.encoded.dataset(_only(other), _fitted(), seed=None))
        image = alone.get_next()['image']
        session.run(alone.initializer)
        np.testing.assert_allclose(session.run(image), 200 / 127.5 - 1, atol=0.2)


def _only(path):
    return data.images.encoded.Index((str(path),), np.zeros(1, np.int64), labels=np.zeros(1, np.int64))


def _fitted():
    return data.images.encoded.Form((4, 4, 3), 1, True)


def test_the_features_of_tensorflow_datasets_will_do(tmp_path):
    records = [dataset_files.example(FLOWER, label, keys=('image', 'label')) for label in (0, 1, 1)]
    for split in ('train', 'test'):
        dataset_files.write_records(tmp_path / f'flowers-{split}.tfrecord-00000-of-00001', records)
    splits = data.load('tfrecord', str(tmp_path))
    assert (splits.classes, splits.train_examples, sorted(labels_of(splits.train))) == (2, 3, [0, 1, 1])


def make_text(place):
    (place / 'train').mkdir()
    (place / 'train' / 'notes.txt').write_text('x')


FOLDERS = {
    'no test': ('tfrecord', lambda place: (place / 'test-00000-of-00001').unlink(), "files with 'test' in their names in"),
    'no shard': ('tfrecord', lambda place: (place / SHARD).unlink(), f'Expected 2 shards train in .*, {SHARD} is missing; fetch it again'),
    'no feature': (
        'tfrecord',
        lambda place: [dataset_files.write_records(path, [dataset_files.example(b'', 0, keys=('a', 'b'))]) for path in place.iterdir()],
        r"expected records with the features image/encoded and image/class/label .*, found \['a', 'b'\]",
    ),
    'no folder': ('images', lambda place: shutil.rmtree(place / 'test'), 'Expected a folder test or val or validation or valid in'),
    'no image': ('images', lambda place: shutil.rmtree(place / 'train') or make_text(place), 'expected images .* found none; put them'),
    'another class': ('images', lambda place: (place / 'test' / 'class 9').mkdir(), 'test/class 9: expected classes that train has too'),
}


@pytest.mark.parametrize('case', FOLDERS)
def test_what_is_missing_is_named(folder, case):
    name, damage, message = FOLDERS[case]
    damage(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.load(name, str(folder / name))


@pytest.mark.parametrize('name', ['images', 'tfrecord'])
def test_there_need_be_no_test_examples_where_none_are_wanted(folder, name):
    place = folder / name
    whole = data.load(name, str(place))
    for path in place.glob('test*'):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = data.load(name, str(place), with_test=False)
    assert (found.test, found.test_examples, found.train_examples) == (None, 0, whole.train_examples)
    assert labels_of(found.train) == labels_of(whole.train)
    for evaluated, said in (('none', None), (f'{__name__}:labels_of', None), (name, 'test'), ('', 'test')):
        values = _flags.define()
        _flags.parse(values, ['', f'--dataset={name}', f'--data_dir={place}', *([f'--eval_dataset={evaluated}'] if evaluated else [])])
        with contextlib.nullcontext() if said is None else pytest.raises(FileNotFoundError, match=said):
            _zoo.load(values)


@pytest.mark.parametrize(
    ('name', 'args', 'message'),
    [
        ('digits', {'max_bad_records': 1}, "for the datasets images and tfrecord, got it with 'digits', which is good or bad as a whole"),
        ('images', {'sise': 8}, r"Dataset 'images' has no argument 'sise'; did you mean size\? It takes size=None, channels=3\."),
        ('images', {'size': 0}, r'--data_args=size=\.\.\. of 1 or more, got 0'),
        ('images', {'channels': 2}, r'channels=3 \(colours\) or 1 \(grey\), got 2'),
        ('digits', {'size': 8}, "Dataset 'digits' has no argument 'size'. It takes none."),
    ],
)
def test_other_arguments_are_refused(written, name, args, message):
    with pytest.raises(ValueError, match=message):
        data.load(name, None if name == 'digits' else str(written / name), **args)


def test_the_size_of_an_image_is_read_from_its_header():
    image = np.zeros([7, 9, 3], np.uint8)
    with tf.Graph().as_default(), tf.Session() as session:
        jpeg = [tf.io.encode_jpeg(image, progressive=progressive) for progressive in (False, True)]
        contents = session.run([*jpeg, tf.io.encode_png(image)])
    bmp = b'BM' + bytes(16) + (9).to_bytes(4, 'little') + (-7).to_bytes(4, 'little', signed=True)
    gif = b'GIF89a' + (9).to_bytes(2, 'little') + (7).to_bytes(2, 'little')
    assert [headers.size(content) for content in (*contents, bmp, gif)] == 5 * [(7, 9)]
    assert [headers.size(content) for content in (b'', b'text', contents[0][:9], b'\xff\xd8' + bytes(40))] == 4 * [None]
