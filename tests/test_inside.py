"""Evaluations between the steps of a training: the numbers of an evaluator of its own, and nothing else is another one than without."""

import dataclasses
import glob
import json
import os

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest

SIZE, HELD_OUT = 22, 13
BESIDE = ('seconds', 'evaluated', 'checkpoint', 'saved')


def data(size, seed):
    inputs = np.random.default_rng(seed).normal(size=(size, 3)).astype(np.float32)
    return {'x': inputs, 'y': inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32)}


def train_set():
    return tf.data.Dataset.from_tensor_slices(data(SIZE, 7)).shuffle(SIZE)


def held_out():
    return tf.data.Dataset.from_tensor_slices(data(HELD_OUT, 8))


def shrink(w):
    return 0.01 * tf.reduce_sum(w**2)


def model(batch, *, training):
    """Dropout, batch norm, a penalty in the loss, local state and a lookup table: what differs out of training, or counts by itself."""
    zeros = tf.zeros_initializer()
    hidden = tf.matmul(batch['x'], tf.get_variable('w', [3, 4], regularizer=shrink)) + tf.get_variable('b', [4], initializer=zeros)
    moving = tf.get_variable('moving', [4], initializer=zeros, trainable=False)
    mean = tf.reduce_mean(hidden, 0)
    if training:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, moving.assign_sub(0.1 * (moving - mean)))
    hidden = tf.tanh(hidden - (mean if training else moving))
    hidden = towers.dropout(hidden, 0.25, training=training)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), tf.constant([1.0, 2.0])), 0.0)
    counted = tf.get_variable('counted', [], initializer=zeros, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    with tf.control_dependencies([hidden]):
        batches = counted.assign_add(1.0)
    error = tf.squared_difference(tf.matmul(hidden, tf.get_variable('out', [4, 1])), batch['y']) * table.lookup(tf.constant(0))
    tf.summary.scalar('error', tf.reduce_mean(error))
    loss = tf.reduce_mean(error) + tf.losses.get_regularization_loss()
    large = tf.cast(tf.abs(batch['y'][:, 0]) > 1, tf.float32)
    metrics = {'error': towers.mean(error), 'large': towers.mean(large), 'peak': towers.Metric((tf.reduce_sum(error**2),), np.sqrt)}
    if training:
        metrics['batches'] = (batches, 1.0)
    return towers.ModelOutput(loss, metrics=metrics)


def config(folder, **changes):
    settings = {'optimizer': 'momentum', 'learning_rate': 0.05, 'global_batch_size': 8, 'train_steps': 6, 'log_steps': 1}
    saved = {'save_steps': 2, 'keep_checkpoints': 9, 'sync_checkpoint': True, 'eval_batch_size': 3}
    return harness.config(**{**settings, **saved, **changes}, model_dir=str(folder))


def rows(folder, name='test'):
    with open(os.path.join(folder, 'eval', name, 'results.jsonl')) as file:
        return [json.loads(line) for line in file]


def reported(folder):
    with open(os.path.join(folder, 'metrics.jsonl')) as file:
        found = [json.loads(line) for line in file]
    return [{name: value for name, value in row.items() if name not in ('examples_per_sec', 'step_ms')} for row in found]


def scores(row):
    return {name: value for name, value in row.items() if name not in BESIDE}


def points(folder):
    paths = glob.glob(os.path.join(folder, 'events*'))
    return [(e.step, value.tag, value.simple_value) for path in paths for e in tf.train.summary_iterator(path) for value in e.summary.value]


@harness.each_case
def test_results_are_those_of_an_evaluator_on_the_checkpoint_of_the_step(tmp_path, strategy, n):
    given = config(tmp_path, strategy=strategy, n=n, eval_every_steps=2)
    result = towers.train(model, train_set, given, eval_dataset=held_out)
    inside = rows(tmp_path)
    assert [(row['step'], row['examples'], 'saved' in row) for row in inside] == [(step, HELD_OUT, False) for step in (2, 4, 6)]
    own = dataclasses.replace(given, eval_name='own', eval_num_gpus=n, eval_every_steps=None)
    for row in inside:
        found = towers.evaluate(model, held_out, own, checkpoint=row['step'])
        assert scores(row).keys() == found.keys()
        np.testing.assert_allclose([row[name] for name in found], list(found.values()), rtol=harness.FP32_SAME_ORDER, err_msg=str(row))
        assert row['large'] == found['large']
    assert result.evaluation == scores(inside[-1])
    wanted = [(row['step'], name, row[name]) for row in inside for name in ('loss', 'error', 'large', 'peak')]
    assert sorted(points(tmp_path / 'eval/test')) == [(step, name, pytest.approx(value)) for step, name, value in sorted(wanted)]


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 2), ('mirrored', 2)])
def test_the_training_is_bit_for_bit_that_without(tmp_path, strategy, n):
    for name, every in (('with', 1), ('without', None)):
        given = config(tmp_path / name, strategy=strategy, n=n, eval_every_steps=every, deterministic=True, summary_steps=2)
        towers.train(model, train_set, given, eval_dataset=held_out if every else None)
    assert reported(tmp_path / 'with') == reported(tmp_path / 'without')
    first, second = (tf.train.load_checkpoint(manifest.prefix_of(str(tmp_path / name), 6)) for name in ('with', 'without'))
    assert first.get_variable_to_shape_map() == second.get_variable_to_shape_map()
    for name in first.get_variable_to_shape_map():
        np.testing.assert_array_equal(first.get_tensor(name), second.get_tensor(name), err_msg=name)
    tags = [{tag for _, tag, _ in points(tmp_path / name)} for name in ('with', 'without')]
    assert tags[0] == tags[1]
