"""Batches that have no weight: a training of them alone ends, and some of them do no harm."""

import logging

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.hooks import weightless
from towers.jobs import program, training


def model(batch, *, training):
    """The weight is the sum of the mask; a mask of -1 stands for a loss that is not finite."""
    w = tf.get_variable('w', [], initializer=tf.zeros_initializer())
    mask = batch['mask']
    loss = w * tf.reduce_mean(tf.where(mask < 0, tf.fill(tf.shape(mask), np.nan), mask))
    return towers.ModelOutput(loss, weight=tf.reduce_sum(tf.abs(mask)))


@harness.each_case
def test_a_training_without_weight_ends(strategy, n, tmp_path, caplog):
    settings = harness.config(strategy, n, global_batch_size=4, train_steps=5, model_dir=str(tmp_path))
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=r'^The last 100 batches after step 0 had weight 0.*mask'):
        towers.train(model, harness.rows(mask=np.zeros(8, np.float32)), settings)
    assert [r.getMessage() for r in caplog.records if 'weight 0' in r.getMessage()] == [
        'The batch after step 0 has weight 0: it changes nothing and is no step; the next one is taken.'
    ]


@pytest.mark.parametrize(('batches', 'reached'), [([0, 0, 1, 0, 0, 1], 2), ([0, -1, 0, -1, 0], 0), ([1, -1, -1, -1, 0], 1)])
def test_only_such_in_a_row_count(batches, reached, tmp_path):
    settings = harness.config(n=2, global_batch_size=2, train_epochs=1, model_dir=str(tmp_path), nan_policy='skip')
    made = program.make(model, harness.rows(mask=np.repeat(np.float32(batches), 2)), settings)
    step = made.step
    hook = weightless.WeightlessHook(step.report, (step.global_step, step.saved['skipped_steps']), limit=3)
    with training.opened(made, settings, hooks=[hook]) as session:
        steps = [int(session.run((step.ops, step.step))[1]) for _ in batches]
    assert steps[-1] == reached
