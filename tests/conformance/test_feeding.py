"""Laws 15 to 18: every example counts once, the end of data is the input's own, metrics are totals, schedules take the global batch."""

import logging

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from harness import FP32_SAME_ORDER

import towers
from towers import metrics as metrics_lib
from towers.run import ending


def counting(ids, *, training):
    """A model whose metric `seen` counts each id."""
    w = harness.variable('w', 1.0)
    seen = tf.reduce_sum(tf.one_hot(ids, 16), 0)
    return towers.ModelOutput(tf.reduce_mean(w * tf.cast(ids, tf.float32)), metrics={'seen': towers.Metric((seen,), lambda total: total)})


def seen(run, steps):
    """How often each id was seen in so many steps; fetched with the step, as hooks do."""
    step = run.program.step
    return sum(run.session.run([step.metrics['seen'].sums[0], step.ops])[0] for _ in range(steps))


@pytest.mark.parametrize(
    ('strategy', 'n', 'pipeline'), [(*c, 'global') for c in harness.CASES] + [('mirrored', n, 'sharded') for n in (1, 2, 4)]
)
def test_law_15_each_example_of_an_epoch_reaches_one_tower_once(strategy, n, pipeline):
    """8 shuffled examples in batches of 5 and 3; the second epoch is in another order."""

    def data():
        return tf.data.Dataset.range(8).shuffle(8, seed=3)

    settings = harness.config(strategy, n, global_batch_size=5, input_pipeline=pipeline, train_epochs=3)
    with harness.started(counting, data, settings) as run:
        assert run.program.total_steps == 6
        for _ in range(3):
            np.testing.assert_array_equal(seen(run, 2), [1] * 8 + [0] * 8)
        with pytest.raises(tf.errors.OutOfRangeError):
            run.steps(1)
        assert run.session.run(run.program.step.input.ended)
        assert run.variables()['examples_seen'] == 24 and run.variables()['global_step'] == 6


@pytest.mark.parametrize('examples', [8, 9])
@pytest.mark.parametrize('n', [1, 2, 4])
def test_parts_that_are_copied_ahead_are_those_of_each_step(n, examples):
    """Batches of 4, so 9 examples leave one for the first tower; then the data ends, and begins anew with the initializer."""
    given = {'global_batch_size': 4, 'input_pipeline': 'sharded', 'exact_resume': False, 'train_epochs': 1}
    found = []
    for ahead in (False, True):
        settings = harness.config('mirrored', n, prefetch_to_device=ahead, placement='strict', **given)
        with harness.started(counting, lambda: tf.data.Dataset.range(examples), settings) as run:
            source = run.program.step.input
            if ahead and n > 1:
                assert [part.features.device for part in source.batches] == [f'/device:CPU:{k + 1}' for k in range(n)]
            assert source.position is None
            for _ in range(2):
                run.session.run(source.initializer)
                found.append(seen(run, -(-examples // 4)).tolist())
                with pytest.raises(tf.errors.OutOfRangeError):
                    run.steps(1)
                assert run.session.run(source.ended)
    assert found == [found[0]] * 4


@pytest.mark.parametrize('changes', [{}, {'input_pipeline': 'sharded'}, {'exact_resume': False}])
def test_copying_ahead_is_refused_where_it_can_not_be_right(changes):
    with pytest.raises(ValueError, match='^--prefetch_to_device .* give --input_pipeline=sharded --noexact_resume too, or leave it out.$'):
        towers.Config(prefetch_to_device=True, **changes)


@harness.each_split
def test_law_15_a_batch_for_which_there_is_no_whole_round_is_used(strategy, n):
    """3 batches of one example for each tower: a program that deals whole batches to towers would drop the third."""
    settings = harness.config(strategy, n, global_batch_size=n, train_epochs=1)
    with harness.started(counting, lambda: tf.data.Dataset.range(3 * n), settings) as run:
        np.testing.assert_array_equal(seen(run, 3), [1] * 3 * n + [0] * (16 - 3 * n))
        assert run.variables()['examples_seen'] == 3 * n


@pytest.mark.parametrize('pipeline', ['global', 'sharded'])
@harness.each_split
def test_law_16_only_the_inputs_own_end_is_the_end(strategy, n, pipeline):
    settings = harness.config(strategy, n, global_batch_size=4, train_epochs=1, input_pipeline=pipeline)
    with harness.started(counting, lambda: tf.data.Dataset.range(9), settings) as run:
        ended = run.program.step.input.ended
        run.steps(1)
        assert not any(run.session.run(ended))  # which takes a batch
        run.steps(1)
        with pytest.raises(tf.errors.OutOfRangeError) as caught:
            run.steps(1)
        assert [ending.is_end(caught.value, run.session, ended) for _ in range(2)] == [True, True]


@harness.each_case
def test_law_16_a_closed_queue_is_not_the_end_of_endless_data(strategy, n):
    with harness.started(counting, lambda: tf.data.Dataset.range(8), harness.config(strategy, n, global_batch_size=4)) as run:
        queue = tf.FIFOQueue(1, tf.int32)
        closing, taken = queue.close(), queue.dequeue()
        run.session.run(closing)
        with pytest.raises(tf.errors.OutOfRangeError):
            run.session.run([taken, run.program.step.report])
        assert run.program.step.input.ended == ()


@harness.each_case
def test_law_17_metrics_are_totals_and_the_loss_is_the_mean(strategy, n):
    """Four examples of losses 1, 2, 3 and 6."""

    def model(x, *, training):
        w = harness.variable('w', 1.0)
        big = tf.cast(x > 2, tf.float32)
        given = {
            'short': tf.reduce_mean(x),
            'weighted': (tf.reduce_sum(x * big) / tf.reduce_sum(big), tf.reduce_sum(big)),  # 0/0 on a tower of small ones
            'mean': towers.mean(x),
            'entries': towers.mean(tf.where(x > 2, x, x * float('nan')), big),
            'accuracy': towers.accuracy(tf.cast(x > 2, tf.int32), tf.stack([3 - x, x - 1], 1)),
            'spread': towers.Metric((tf.reduce_sum(x), tf.reduce_sum(x * x), tf.cast(tf.size(x), tf.float32)), spread),
        }
        return towers.ModelOutput(tf.reduce_mean(w * x), metrics=given)

    def spread(total, squares, count):
        return np.sqrt(squares / count - (total / count) ** 2)

    with harness.started(model, harness.numbers(1, 2, 3, 6), harness.config(strategy, n, global_batch_size=4)) as run:
        step = run.program.step
        totals, report, _ = run.session.run([{k: m.sums for k, m in step.metrics.items()}, step.report, step.ops])
        found = metrics_lib.results(step.metrics, totals)
    assert report['loss'] == 3.0
    expected = {'short': 3, 'weighted': 4.5, 'mean': 3, 'entries': 4.5, 'accuracy': 1.0, 'spread': np.std([1, 2, 3, 6])}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=FP32_SAME_ORDER, err_msg=name)


@pytest.mark.parametrize('examples', [1, 3, 6])
@harness.each_case
def test_law_17_a_stand_in_row_adds_nothing(strategy, n, examples):
    def model(x, *, training):
        w = harness.variable('w', 1.0)
        given = {'count': towers.Metric((tf.cast(tf.size(x), tf.int32),), lambda count: count), 'mean': tf.reduce_mean(x)}
        return towers.ModelOutput(tf.reduce_mean(w * x), metrics=given)

    settings = harness.config(strategy, n, global_batch_size=8)
    with harness.started(model, harness.numbers(*range(5, 5 + examples)), settings) as run:
        step = run.program.step
        totals, report, _ = run.session.run([{k: m.sums for k, m in step.metrics.items()}, step.report, step.ops])
    found = metrics_lib.results(step.metrics, totals)
    assert found['count'] == report['examples'] == examples
    np.testing.assert_allclose([found['mean'], report['loss']], np.mean(range(5, 5 + examples)), rtol=FP32_SAME_ORDER)


@pytest.mark.parametrize(
    'schedule',
    [
        {'schedule': 'exponential', 'decay_every': 1.0, 'schedule_unit': 'epochs'},
        {'schedule': 'piecewise', 'boundaries': (1000.0,), 'schedule_unit': 'examples'},
        {'schedule': 'piecewise', 'boundaries': (25.0,), 'schedule_unit': 'steps'},
    ],
    ids=['epochs', 'examples', 'steps'],
)
@harness.each_strategy
def test_law_18_schedules_take_the_global_batch(strategy, schedule):
    """1000 examples, 10 for each of 4 towers: 25 steps an epoch. The rate of a step is the one that it applied."""

    def model(x, *, training):
        return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 0.0) * x))

    settings = harness.config(strategy, 4, batch_size=10, learning_rate=0.1, **schedule)
    reports, variables = harness.train(model, harness.numbers(*[1.0] * 1000), settings, steps=27)
    np.testing.assert_allclose([r['learning_rate'] for r in reports], [0.1] * 25 + [0.01] * 2, rtol=FP32_SAME_ORDER)
    np.testing.assert_allclose(variables['w'], -(25 * 0.1 + 2 * 0.01), rtol=1e-5)


@harness.each_case
def test_law_18_the_learning_rate_is_never_scaled(strategy, n):
    [report], _ = harness.train(counting, lambda: tf.data.Dataset.range(8), harness.config(strategy, n, batch_size=2, learning_rate=0.3))
    np.testing.assert_allclose(report['learning_rate'], 0.3, rtol=FP32_SAME_ORDER)
    assert report['examples'] == 2 * n


@pytest.mark.parametrize(('scaling', 'factors'), [('linear', (1, 2, 4)), ('sqrt', (1, 2**0.5, 2))])
@harness.each_case
def test_law_18_scaling_on_request_is_logged(strategy, n, scaling, factors, caplog):
    settings = harness.config(strategy, n, batch_size=1, learning_rate=0.1, lr_scaling=scaling)
    with caplog.at_level(logging.INFO, logger='absl'):
        [report], _ = harness.train(counting, lambda: tf.data.Dataset.range(4), settings)
    factor = dict(zip(harness.TOWERS, factors, strict=True))[n]
    np.testing.assert_allclose(report['learning_rate'], 0.1 * factor, rtol=harness.FP32_SAME_ORDER)
    assert f'The learning rate is multiplied by {factor:g}, as --lr_scaling={scaling} asks for {n} towers.' in caplog.text
    with pytest.raises(ValueError, match=r'--lr_scaling=.* got --global_batch_size=4; give --batch_size'):
        harness.train(counting, lambda: tf.data.Dataset.range(4), harness.config(strategy, n, global_batch_size=4, lr_scaling=scaling))
