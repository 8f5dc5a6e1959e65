"""Small dataset files in the formats that the zoo reads, for the tests of models.data."""

import gzip

import numpy as np

TRAIN, TEST = 70, 10  # records of the files that the tests write; the first is decoded in two blocks


def write(path, content, *, packed=False):
    """Writes a file, as .gz where `packed`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + '.gz' * packed).write_bytes(gzip.compress(content) if packed else content)


def idx_bytes(values):
    """An IDX file of unsigned bytes."""
    sizes = b''.join(size.to_bytes(4, 'big') for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def write_idx(folder, *, mark='-', packed=False, size=(28, 20)):
    """Writes the four files; returns split -> (images [n, h, w], labels [n])."""
    random, written = np.random.default_rng(1), {}
    for split, stem, count in (('train', 'train', TRAIN), ('test', 't10k', TEST)):
        images, labels = random.integers(0, 256, (count, *size)), random.integers(0, 10, count)
        write(folder / f'{stem}-images{mark}idx3-ubyte', idx_bytes(images), packed=packed)
        write(folder / f'{stem}-labels{mark}idx1-ubyte', idx_bytes(labels), packed=packed)
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
            write(folder / f'{name}.bin', b''.join(rows[number * per : (number + 1) * per]))
        written[split] = (images, labels)
    return written
