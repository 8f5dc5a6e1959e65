"""Laws 19 and 20: the tags of summaries, and collections of one tower that no other tower sees."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER

import towers
from towers.jobs import program, training


def tags(run):
    """The tags of all summaries of a step, their recorded prefixes stripped, with their values."""
    step = run.program.step
    found = {}
    for text in run.session.run(list(step.summaries)):
        for value in tf.Summary.FromString(text).value:
            prefix = next((p for p in step.summary_prefixes if value.tag.startswith(p)), '')
            found[value.tag[len(prefix) :]] = value
    return found


@harness.each_case
def test_law_19_tags_are_the_same_for_every_number_of_towers(strategy, n):
    def model(batch, *, training):
        with tf.variable_scope('layer'):
            w = tf.get_variable('kernel', [4, 2])
            tf.summary.scalar('largest', tf.reduce_max(w))
        tf.summary.histogram('inputs', batch['image'])
        loss = tf.reduce_mean(tf.matmul(tf.reshape(batch['image'], [-1, 4]), w))
        tf.summary.scalar('loss', loss)
        return towers.ModelOutput(loss)

    data = harness.rows(image=np.ones([4, 2, 2, 1], np.float32))
    settings = harness.config(strategy, n, global_batch_size=4, histograms=True, images=True)
    with harness.started(model, data, settings) as run:
        found = tags(run)
        scalars = set(run.program.step.scalars)
    assert set(found) == {
        'layer/largest', 'inputs', 'loss', 'weights/layer/kernel', 'gradients/layer/kernel', 'input/image/image/0',
        'input/image/image/1', 'input/image/image/2',
    } - {f'input/image/image/{k}' for k in range(-(-4 // n), 3)}  # fmt: skip
    assert not [tag for tag in found if 'tower' in tag]
    assert scalars == {'gradient_norm', 'weight_norm', *[f'towers/{k}/loss' for k in range(n)]}


@harness.each_case
def test_law_19_scalars_are_of_this_step(strategy, n):
    def model(x, *, training):
        w = harness.variable('w', [3.0, 4.0])
        return towers.ModelOutput(tf.reduce_mean(x) * tf.reduce_sum(w))

    settings = harness.config(strategy, n, global_batch_size=4, learning_rate=0.5, clip_norm=0.1)
    with harness.started(model, harness.numbers(1, 2, 3, 4), settings) as run:
        scalars, _ = run.session.run([dict(run.program.step.scalars), run.program.step.ops])
        w = run.variables()['w']
    np.testing.assert_allclose(scalars['weight_norm'], np.linalg.norm(w), rtol=FP32_SAME_ORDER)  # after the step
    np.testing.assert_allclose(scalars['gradient_norm'], 2.5 * np.sqrt(2), rtol=FP32_SAME_ORDER)  # before it was clipped
    losses = [scalars[f'towers/{k}/loss'] for k in range(n)]
    np.testing.assert_allclose(losses, 7 * np.arange(1, 5).reshape(n, -1).mean(1), rtol=FP32_SAME_ORDER)


@harness.each_strategy
def test_law_20_twelve_towers_keep_their_collections_apart(strategy):
    """With tower_1 beside tower_10 and tower_11, a match by the start of a name would count some towers twice."""
    sizes = []

    def model(x, *, training):
        mean = harness.variable('mean', 0.0, trainable=False)
        w = harness.variable('w', 1.0, regularizer=lambda v: 0.5 * v * v)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(tf.reduce_mean(x)))
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 0.25 * w)
        tf.losses.add_loss(tf.reduce_mean(w * x))
        tf.summary.scalar('x', tf.reduce_mean(x))
        keys = (tf.GraphKeys.UPDATE_OPS, tf.GraphKeys.REGULARIZATION_LOSSES, tf.GraphKeys.LOSSES, tf.GraphKeys.SUMMARIES)
        sizes.append([len(tf.get_collection(key)) for key in keys])
        return towers.ModelOutput(tf.losses.get_total_loss())

    with harness.started(model, harness.numbers(*range(12)), harness.config(strategy, 12, global_batch_size=12)) as run:
        [report] = run.steps(1)
        variables = run.variables()
        collected = tf.get_collection(tf.GraphKeys.LOSSES), tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    assert sizes == [[1, 2, 1, 1]] * 12
    np.testing.assert_allclose([variables['mean'], variables['w']], [5.5, 1 - (5.5 + 1 + 0.25)], rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(report['loss'], 5.5 + 0.5 + 0.25, rtol=FP32_SAME_ORDER)
    assert [len(entries) for entries in collected] == [1, 1]  # hooks see one tower, the first
    assert all('tower_0/' in entry.name for entries in collected for entry in entries)


@pytest.mark.parametrize('n', [2])
@harness.each_strategy
def test_collections_hold_what_a_one_tower_program_would(strategy, n):
    """A model asks for what is trainable by scope and by name, compares and counts: every tower finds the same."""
    found = []

    def model(x, *, training):
        with tf.variable_scope('a'):
            kernel = harness.variable('kernel', 1.0)
        with tf.variable_scope('b'):
            bias, frozen = harness.variable('bias', 1.0), harness.variable('frozen', 1.0, trainable=False)
        trainable = tf.trainable_variables()
        with tf.variable_scope('a', reuse=True):
            again = tf.get_variable('kernel', [])
        found.append([
            [v.name for v in trainable],
            [v is kernel for v in trainable],
            [v.name for v in tf.trainable_variables('b')],
            [v.name for v in trainable if v.name.endswith('bias:0')],
            again is kernel,
            kernel in tf.trainable_variables(),
            frozen in tf.trainable_variables(),
            kernel == bias,
        ])  # fmt: skip
        return towers.ModelOutput(tf.reduce_mean(kernel * x * bias * frozen))

    harness.train(model, harness.numbers(1, 2), harness.config(strategy, n, global_batch_size=2))
    one = [['a/kernel:0', 'b/bias:0'], [True, False], ['b/bias:0'], ['b/bias:0'], True, True, False, False]
    assert found == [one] * n


@harness.each_case
def test_every_operation_is_in_a_readable_scope(strategy, n, tmp_path):
    """What TensorBoard shows at the top: stages, towers and the model's variables, the same for every number of towers."""

    def model(batch, *, training):
        with tf.variable_scope('layer'):
            w = tf.get_variable('kernel', [4, 2])
        moving = harness.variable('moving', 0.0, trainable=False)
        logits = tf.matmul(tf.reshape(batch['image'], [-1, 4]), w)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, moving.assign_add(tf.reduce_mean(logits)))
        return towers.ModelOutput(tf.reduce_mean(logits), weight=tf.reduce_sum(batch['image']), metrics={'mean': tf.reduce_mean(logits)})

    data = harness.rows(image=np.ones([4, 2, 2, 1], np.float32))
    given = {'histograms': True, 'images': True, 'nan_policy': 'rollback', 'l2': 0.1, 'clip_norm': 1.0, 'weight_decay': 0.1}
    settings = harness.config(strategy, n, global_batch_size=4, optimizer='momentum', model_dir=str(tmp_path), **given)
    made = program.make(model, data, settings)
    with training.opened(made, settings, hooks=[tf.train.CheckpointSaverHook(str(tmp_path / 'user'), save_steps=10)]):
        pass
    stages = {'apply', 'average', 'checkpoint', 'count', 'flight', 'gate', 'init', 'input', 'learning_rate', 'marks'}
    stages |= {'norms', 'report', 'restore', 'save', 'state', 'summaries', 'sync', *[f'tower_{k}' for k in range(n)]}
    stages |= {'read'} if strategy in ('parameter_server', 'balanced') else set()
    variables = {'layer', 'moving', 'global_step', 'examples_seen', 'skipped_steps'}
    assert {operation.name.split('/')[0] for operation in made.graph.get_operations()} == stages | variables
