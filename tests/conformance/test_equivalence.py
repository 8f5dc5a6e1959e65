"""Law 22: N towers are one tower, a restored run goes on as if it had not stopped, and a run repeats bit for bit."""

import functools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER, FP32_SUM

import towers

RANDOM = np.random.default_rng(5)
ROWS = {
    'x': RANDOM.normal(size=[21, 6]).astype(np.float32),
    'word': RANDOM.integers(0, 9, [21, 4]),
    'label': RANDOM.integers(0, 3, [21]),
    'image': RANDOM.normal(size=[21, 6, 6, 1]).astype(np.float32),
}
OPTIMIZERS = {'momentum': {'learning_rate': 0.1}, 'adam': {'learning_rate': 0.001}}


def dense(x, name, units):
    with tf.variable_scope(name):
        kernel = tf.get_variable('kernel', [x.shape.as_list()[-1], units])
        return tf.matmul(x, kernel) + tf.get_variable('bias', [units], initializer=tf.zeros_initializer())


def classified(batch, logits):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch['label'], logits=logits)
    return towers.ModelOutput(tf.reduce_mean(losses), metrics={'accuracy': towers.accuracy(batch['label'], logits)})


def mlp(batch, *, training):
    return classified(batch, dense(tf.nn.relu(dense(batch['x'], 'hidden', 8)), 'logits', 3))


def embedding(batch, *, training):
    """Words looked up in a table that is also the last layer's kernel, beside a table that is only looked up."""
    table, other = tf.get_variable('table', [9, 5]), tf.get_variable('other', [9, 5])
    h = tf.reduce_mean(tf.nn.embedding_lookup(table, batch['word']) + tf.nn.embedding_lookup(other, batch['word']), 1)
    return classified(batch, tf.matmul(tf.tanh(h), table, transpose_b=True)[:, :3])


def tokens(batch, *, training):
    """A masked loss with its own weight: a row has 0 to 4 tokens that count, some rows none."""
    mask = tf.cast(batch['word'] > 4, tf.float32)  # [B, 4]
    logits = dense(batch['x'], 'logits', 4)
    count = tf.reduce_sum(mask)
    return towers.ModelOutput(tf.reduce_sum(tf.square(logits - 1) * mask) / count, weight=count)


def convolution(batch, *, training):
    kernel = tf.get_variable('conv/kernel', [3, 3, 1, 4], initializer=tf.glorot_uniform_initializer())
    h = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(batch['image'], kernel, 1, 'SAME')), 2, 2, 'SAME')
    return classified(batch, dense(tf.reshape(h, [-1, 36]), 'logits', 3))


def normalised(batch, *, training):
    """The same with batch norm between; its moving mean decays by .9."""
    h = tf.nn.conv2d(batch['image'], tf.get_variable('conv/kernel', [3, 3, 1, 4]), 1, 'SAME')
    scale, offset = (harness.variable(name, np.full([4], value)) for name, value in (('scale', 1.0), ('offset', 0.0)))
    h, mean, _ = tf.nn.fused_batch_norm(h, scale, offset, is_training=True)
    moving = harness.variable('moving_mean', np.zeros([4]), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, moving.assign_sub(0.1 * (moving - mean)))
    h = tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, 'SAME')
    return classified(batch, dense(tf.reshape(h, [-1, 36]), 'logits', 3))


MODELS = {'mlp': mlp, 'embedding': embedding, 'tokens': tokens, 'convolution': convolution}


def rows(first, last):
    return harness.rows(**{name: values[first:last] for name, values in ROWS.items()})


@functools.cache
def trained(model, strategy, n, optimizer):
    """5 steps: batches of 8, 8 and 5, then again."""
    settings = harness.config(strategy, n, global_batch_size=8, optimizer=optimizer, l2=0.001, clip_norm=5.0, **OPTIMIZERS[optimizer])
    return harness.train(MODELS[model], rows(0, 21), settings, steps=5)


@pytest.mark.parametrize(
    ('model', 'optimizer'), [('mlp', 'momentum'), ('embedding', 'momentum'), ('embedding', 'adam'), ('tokens', 'adam')]
)
@pytest.mark.parametrize(('strategy', 'n'), [case for case in harness.CASES if case != ('parameter_server', 1)])
def test_towers_on_parts_of_a_batch_are_one_tower_on_the_whole(strategy, n, model, optimizer):
    reports, variables = trained(model, strategy, n, optimizer)
    expected_reports, expected = trained(model, 'parameter_server', 1, optimizer)
    assert variables.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(variables[name], value, atol=FP32_SAME_ORDER, rtol=FP32_SAME_ORDER, err_msg=name)
    for report, one in zip(reports, expected_reports, strict=True):
        assert report['examples'] == one['examples']
        np.testing.assert_allclose(report['total_loss'], one['total_loss'], rtol=FP32_SUM)


@functools.cache
def one_batch(model, strategy, n, pipeline, first, last):
    """The variables after one step on some rows, fewer than the batch size may be, and the report."""
    settings = harness.config(strategy, n, global_batch_size=8, input_pipeline=pipeline)
    [report], variables = harness.train(model, rows(first, last), settings)
    return report, variables


@pytest.mark.parametrize('examples', [1, 2, 3, 5, 8])
@pytest.mark.parametrize(('strategy', 'pipeline'), [('parameter_server', 'global'), ('mirrored', 'sharded')])
def test_a_max_pool_net_takes_any_number_of_examples(strategy, pipeline, examples):
    report, variables = one_batch(convolution, strategy, 4, pipeline, 0, examples)
    expected_report, expected = one_batch(convolution, 'parameter_server', 1, 'global', 0, examples)
    assert report['examples'] == examples
    np.testing.assert_allclose(report['loss'], expected_report['loss'], rtol=FP32_SAME_ORDER)
    for name, value in expected.items():
        np.testing.assert_allclose(variables[name], value, atol=3e-7, err_msg=name)


@pytest.mark.parametrize(
    ('strategy', 'pipeline', 'examples'), [('parameter_server', 'global', 1), ('mirrored', 'global', 3), ('parameter_server', 'sharded', 5)]
)
def test_a_batch_norm_net_is_the_mean_of_its_parts_by_examples(strategy, pipeline, examples):
    """Each tower normalises by its own rows, so the oracle is one program for each part; the empty ones add nothing."""
    sizes = [examples // 4 + (k < examples % 4) for k in range(4)]
    bounds = [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(4) if sizes[k]]
    report, variables = one_batch(normalised, strategy, 4, pipeline, 0, examples)
    parts = [one_batch(normalised, 'parameter_server', 1, 'global', lo, hi) for lo, hi in bounds]
    shares = [(hi - lo) / examples for lo, hi in bounds]
    loss = sum(share * part['loss'] for share, (part, _) in zip(shares, parts, strict=True))
    np.testing.assert_allclose(report['loss'], loss, rtol=FP32_SAME_ORDER)
    for name in ('conv/kernel', 'logits/kernel', 'scale', 'offset', 'moving_mean'):
        mean = sum(share * part[name] for share, (_, part) in zip(shares, parts, strict=True))
        np.testing.assert_allclose(variables[name], mean, atol=FP32_SAME_ORDER, err_msg=name)


def shuffled():
    """21 rows in another order each epoch."""
    return rows(0, 21)().shuffle(21, seed=4)


def noisy(batch, *, training):
    """Batch norm's state and draws by example beside the weights."""
    image = towers.dropout(batch['image'], 0.25, training=training)
    return normalised({**batch, 'image': image}, training=training)


@pytest.mark.parametrize(
    ('strategy', 'n', 'pipeline'), [('parameter_server', 1, 'global'), ('parameter_server', 4, 'global'), ('mirrored', 2, 'sharded')]
)
def test_a_restored_run_goes_on_bit_for_bit(strategy, n, pipeline, tmp_path):
    settings = harness.config(strategy, n, global_batch_size=8, input_pipeline=pipeline, optimizer='adam', learning_rate=0.01)
    whole, expected = harness.train(noisy, shuffled, settings, steps=6)
    with harness.started(noisy, shuffled, settings) as run:
        first = run.steps(3)
        prefix = tf.train.Saver(dict(run.program.step.saved)).save(run.session, str(tmp_path / 'at'), write_meta_graph=False)
        position = run.session.run(run.program.step.input.position)
    with harness.started(noisy, shuffled, settings) as run:
        source, fed = run.program.step.input, tf.placeholder(tf.string, [])
        restore = source.restore_position(fed)
        tf.train.Saver(dict(run.program.step.saved)).restore(run.session, prefix)
        run.session.run(restore, {fed: position})
        run.session.run(run.program.step.sync)
        second = run.steps(3)
        variables = run.variables()
    assert [*first, *second] == whole
    for name, value in expected.items():
        np.testing.assert_array_equal(variables[name], value, err_msg=name)


def examples_seen(batch, *, training):
    output = mlp(batch, training=training)
    return towers.ModelOutput(output.loss, metrics={'sum': towers.Metric((tf.reduce_sum(batch['word']),), lambda total: total)})


@functools.cache
def deterministic(strategy, n, again=False):
    """What identifies the examples of 5 steps, their losses, and the variables; `again` makes a second run."""
    settings = harness.config(strategy, n, global_batch_size=8, optimizer='momentum', learning_rate=0.1, deterministic=True)
    with harness.started(examples_seen, shuffled, settings) as run:
        step = run.program.step
        results = [run.session.run([step.metrics['sum'].sums, step.report, step.ops])[:2] for _ in range(5)]
        return [int(total) for [total], _ in results], [report['loss'] for _, report in results], run.variables()


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 1), ('parameter_server', 4), ('mirrored', 2)])
def test_a_deterministic_run_repeats_and_sees_the_same_examples_for_every_number_of_towers(strategy, n):
    ids, losses, variables = deterministic(strategy, n)
    again = deterministic(strategy, n, again=True)
    assert again[:2] == (ids, losses)
    assert all(np.array_equal(again[2][name], value) for name, value in variables.items())
    one_ids, one_losses, _ = deterministic('parameter_server', 1)
    assert ids == one_ids and len(set(ids)) > 1
    np.testing.assert_allclose(losses, one_losses, rtol=FP32_SUM)
