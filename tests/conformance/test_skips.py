"""Law 12: a step that is not finite changes nothing at all, for every strategy, number of towers and optimizer."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import optimizers

ROWS = 8  # of a global batch
GOOD = np.linspace(0.5, 1.5, ROWS, dtype=np.float32)
OTHER = np.linspace(2.0, 1.0, ROWS, dtype=np.float32)


def bad(row, value):
    batch = OTHER.copy()
    batch[row] = value
    return batch


BAD = bad(ROWS - 1, np.nan)  # in the last tower's part


def model(batch, *, training):
    """Dense and sparse gradients, a penalty, a moving statistic, and draws by example."""
    x = tf.reshape(batch, [-1, 1])
    dense = harness.variable('dense', np.full([1, 3], 0.5), regularizer=lambda w: 0.01 * tf.reduce_sum(tf.square(w)))
    table = harness.variable('table', np.ones([5, 3]))
    mean = harness.variable('mean', 0.0, trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_sub(0.1 * (mean - tf.reduce_mean(x))))
    hidden = towers.dropout(tf.matmul(x, dense), 0.25, training=training)
    return towers.ModelOutput(tf.reduce_mean((hidden + tf.gather(table, [1, 3, 1])[:1]) * x))


def settings(strategy, n, **changes):
    asked = {'optimizer': 'adam', 'learning_rate': 0.01, 'weight_decay': 0.1, 'clip_norm': 5.0, 'nan_policy': 'skip', **changes}
    return harness.config(strategy, n, global_batch_size=ROWS, **asked)


def same(found, expected, *but):
    assert found.keys() == expected.keys()
    for name in found.keys() - set(but):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def check_skip(batches, config, *, held, model=model, compared=True):
    """Batch `held` (counted from 0) changes nothing, and, where `compared`, all the others what they change without it."""
    with harness.started(model, harness.numbers(*np.concatenate(batches)), config) as run:
        for number in range(len(batches)):
            before = run.variables()
            [report] = run.steps(1)
            after = run.variables()
            assert (report['step'], report['skipped']) == (after['global_step'], after['skipped_steps'])
            if number == held:
                same(after, before, 'skipped_steps')
            assert int(after['skipped_steps']) == int(number >= held)
            assert report['examples_seen'] == after['examples_seen'] == ROWS * after['global_step']
    if not compared:
        return
    rest = [batch for number, batch in enumerate(batches) if number != held]
    _, expected = harness.train(model, harness.numbers(*np.concatenate(rest)), config, steps=len(rest))
    same(after, expected, 'skipped_steps')
    assert after['global_step'] == len(rest)


@harness.each_case
def test_law_12_nothing_changes_but_the_counter(strategy, n):
    check_skip([GOOD, BAD, OTHER], settings(strategy, n), held=1, compared=n == 2)


@pytest.mark.parametrize('optimizer', sorted(set(optimizers.OPTIMIZERS) - {'adam'}))
def test_law_12_for_each_optimizer(optimizer):
    check_skip([GOOD, BAD, OTHER], settings('mirrored', 2, optimizer=optimizer, weight_decay=0.0), held=1, compared=False)


@pytest.mark.parametrize('value', [np.inf, -np.inf, 3e38])
def test_law_12_for_what_is_not_finite_or_becomes_so(value):
    """The first step may be the bad one; 3e38 is finite, its square in the loss is not."""
    check_skip([bad(2, value), GOOD], settings('parameter_server', 2), held=0, compared=False)


@pytest.mark.parametrize('policy', ['stop', 'rollback'])
def test_no_policy_lets_it_through(policy):
    check_skip([GOOD, BAD, OTHER], settings('mirrored', 2, nan_policy=policy), held=1, compared=False)


def only_gradient(batch, *, training):
    """The loss is finite where its gradient is not: a root at 0."""
    w = harness.variable('w', 1.0)
    return towers.ModelOutput(tf.reduce_mean(tf.sqrt(tf.abs(w * batch))))


@harness.each_split
def test_a_finite_loss_with_a_gradient_that_is_not(strategy, n):
    check_skip([GOOD, bad(ROWS - 1, 0.0), OTHER], settings(strategy, n, optimizer='sgd'), held=1, model=only_gradient, compared=False)


def only_statistic(batch, *, training):
    """Nothing but a moving statistic is bad."""
    w, largest = harness.variable('w', 1.0), harness.variable('largest', 0.0, trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, largest.assign(tf.reduce_max(tf.log(batch))))
    return towers.ModelOutput(tf.reduce_mean(w * batch))


def test_a_moving_statistic_that_is_not_finite():
    check_skip([GOOD, np.zeros(ROWS, np.float32), OTHER], settings('mirrored', 2), held=1, model=only_statistic, compared=False)


def test_ignore_applies_it():
    reports, variables = harness.train(model, harness.numbers(*GOOD, *BAD), settings('parameter_server', 2, nan_policy='ignore'), steps=2)
    assert np.isnan(variables['dense']).all() and [int(report['step']) for report in reports] == [1, 2]
    assert int(reports[-1]['skipped']) == int(variables['skipped_steps']) == 0


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16, tf.float64])
def test_other_types(dtype):
    def typed(batch, *, training):
        w = harness.variable('w', 1.0, dtype=dtype)
        return towers.ModelOutput(tf.reduce_mean(tf.cast(batch, dtype) * w))

    config = settings('parameter_server', 2, optimizer='sgd', weight_decay=0.0, clip_norm=None)
    check_skip([GOOD, BAD, OTHER], config, held=1, model=typed, compared=False)


def test_a_gradient_that_overflows_its_variables_type():
    """1e5 is finite in the sum over towers, in fp32, and not in the fp16 of the variable."""

    def steep(batch, *, training):
        w = harness.variable('w', 1.0, dtype=tf.float16)
        return towers.ModelOutput(tf.reduce_mean(batch * tf.cast(w, tf.float32)))

    config = settings('parameter_server', 2, optimizer='sgd', weight_decay=0.0, clip_norm=None, learning_rate=1e-6)
    check_skip([GOOD, np.full(ROWS, 1e5, np.float32), OTHER], config, held=1, model=steep, compared=False)


def test_a_step_without_weight_is_not_counted_as_bad():
    def masked(batch, *, training):
        w = harness.variable('w', 1.0)
        weight = tf.reduce_sum(tf.cast(batch > 0, tf.float32))
        return towers.ModelOutput(tf.reduce_sum(w * tf.maximum(batch, 0.0)) / weight, weight=weight)

    reports, variables = harness.train(masked, harness.numbers(*GOOD, *(-GOOD), *OTHER), settings('mirrored', 2), steps=3)
    assert [int(report['step']) for report in reports] == [1, 1, 2] and int(variables['skipped_steps']) == 0


def test_reports_of_a_step_that_was_held_back_can_be_fetched():
    """What is computed after the step waits for its end, however it ended; a histogram has the finite values only."""

    def reported(batch, *, training):
        output = model(batch, training=training)
        summary = tf.summary.histogram('batch', batch)
        tf.get_collection_ref(tf.GraphKeys.SUMMARIES)[:] = [tf.summary.merge([tf.summary.scalar('loss', output.loss), summary])]
        return output

    with harness.started(reported, harness.numbers(*BAD, *GOOD), settings('mirrored', 2, histograms=True)) as run:
        step = run.program.step
        for expected in (0, 1):
            number, scalars, protos = run.session.run([step.step, dict(step.scalars), step.summaries, step.ops])[:3]
            assert number == expected and np.isfinite(scalars['weight_norm'])
            found = {value.tag: value.histo.num for proto in protos for value in tf.Summary.FromString(proto).value}
            assert found['tower_0/batch'] == ROWS / 2 and found['weights/dense'] == 3
            assert found['gradients/dense'] == 3 * expected
