"""Where the input goes on: at the same batch, whatever its pipeline was, and whether or not it could give its position."""

import json
import logging

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest

EXAMPLES = 22  # batches of 8: 8, 8, 6 in each pass
STEPS = 8


def dataset():
    """Examples in another order in each pass."""
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=5)


def unsized():
    """The same without a known number, so that each pass is watched for being empty."""
    return dataset().filter(lambda x: x >= 0)


def model(x, *, training):
    """Adds up codes of its examples, so that each batch is known by its loss."""
    w = tf.get_variable('w', [], initializer=tf.ones_initializer())
    return towers.ModelOutput(w * tf.reduce_mean(tf.cast(x * x, tf.float32)))


def config(folder, n=1, pipeline='global', **changes):
    settings = {'learning_rate': 1e-4, 'global_batch_size': 8, 'save_steps': None, 'train_steps': STEPS, 'log_steps': 1, **changes}
    return harness.config(n=n, input_pipeline=pipeline, model_dir=str(folder), **settings)


def losses(folder):
    """Loss by step from metrics.jsonl, later lines winning."""
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [loss for _, loss in sorted({row['step']: row['loss'] for row in rows}.items())]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    towers.train(model, dataset, config(folder))
    return losses(folder)


@pytest.mark.parametrize(('data', 'step'), [(dataset, 2), (dataset, 3), (unsized, 5)], ids=['sized 2', 'sized 3', 'unsized 5'])
@pytest.mark.parametrize(
    ('before', 'after'),
    [((2, 'sharded'), (4, 'sharded')), ((2, 'sharded'), (1, 'sharded')), ((1, 'global'), (2, 'sharded')), ((4, 'sharded'), (2, 'global'))],
)
def test_another_pipeline_reads_on_to_the_same_batch(whole, tmp_path, caplog, data, step, before, after):
    towers.train(model, data, config(tmp_path, *before, train_steps=step))
    with caplog.at_level(logging.INFO, logger='absl'):
        assert towers.train(model, data, config(tmp_path, *after)).step == STEPS
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=harness.FP32_SAME_ORDER)
    assert 'its position is of another number of towers or --input_pipeline' in caplog.text
    assert f'Read {(step - 1) % 3 + 1} batches that the run has trained on' in caplog.text  # those of the pass, no more
    assert 'beginning of an epoch' not in caplog.text


@pytest.mark.parametrize('prefetch', [0, 3])
def test_a_position_that_does_not_fit_the_iterator_is_read_on_to(whole, tmp_path, caplog, prefetch):
    towers.train(model, dataset, config(tmp_path, train_steps=5, prefetch=prefetch))
    with caplog.at_level(logging.INFO, logger='absl'):
        towers.train(model, dataset, config(tmp_path, prefetch=3 - prefetch))
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=harness.EXACT)
    assert 'beginning of an epoch' not in caplog.text


def test_data_that_ends_before_its_place_restarts_the_epoch_and_says_so(tmp_path, caplog):
    def some():
        return tf.data.Dataset.range(1000).filter(lambda x: x < 100)

    def fewer():
        return tf.data.Dataset.range(1000).filter(lambda x: x < 4)

    towers.train(model, some, config(tmp_path, 2, 'sharded', train_steps=5))
    with caplog.at_level(logging.WARNING, logger='absl'):
        allowed = ('dataset',)
        assert towers.train(model, fewer, config(tmp_path, 1, 'sharded', train_steps=6, allow_changed=allowed)).step == 6
    assert 'beginning of an epoch' in caplog.text and 'pass 0 of the data has no batch 5, its next one is batch 1 of pass 1' in caplog.text


def test_the_place_of_each_checkpoint_is_its_own(tmp_path):
    towers.train(model, dataset, config(tmp_path, 2, 'sharded', save_steps=1, keep_checkpoints=9, sync_checkpoint=True))
    places = [tf.train.load_checkpoint(found.prefix).get_tensor('input_place').tolist() for found in manifest.all(str(tmp_path))]
    assert places == [[[k // 3, k % 3 + 1]] * 2 for k in range(STEPS)]


def shuffled(size, first=0):
    return tf.data.Dataset.range(first, first + size).shuffle(size, seed=size)


SURE = {
    'one shuffle': lambda: shuffled(11).repeat(),
    'mapped': lambda: shuffled(11).map(lambda x: x + 1, num_parallel_calls=2).prefetch(2).repeat(),
    'files': lambda: shuffled(5).flat_map(lambda x: tf.data.Dataset.range(10 * x, 10 * x + 3)).repeat(),
    'shuffled after': lambda: shuffled(11).repeat().shuffle(5, seed=1),
    'sampled': lambda: tf.data.Dataset.sample_from_datasets([shuffled(7).repeat(), shuffled(5, 50).repeat()], seed=1),
    'none of its own': lambda: shuffled(11).shuffle(5, seed=1),
}
UNSURE = {
    'three shuffles': (lambda: shuffled(11).shuffle(5, seed=1).shuffle(3, seed=2).repeat(), 'RepeatDataset'),
    'one after the other': (lambda: shuffled(9).concatenate(shuffled(7, 50)).repeat(), 'RepeatDataset'),
    'batches taken apart': (lambda: shuffled(11).batch(4).unbatch().repeat(), 'RepeatDataset'),
    'sampled to their ends': (
        lambda: tf.data.Dataset.sample_from_datasets([shuffled(17), shuffled(9, 50)], seed=1),
        'DirectedInterleaveDataset',
    ),
}


@pytest.mark.parametrize('kind', [*SURE, *UNSURE])
def test_a_datasets_own_repetition_and_sampling_go_on_exactly(tmp_path, caplog, kind):
    make, cause = UNSURE.get(kind) or (SURE[kind], None)
    towers.train(model, make, config(tmp_path / 'whole', global_batch_size=4, train_steps=14))
    with caplog.at_level(logging.WARNING, logger='absl'):
        for step in (5, 10, 14):
            towers.train(model, make, config(tmp_path / 'parts', global_batch_size=4, train_steps=step))
    np.testing.assert_array_equal(losses(tmp_path / 'parts'), losses(tmp_path / 'whole')[: len(losses(tmp_path / 'parts'))])
    assert f'The state of the {cause} made at {__file__}:' in caplog.text if cause else 'can not be relied on' not in caplog.text
    assert 'beginning of an epoch' not in caplog.text
