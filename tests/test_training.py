"""`towers.train` from end to end: where it starts, where it stops, what it leaves, and that nothing is lost in between."""

import json
import logging
import os
import shutil

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import errors
from towers.checkpoint import manifest

EXAMPLES = 22  # batches of 8: 8, 8, 6 in each pass


def dataset():
    inputs = np.random.default_rng(7).normal(size=(EXAMPLES, 3)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32)
    return tf.data.Dataset.from_tensor_slices({'x': inputs, 'y': targets}).shuffle(EXAMPLES, seed=5)


def model(batch, *, training):
    hidden = tf.tanh(tf.matmul(batch['x'], tf.get_variable('w', [3, 4])) + tf.get_variable('b', [4], initializer=tf.zeros_initializer()))
    error = tf.squared_difference(tf.matmul(towers.dropout(hidden, 0.25, training=training), tf.get_variable('out', [4, 1])), batch['y'])
    return towers.ModelOutput(tf.reduce_mean(error), metrics={'error': towers.mean(error)})


def config(model_dir, **changes):
    settings = {'optimizer': 'momentum', 'learning_rate': 0.05, 'global_batch_size': 8, 'save_steps': 0, 'train_steps': 6, **changes}
    return harness.config(**settings, model_dir=str(model_dir))


def losses(model_dir):
    """Loss by step from metrics.jsonl, later lines winning."""
    with open(os.path.join(model_dir, 'metrics.jsonl')) as file:
        return {row['step']: row['loss'] for row in map(json.loads, file)}


def values(model_dir, step):
    reader = tf.train.load_checkpoint(manifest.prefix_of(str(model_dir), step))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != 'input_position'}


@pytest.fixture(scope='module')
def six_steps(tmp_path_factory):
    """An uninterrupted run on one tower."""
    folder = tmp_path_factory.mktemp('six')
    result = towers.train(model, dataset, config(folder, log_steps=1), eval_dataset=dataset)
    return folder, result


def test_a_run_says_how_it_ended_and_leaves_its_directory(six_steps):
    folder, result = six_steps
    assert (result.step, result.steps_run, result.examples, result.stopped_by) == (6, 6, 44, 'steps')
    assert result.loss == pytest.approx(losses(folder)[6])
    assert result.checkpoint == manifest.prefix_of(str(folder), 6)
    assert result.evaluation['examples'] == EXAMPLES
    assert result.evaluation['loss'] == pytest.approx(result.evaluation['error'])
    [found] = manifest.all(str(folder))
    assert found.manifest.final and found.manifest.examples == 44 and found.manifest.semantics['global_batch_size'] == 8
    with open(folder / 'config.json') as file:
        assert json.load(file)['config']['learning_rate'] == 0.05
    assert tf.train.latest_checkpoint(str(folder)) == result.checkpoint


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 1), ('parameter_server', 4), ('mirrored', 2)])
def test_three_steps_and_three_more_are_six(six_steps, tmp_path, strategy, n):
    folder = tmp_path / 'before'
    towers.train(model, dataset, config(folder, train_steps=3, log_steps=1))
    moved = tmp_path / 'moved'
    shutil.move(folder, moved)
    result = towers.train(model, dataset, config(moved, strategy=strategy, n=n, log_steps=1))
    assert (result.step, result.steps_run, result.examples) == (6, 3, 44)
    tolerance = harness.EXACT if n == 1 else harness.FP32_SAME_ORDER
    expected = losses(six_steps[0])
    np.testing.assert_allclose([losses(moved)[s] for s in range(1, 7)], [expected[s] for s in range(1, 7)], rtol=0, atol=tolerance)
    whole, resumed = values(six_steps[0], 6), values(moved, 6)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, rtol=0, atol=tolerance, err_msg=name)


def test_a_finished_run_makes_no_step_and_keeps_its_results(six_steps, tmp_path):
    folder = tmp_path / 'again'
    shutil.copytree(six_steps[0], folder)
    before = (folder / 'eval' / 'test' / 'results.jsonl').read_text()
    result = towers.train(model, dataset, config(folder), eval_dataset=dataset)
    assert (result.step, result.steps_run, result.examples, result.examples_per_sec) == (6, 0, 44, 0.0)
    assert np.isnan(result.loss) and result.evaluation['examples'] == EXAMPLES
    assert (folder / 'eval' / 'test' / 'results.jsonl').read_text() == before


@pytest.mark.parametrize(
    ('changes', 'step', 'stopped_by'),
    [
        ({'train_steps': None, 'train_epochs': 2}, 6, 'steps'),
        ({'train_steps': 2, 'train_epochs': 2}, 2, 'steps'),
        ({'train_secs': 0.0}, 1, 'time'),
    ],
)
def test_where_it_stops(tmp_path, changes, step, stopped_by):
    result = towers.train(model, dataset, config(tmp_path, **changes))
    assert (result.step, result.stopped_by) == (step, stopped_by)
    assert manifest.newest(str(tmp_path)).manifest.final


def test_data_of_unknown_size_ends_the_run_at_its_end(tmp_path):
    def filtered():
        return dataset().filter(lambda row: tf.reduce_any(row['x'] < 10.0))

    settings = config(tmp_path, train_steps=None, train_epochs=2)
    result = towers.train(model, filtered, settings)
    assert (result.step, result.examples, result.stopped_by) == (6, 44, 'data')
    again = towers.train(model, filtered, settings)
    assert (again.step, again.steps_run) == (6, 0)


class Notes(tf.train.SessionRunHook):
    """A hook as users have them: it fetches by name, and asks to stop."""

    def __init__(self, stop_at):
        self.seen, self.stop_at, self.ended = [], stop_at, 0

    def before_run(self, run_context):
        return tf.train.SessionRunArgs({'w': 'w:0', 'step': tf.train.get_global_step()})

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results['w'].shape)
        if len(self.seen) == self.stop_at:
            run_context.request_stop()

    def end(self, session):
        self.ended += 1


def test_a_users_hooks_and_optimizer_run_unchanged(tmp_path):
    notes, rates = Notes(stop_at=3), []

    def optimizer(learning_rate):
        rates.append(learning_rate)
        return tf.train.AdagradOptimizer(learning_rate, initial_accumulator_value=0.5)

    stock = tf.train.LoggingTensorHook({'step': 'global_step:0'}, every_n_iter=1)
    result = towers.train(model, dataset, config(tmp_path, n=2, strategy='mirrored'), hooks=[notes, stock], optimizer=optimizer)
    assert (result.step, result.stopped_by, notes.ended, len(notes.seen)) == (3, 'hook', 1, 3)
    assert len(rates) == 2  # one optimizer for each copy of the variables
    assert 'w/Adagrad' in values(tmp_path, 3)


def test_tensorflows_own_saving_hook_runs_as_users_have_it(tmp_path):
    own = tf.train.CheckpointSaverHook(str(tmp_path / 'own'), save_steps=2)
    towers.train(model, dataset, config(tmp_path / 'run', n=2, train_steps=3), hooks=[own])
    assert os.path.basename(tf.train.latest_checkpoint(str(tmp_path / 'own'))) == 'model.ckpt-3'


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(tmp_path):
    def poisoned():
        return dataset().map(lambda row: {**row, 'y': row['y'] * np.float32('nan')})

    towers.train(model, dataset, config(tmp_path, train_steps=2))
    with pytest.raises(errors.Diverged, match='Step 3'):
        towers.train(model, poisoned, config(tmp_path, allow_changed=('dataset',)))
    assert manifest.newest(str(tmp_path)).step == 2


def test_another_runs_values_start_a_new_one_but_not_its_step(six_steps, tmp_path, caplog):
    logger = logging.getLogger('absl')
    with caplog.at_level(logging.INFO, logger=logger.name):
        settings = config(tmp_path, train_steps=1, learning_rate=0.0, init_checkpoint=str(six_steps[0]), init_exclude=('^out',))
        result = towers.train(model, dataset, settings)
    old, new = values(six_steps[0], 6), values(tmp_path, 1)
    np.testing.assert_array_equal(new['w'], old['w'])
    assert not np.array_equal(new['out'], old['out'])
    assert result.step == 1
    assert 'out: excluded' in caplog.text


def test_rows_of_steps_that_are_made_again_stand_once(six_steps, tmp_path):
    towers.train(model, dataset, config(tmp_path, train_steps=3, log_steps=1))
    with open(tmp_path / 'metrics.jsonl', 'a') as file:  # what a process killed before its next save wrote
        file.write('{"step": 4, "loss": 7.0}\n{"step": 5, "loss": 7.0}\n{"step": 6, "lo')
    towers.train(model, dataset, config(tmp_path, train_steps=6, log_steps=1))
    with open(tmp_path / 'metrics.jsonl') as file:
        assert [json.loads(line)['step'] for line in file] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path) == pytest.approx(losses(six_steps[0]))


def nothing(rate):
    return None


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (tf.train.GradientDescentOptimizer(0.1), r'optimizer= wants a function from .*, got an object of .*GradientDescentOptimizer; give'),
        (nothing, r'optimizer= must return a tf\.train\.Optimizer, got None; give e\.g\. optimizer=lambda rate: tf'),
    ],
    ids=['an optimizer', 'None'],
)  # fmt: skip
def test_what_is_no_optimizer_is_told_how_to_be_one(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        towers.train(model, dataset, config(tmp_path), optimizer=given)


def test_without_a_run_directory_it_makes_one():
    result = towers.train(model, dataset, harness.config(global_batch_size=8, train_steps=1))
    try:
        assert manifest.newest(result.model_dir).step == 1
    finally:
        shutil.rmtree(result.model_dir)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'evaluate': True}, 'evaluation dataset'),
        ({'n': 4, 'global_batch_size': 3}, 'Global batch 3 is smaller than 4 towers.*--num_gpus=3'),
        ({'schedule': 'cosine', 'train_steps': None, 'train_secs': 5.0}, 'decay_over'),
    ],
)
def test_wrong_use_is_said_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        towers.train(model, dataset, config(tmp_path, **changes))
    assert not manifest.all(str(tmp_path))
