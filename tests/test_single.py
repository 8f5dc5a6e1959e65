"""Datasets that are batched already are refused, and no others."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.input import single

PAIRS = {'x': np.zeros((10, 3), np.float32), 'y': np.zeros(10, np.int64)}
V1, V2 = tf.data.Dataset, tf.compat.v2.data.Dataset
BATCHED = {
    'batch': lambda data: data.batch(3),
    'padded': lambda data: data.padded_batch(3),
    'in parallel, cached': lambda data: data.batch(3, num_parallel_calls=2).cache().with_options(tf.data.Options()),
    'repeated ahead': lambda data: data.repeat().batch(3).prefetch(2),
    'mapped': lambda data: data.batch(3).map(lambda row: {**row, 'x': row['x'] * 2}).take(2),
    'map_and_batch': lambda data: data.apply(tf.data.experimental.map_and_batch(lambda row: row, 3)),
}
SINGLE = {
    'rows': lambda data: data,
    'unbatched': lambda data: data.batch(3).unbatch(),
    'windows': lambda data: data.batch(3, drop_remainder=True),
    'reduced': lambda data: data.batch(3).map(lambda row: {'x': tf.reduce_sum(row['x'], 0), 'y': row['y'][0]}),
    'ragged rows': lambda data: data.map(lambda row: {'x': row['x'][: row['y']], 'y': row['x'][: row['y']]}),
    'windows of one tensor': lambda data: data.map(lambda row: row['y']).batch(4),
}


@pytest.mark.parametrize('kind', [V1, V2], ids=['v1', 'v2'])
@pytest.mark.parametrize('name', BATCHED)
def test_batches_are_refused_with_the_way_out(name, kind):
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r'batched already .*expected single examples; leave `batch` out, or .*unbatch'),
    ):
        single.require(BATCHED[name](kind.from_tensor_slices(PAIRS)))


@pytest.mark.parametrize('name', SINGLE)
def test_what_may_be_an_example_is_taken(name):
    with tf.Graph().as_default():
        single.require(SINGLE[name](V2.from_tensor_slices(PAIRS)))
