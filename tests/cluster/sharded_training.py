"""The training of `logged_training.py` over records in files: `sharded_training.py TOWERS STEPS SETTINGS FOLDER`."""

import functools
import os
import pathlib
import sys

import numpy as np
import tensorflow.compat.v1 as tf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / 'faults')]

import logged_training  # noqa: E402

FILES, RECORDS, RECORD = 12, 5, 16  # bytes of a record, of which the first hold its number


def write(folder, *, records=RECORDS, record=RECORD):
    """Writes the files; records are numbered through."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(FILES):
        content = np.zeros([records, record // 8], np.int64)
        content[:, 0] = file * records + np.arange(records)
        (folder / f'part-{file}').write_bytes(content.tobytes())


def dataset(folder, record=RECORD):
    """Single examples of the files in `folder`, the files and what is near in them shuffled."""
    names = tf.data.Dataset.from_tensor_slices([os.path.join(folder, f'part-{file}') for file in range(FILES)]).shuffle(FILES)
    records = names.flat_map(lambda name: tf.data.FixedLengthRecordDataset(name, record))
    return records.map(_example, num_parallel_calls=2).shuffle(6)


def _example(record):
    number = tf.io.decode_raw(record, tf.int64)[0]
    return {'id': number, 'x': tf.random.stateless_normal([4], tf.stack([number, 7]))}


if __name__ == '__main__':
    n, steps, settings, folder = sys.argv[1:]
    logged_training.main(n, steps, settings, functools.partial(dataset, folder))
    sys.stdout.flush()
    os._exit(0)  # as there
