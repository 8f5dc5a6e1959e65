"""What a bad, missing or wrong dataset file says, before anything trains."""

import gzip

import dataset_files
import numpy as np
import pytest

from models import data


def _edit(path, change):
    path.write_bytes(change(path.read_bytes()))


def _flip_last(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


IDX_IMAGES, IDX_LABELS = 'train-images-idx3-ubyte', 't10k-labels-idx1-ubyte'
WHOLE = 16 + dataset_files.TRAIN * 28 * 20


@pytest.mark.parametrize(
    'name, change, message',
    [
        (IDX_IMAGES, lambda b: b[:-1], rf'expected {WHOLE} bytes \(sizes \[70, 28, 20\] in the header\), got {WHOLE - 1} bytes; fetch'),
        (IDX_IMAGES, lambda b: b + b'x', rf'expected {WHOLE} bytes .*, got {WHOLE + 1} bytes; fetch this file again'),
        (IDX_IMAGES, lambda b: b[:9], 'expected a header of 16 bytes and the values, got 9 bytes'),
        (IDX_IMAGES, lambda b: b'', 'expected a header of 16 bytes and the values, got 0 bytes'),
        (IDX_IMAGES, lambda b: b'\0\0\x0d\3' + b[4:], r'expected magic number 0x00000803 \(unsigned bytes, axes: 3\), got 0x00000d03'),
        (IDX_IMAGES, lambda b: dataset_files.idx_bytes(np.zeros([0, 28, 20])), r'expected one example or more, got sizes \[0, 28, 20\]'),
        (IDX_LABELS, lambda b: b[:-1], r'expected 18 bytes \(sizes \[10\] in the header\), got 17 bytes'),
        (IDX_LABELS, lambda b: dataset_files.idx_bytes(np.zeros([9])), 'expected 10 labels as .*t10k-images-idx3-ubyte has images, got 9'),
        (IDX_LABELS, lambda b: b[:-1] + b'\x0a', r'expected labels 0\.\.9, got 10'),
        (IDX_LABELS, lambda b: dataset_files.idx_bytes(np.zeros([10, 28, 20])), r'expected magic number 0x00000801 .*, got 0x00000803'),
        (
            't10k-images-idx3-ubyte',
            lambda b: dataset_files.idx_bytes(np.zeros([10, 28, 28])),
            r'expected images of \(28, 20\) as in .*, got \(28, 28\)',
        ),
    ],
)
def test_a_bad_idx_file_is_named(name, change, message, tmp_path):
    dataset_files.write_idx(tmp_path)
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
    dataset_files.write_idx(tmp_path, packed=True)
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
    dataset_files.write_cifar(tmp_path, coarse=coarse)
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
        (
            'idx',
            dataset_files.write_idx,
            IDX_LABELS,
            'Expected t10k-labels-idx1-ubyte or .* in .*, found none; put the four files of the set there',
        ),
        (
            'cifar10',
            dataset_files.write_cifar,
            'data_batch_3.bin',
            r'Expected data_batch_3.bin in .*, found none; unpack cifar-10-binary\.tar\.gz',
        ),
        (
            'digits',
            lambda folder: dataset_files.write(folder / 'x', b''),
            'x',
            'Expected digits.csv.gz in .*, found none; it is part of the project',
        ),
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
        data.synthetic.load(shape=(0, 8, 1))
