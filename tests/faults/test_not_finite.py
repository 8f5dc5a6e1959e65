"""A step that is not finite, in a command from start to end: what each policy makes of it, and what a replay finds."""

import json
import pathlib
import shutil

import harness
import numpy as np
import pytest
import spoiled_work
import starter
import tensorflow.compat.v1 as tf

from towers.checkpoint import manifest

WORK = pathlib.Path(__file__).with_name('spoiled_work.py')
TRAIN, REPLAY = (str(starter.ROOT / 'scripts' / name) for name in ('train.py', 'replay.py'))
DONE, MISUSED, DIVERGED = 0, 2, 3
STEPS = 8
FOUND = 'Step 5 is not finite on tower 1: the loss is inf; the gradient of w holds 1 inf in 1 values (and of 1 more of 2 variables). '


@pytest.fixture
def train(commands, tmp_path):
    """Trains in the test's folder; returns the exit code and what the command wrote."""
    shutil.copy(WORK, tmp_path)

    def run(policy, strategy='parameter_server', data='spoiled', *more):
        where = ['--model_dir=run', '--device=cpu', '--num_gpus=2', f'--strategy={strategy}', f'--nan_policy={policy}']
        what = ['--model=spoiled_work:model', f'--dataset=spoiled_work:{data}', '--global_batch_size=4', '--eval_dataset=none']
        how = ['--optimizer=sgd', '--learning_rate=0.01', f'--train_steps={STEPS}', '--save_steps=3', '--log_steps=1']
        command = commands.start(tmp_path, TRAIN, *where, *what, *how, *more)
        return command.wait(), command.text()

    return run


def values(folder):
    """The step and the variables of the newest checkpoint."""
    found = manifest.newest(str(folder / 'run'))
    reader = tf.train.load_checkpoint(found.prefix)
    names = set(reader.get_variable_to_shape_map()) - {'input_position', 'input_place'}
    return found.step, {name: reader.get_tensor(name) for name in names}


def expected(strategy, without, steps=STEPS):
    """The variables of a training that never saw some batches."""
    config = harness.config(strategy, 2, global_batch_size=4, learning_rate=0.01)
    return harness.train(spoiled_work.model, harness.numbers(*spoiled_work.rows(without=without)), config, steps=steps)[1]


def check(found, strategy, without, skipped=1):
    step, variables = found
    assert step == STEPS and variables.pop('skipped_steps') == skipped
    for name, value in variables.items():
        np.testing.assert_array_equal(value, expected(strategy, without)[name], err_msg=name)


@harness.each_strategy
def test_skip_goes_on_as_if_the_batch_were_not_there(train, tmp_path, strategy):
    code, said = train('skip', strategy)
    assert code == DONE, said
    assert FOUND in said and 'The step is left out and the next batch taken (1 in a row of at most 10, 1 in all).' in said
    check(values(tmp_path), strategy, without=[5])
    rows = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert [(row['step'], row['skipped']) for row in rows] == [(step, int(step > 4)) for step in range(1, STEPS + 1)]


@harness.each_strategy
def test_rollback_goes_back_to_the_checkpoint_and_on_past_the_batch(train, tmp_path, strategy):
    code, said = train('rollback', strategy)
    assert code == DONE, said
    assert FOUND in said and 'Going back to step 3 and on with the next batch' in said
    check(values(tmp_path), strategy, without=[4, 5])
    rows = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    counted = [(row['step'], row['skipped'], row['rollbacks']) for row in rows]
    assert counted == [(step, int(step > 3), int(step > 3)) for step in range(1, STEPS + 1)]


@harness.each_strategy
def test_stop_leaves_the_last_checkpoint_from_which_another_policy_goes_on(train, tmp_path, strategy):
    code, said = train('stop', strategy)
    assert code == DIVERGED and FOUND in said and 'Traceback' not in said, said
    assert [found.step for found in manifest.all(str(tmp_path / 'run'))] == [3]
    if strategy == 'mirrored':
        code, said = train('skip', strategy)
        assert code == DONE and 'Step 5 is not finite on tower 1: ' in said, said
        check(values(tmp_path), strategy, without=[5])


def test_rollback_before_the_first_checkpoint_starts_again_with_the_next_batch(train, tmp_path):
    code, said = train('rollback', 'mirrored', 'at_once')
    assert code == DONE and 'Going back to step 0 and on with the next batch' in said, said
    check(values(tmp_path), 'mirrored', without=[1])


def test_above_the_limit_it_stops(train, tmp_path):
    code, said = train('skip', 'parameter_server', 'hopeless', '--nan_limit=2')
    assert code == DIVERGED and said.count('is not finite on tower 1') == 3, said
    assert 'That is one more than --nan_limit=2 in a row.' in said and 'Traceback' not in said
    assert values(tmp_path)[0] == 3 and len(list((tmp_path / 'run' / 'bundles').iterdir())) == 3


def test_a_replay_names_the_operation_and_its_line(train, commands, tmp_path):
    train('stop', 'mirrored')
    command = commands.start(tmp_path, REPLAY, 'run/bundles/step-5')
    assert command.wait() == DONE, command.text()
    rows = [line.split(maxsplit=2) for line in command.text().splitlines()]
    [line] = [number for number, text in enumerate(WORK.read_text().splitlines(), 1) if 'tf.log(' in text]
    assert ['made', 'at', f'{tmp_path / WORK.name}:{line}'] in rows and ['operation', 'tower_0/Log', '(Log)'] in rows, command.text()
    fine = commands.start(tmp_path, REPLAY, '--bundle=run/bundles/step-5', '--tower=0')
    assert fine.wait() == 1 and 'Not reproduced: all is finite this time' in fine.text()
    wrong = commands.start(tmp_path, REPLAY)
    assert wrong.wait() == MISUSED and 'No bundle was given' in wrong.text() and 'Traceback' not in wrong.text()
