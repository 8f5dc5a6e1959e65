"""Evaluations between the steps of a training: the numbers of an evaluator of its own, and nothing else is another one than without."""

import dataclasses
import glob
import json
import os
import signal
import time

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest
from towers.hooks import every

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


def reported(folder, but):
    """The rows of a training, but for what is another each time."""
    with open(os.path.join(folder, 'metrics.jsonl')) as file:
        found = [json.loads(line) for line in file]
    return [
        {name: value for name, value in row.items() if name not in ('examples_per_sec', 'step_ms', 'input_wait', *but)} for row in found
    ]


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


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 1), ('parameter_server', 2), ('mirrored', 2)])
def test_the_training_is_bit_for_bit_that_without(tmp_path, strategy, n):
    for name, often in (('with', 1), ('without', None)):
        given = config(tmp_path / name, strategy=strategy, n=n, eval_every_steps=often, summary_steps=2)
        towers.train(model, train_set, given, eval_dataset=held_out if often else None)
    racing = ('batches',) if n > 1 else ()  # towers that count in one variable, as in a training without evaluations
    assert reported(tmp_path / 'with', racing) == reported(tmp_path / 'without', racing)
    first, second = (tf.train.load_checkpoint(manifest.prefix_of(str(tmp_path / name), 6)) for name in ('with', 'without'))
    assert first.get_variable_to_shape_map() == second.get_variable_to_shape_map()
    for name in set(first.get_variable_to_shape_map()) - {'input_position'}:  # which holds what is made ahead
        np.testing.assert_array_equal(first.get_tensor(name), second.get_tensor(name), err_msg=name)
    tags = [{tag for _, tag, _ in points(tmp_path / name)} for name in ('with', 'without')]
    assert tags[0] == tags[1]


def plain(batch, *, training):
    """A loss that falls by 0.1 in each step: w, with data that is 1 everywhere."""
    del training
    return towers.ModelOutput(tf.reduce_mean(batch) * harness.variable('w', 1.0))


ONES = harness.numbers(1, 1, 1, 1)


def train(folder, dataset=ONES, **changes):
    given = config(folder, **{'optimizer': 'sgd', 'learning_rate': 0.1, 'global_batch_size': 2, 'eval_every_steps': 2, **changes})
    return towers.train(plain, ONES, given, eval_dataset=dataset)


def steps(folder, name='test'):
    return [row['step'] for row in rows(folder, name)]


def test_several_evaluators_and_a_last_step_that_is_no_multiple(tmp_path):
    result = train(tmp_path, {'one': ONES, 'two': harness.numbers(2, 2, 2)}, eval_every_steps=4, train_steps=6)
    assert steps(tmp_path, 'one') == steps(tmp_path, 'two') == [4, 6]
    assert [row['loss'] for row in rows(tmp_path, 'two')] == pytest.approx([1.2, 0.8])
    assert result.evaluations['two']['loss'] == pytest.approx(0.8) and result.evaluation['examples'] == 4
    again = train(tmp_path, {'one': ONES, 'two': harness.numbers(2, 2, 2)}, eval_every_steps=4, train_steps=6)
    assert (again.steps_run, again.evaluations) == (0, result.evaluations)


def test_with_averages_it_evaluates_them(tmp_path):
    train(tmp_path, ema_decay=0.5, use_ema=True, train_steps=2)
    [row] = rows(tmp_path)
    assert row['loss'] == pytest.approx(0.5 * 0.9 + 0.5 * 0.8)
    with pytest.raises(ValueError, match='--use_ema evaluates with the averages that --ema_decay makes, got none'):
        train(tmp_path / 'none', use_ema=True)


def nowhere():
    """Examples of which the third can't be read."""
    return tf.data.Dataset.range(4).map(lambda i: tf.debugging.check_numerics(tf.where(i < 2, 1.0, np.nan), 'it is spoilt'))


@pytest.mark.parametrize(
    ('dataset', 'message'),
    [(nowhere, 'it is spoilt'), (lambda: ONES().filter(lambda x: x > 2), 'gave no examples')],
    ids=['fails', 'is empty'],
)
def test_an_evaluation_that_fails_does_not_fail_the_training(tmp_path, dataset, message, caplog):
    result = train(tmp_path, dataset)
    assert (result.step, result.evaluation, result.stopped_by) == (6, {}, 'steps')
    assert caplog.text.count('failed and the training goes on') == 3 and message in caplog.text
    assert 'Without a result of the last checkpoint: test. Run scripts/evaluate.py' in caplog.text
    assert not os.path.exists(tmp_path / 'eval' / 'test' / 'results.jsonl')


def test_a_score_that_is_not_a_number_is_a_result(tmp_path):
    result = train(tmp_path, harness.numbers(1, np.nan))
    assert (result.step, [row['loss'] for row in rows(tmp_path)]) == (6, [None] * 3)


def test_rates_leave_the_evaluations_out(tmp_path):
    pauses = [2.0]

    def slow():
        def wait(x):
            time.sleep(pauses.pop() if pauses else 0)
            return x

        return ONES().map(lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), []))

    result = train(tmp_path, slow, train_steps=3)
    with open(tmp_path / 'metrics.jsonl') as file:
        assert max(json.loads(line)['step_ms'] for line in file) < 2000
    assert rows(tmp_path)[0]['seconds'] >= 2 and result.examples_per_sec > 2


@pytest.mark.parametrize('known', [False, True])
def test_a_resumed_run_evaluates_what_was_cut_off_and_voids_what_comes_again(tmp_path, known):
    train(tmp_path, train_steps=4)
    path = tmp_path / 'eval' / 'test' / 'results.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    # Killed in the evaluation of step 4, or after an evaluation of a step whose checkpoint had not been written.
    path.write_text(lines[0] if not known else lines[0] + lines[1] + '{"step": 6, "loss": 7.0}\n')
    train(tmp_path, train_steps=6)
    assert [(row['step'], row['loss']) for row in rows(tmp_path)] == [
        (2, pytest.approx(0.8)),
        (4, pytest.approx(0.6)),
        (6, pytest.approx(0.4)),
    ]


def test_a_signal_ends_an_evaluation_and_the_next_start_makes_it(tmp_path):
    def slow():
        def signalled(x):
            if started:
                started.pop()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            return x

        return ONES().map(lambda x: tf.ensure_shape(tf.numpy_function(signalled, [x], tf.float32), []))

    started = [1]
    result = train(tmp_path, slow, eval_batch_size=1)
    assert (result.step, result.stopped_by) == (2, 'signal') and not (tmp_path / 'eval' / 'test' / 'results.jsonl').exists()
    result = train(tmp_path, slow, eval_batch_size=1)
    assert (result.step, result.stopped_by, steps(tmp_path)) == (6, 'steps', [2, 4, 6])


def test_a_target_that_is_reached_ends_the_training_in_that_step(tmp_path):
    result = train(tmp_path, eval_every_steps=1, early_stop='loss<=0.75', train_steps=100)
    assert (result.step, result.stopped_by, steps(tmp_path)) == (3, 'early_stop', [1, 2, 3])


def rises(batch, *, training):
    """A loss of (w - 0.8)^2 in evaluation, while training makes w fall by 0.1 in each step."""
    w = harness.variable('w', 1.0)
    return towers.ModelOutput(tf.reduce_mean(batch) * (w if training else (w - 0.8) ** 2))


def test_the_best_checkpoint_stays(tmp_path):
    given = config(tmp_path, optimizer='sgd', learning_rate=0.1, global_batch_size=2, eval_every_steps=1, save_steps=1)
    given = dataclasses.replace(given, keep_checkpoints=1, keep_best='loss', early_stop='loss:3', train_steps=50)
    result = towers.train(rises, ONES, given, eval_dataset=ONES)
    assert (result.step, result.stopped_by) == (5, 'early_stop')
    assert [each.step for each in manifest.all(str(tmp_path))] == [2, 5]


def test_a_rollback_voids_the_results_behind_it(tmp_path):
    def poisoned():
        spoilt = iter([1.0] * 10 + [np.nan] * 2 + [1.0] * 100)
        return ONES().repeat(30).map(lambda x: tf.ensure_shape(tf.numpy_function(lambda x: np.float32(next(spoilt)), [x], tf.float32), []))

    given = config(
        tmp_path, optimizer='sgd', learning_rate=0.1, global_batch_size=2, eval_every_steps=1, save_steps=3, nan_policy='rollback'
    )
    given = dataclasses.replace(given, exact_resume=False, prefetch=0)
    result = towers.train(plain, poisoned, given, eval_dataset=ONES)
    assert (result.step, steps(tmp_path)) == (6, [1, 2, 3, 4, 5, 6])


def test_the_clock_of_a_training_stands_still_meanwhile():
    now = [5.0]
    clock = every.Clock(lambda: now[0])
    before = clock()
    with clock.stopped():
        now[0] += 100
    now[0] += 1
    assert clock() - before == 1


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'evaluate': True}, '--eval_every_steps=2 evaluates in the training, --evaluate is for processes beside it; give one'),
        ({'evaluator': ('a:threads=1',)}, '--evaluator is for processes'),
        ({'eval_parts': 2}, '--eval_parts is for evaluators of their own'),
        ({'eval_max_slowdown': 0.1}, '--eval_max_slowdown is for evaluators of their own'),
        ({'eval_every_steps': 0}, '--eval_every_steps must be at least 1'),
        ({'dataset': None}, '--eval_every_steps needs an evaluation dataset'),
        ({'dataset': lambda: tf.data.Dataset.range(3).repeat()}, 'needs a dataset that ends'),
    ],
)
def test_wrong_use_says_what_to_do(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **changes)
    assert not manifest.all(str(tmp_path))


def grows(batch, *, training):
    w = harness.variable('w', 1.0)
    return towers.ModelOutput(tf.reduce_mean(batch) * (w if training else harness.variable('late', 1.0)))


def test_a_variable_of_the_evaluation_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'late', which an earlier build of it did not share"):
        towers.train(grows, ONES, config(tmp_path, eval_every_steps=1, global_batch_size=2), eval_dataset=ONES)
