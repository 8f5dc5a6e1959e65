"""Small dataset files in the formats that the zoo reads, for the tests of models.data."""

import gzip
import struct
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

TRAIN, TEST = 70, 10  # records of the files that the tests write


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


def png(image):
    """An image of bytes [h, w, 1 or 3] as PNG (ISO/IEC 15948): no filter, every chunk with its checksum."""
    height, width, channels = image.shape
    rows = b''.join(b'\0' + row.astype(np.uint8).tobytes() for row in image)
    header = struct.pack('>IIBBBBB', width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = [(b'IHDR', header), (b'IDAT', zlib.compress(rows)), (b'IEND', b'')]
    framed = [struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data)) for kind, data in chunks]
    return b'\x89PNG\r\n\x1a\n' + b''.join(framed)


def example(image, label, *, keys=('image/encoded', 'image/class/label')):
    """A tf.train.Example of an encoded image."""
    made = tf.train.Example()
    made.features.feature[keys[0]].bytes_list.value.append(image)
    made.features.feature[keys[1]].int64_list.value.append(label)
    return made.SerializeToString()


def write_records(path, records):
    """Writes a TFRecord file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def colours(*, classes=3, size=(6, 5)):
    """split -> (images [n, h, w, 3], labels [n]), the same at each call."""
    random = np.random.default_rng(4)
    counts = {'train': TRAIN, 'test': TEST}
    return {k: (random.integers(0, 256, (n, *size, 3)), np.sort(np.arange(n) % classes)) for k, n in counts.items()}


def write_tfrecord(folder, *, shards=2, **form):
    """Writes train in `shards` files and test in one; returns what `colours` does."""
    written = colours(**form)
    for split, (images, labels) in written.items():
        records = [example(png(image), label) for image, label in zip(images, labels, strict=True)]
        count = shards if split == 'train' else 1
        for number, part in enumerate(np.array_split(np.arange(len(records)), count)):
            write_records(folder / f'{split}-{number:05d}-of-{count:05d}', [records[place] for place in part])
    return written


def write_images(folder, **form):
    """Writes train/<class>/*.png and test/<class>/*.png; returns what `colours` does."""
    written = colours(**form)
    for split, (images, labels) in written.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            write(folder / split / f'class {label}' / f'{number:03d}.png', png(image))
    return written
