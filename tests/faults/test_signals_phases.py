"""A first SIGTERM or SIGINT at any moment: the step in flight ends, it is saved, exit 75, and no process is left behind."""

import contextlib
import dataclasses
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import starter

from towers.checkpoint import manifest

TRAIN, EVALUATE = (str(starter.ROOT / 'scripts' / name) for name in ('train.py', 'evaluate.py'))
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WORK = pathlib.Path(__file__).with_name('waiting_work.py')
STOPPED, UNSAVED, KILLED = 75, 76, -9
MOMENTS = [0, *[pytest.param(moment, marks=pytest.mark.soak) for moment in range(1, 5)]]

each_moment = pytest.mark.parametrize('moment', MOMENTS)


def flags(*more, data='numbers', eval_data='none', **model_args):
    args = [f'--model_args={name}={value}' for name, value in model_args.items()]
    what = ['--model=waiting_work:model', f'--dataset=waiting_work:{data}', *args]
    if eval_data != 'none':
        eval_data = f'waiting_work:{eval_data}'
    where = ['--model_dir=run', '--device=cpu', '--num_gpus=2', '--global_batch_size=4', '--learning_rate=0.001']
    return [*what, f'--eval_dataset={eval_data}', *where, *more]


@pytest.fixture
def train(commands, tmp_path):
    """Starts a training in the test's folder."""
    shutil.copy(WORK, tmp_path)
    return lambda *more, **how: commands.start(tmp_path, TRAIN, *flags(*more, **how))


def at_random(moment, phase, longest):
    """A signal, after a moment that is the same at each run of the test."""
    chance = random.Random(f'{phase} {moment}')
    time.sleep(chance.uniform(0, longest))
    return chance.choice(SIGNALS)


def newest_step(command):
    found = manifest.newest(str(command.folder / 'run'))
    return found and found.step


def check_stopped(command):
    """It ended with 75, said what was saved, and that is there; returns the steps made and the step saved."""
    assert command.wait() == STOPPED, command.text()
    said = command.text()
    assert 'Traceback' not in said
    saved = re.search(r'after step (\d+), which is saved; run the same command again', said)
    if saved:
        assert newest_step(command) == int(saved[1]) > 0
    else:
        assert re.search('nothing to save|Stopped by a signal', said), said
    starter.wait_for(lambda: not command.processes(), 30)
    return int(saved[1]) if saved else None


@each_moment
def test_while_python_and_tensorflow_are_loaded(tmp_path, moment):
    shutil.copy(WORK, tmp_path)
    process = subprocess.Popen([sys.executable, TRAIN, *flags()], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        maps = pathlib.Path(f'/proc/{process.pid}/maps')
        starter.wait_for(lambda: 'numpy' in maps.read_text())
        number = at_random(moment, 'load', 0.8)
        process.send_signal(number)
        output, said = process.communicate(timeout=starter.LIMIT_SECS)
    if 'BUILDING' in output:  # a machine that was faster than the test
        return
    assert (process.returncode, output) == (STOPPED, ''), said
    assert said.count('\n') == 1 and 'nothing to save' in said
    assert not (tmp_path / 'run').exists()


@each_moment
def test_while_the_graph_is_built(train, moment):
    command = train(build_secs=0.5)
    command.wait_for('BUILDING')
    command.send(at_random(moment, 'build', 0.4))
    assert check_stopped(command) is None
    assert 'before the first step: nothing to save' in command.text() and '\nstep ' not in command.text()
    assert newest_step(command) is None


@each_moment
def test_while_the_session_is_made_and_the_first_step_runs(train, moment):
    command = train('--train_steps=1000000', op_secs=0.3)
    command.wait_for('towers on')
    command.send(at_random(moment, 'first', 1.0))
    check_stopped(command)


@each_moment
def test_between_and_in_steps_and_the_run_goes_on(train, moment):
    command = train('--train_steps=1000000', '--log_steps=1')
    command.wait_for('\nstep 3/')
    command.send(at_random(moment, 'steps', 0.5))
    step = check_stopped(command)
    shown = [int(number) for number in re.findall(r'^step (\d+)/', command.text(), re.MULTILINE)]
    assert shown[-1] == step == max(shown)
    command = train(f'--train_steps={step + 2}', '--log_steps=1')
    assert command.wait() == 0
    assert f'Going on from {command.folder}/run/ckpt-{step} ' in command.text()
    assert re.search(rf'^step {step + 1}/', command.text(), re.MULTILINE)


@each_moment
@pytest.mark.parametrize('how', ['--nosync_checkpoint', pytest.param('--sync_checkpoint', marks=pytest.mark.soak)])
def test_while_a_checkpoint_is_saved(train, moment, how):
    command = train('--train_steps=1000000', '--save_steps=1', how, megabytes=30)
    command.wait_for('Saved checkpoint')
    command.send(at_random(moment, f'save {how}', 0.5))
    assert check_stopped(command) is not None
    files = {path.name.split('.')[0] for path in (command.folder / 'run').glob('ckpt-*')}
    assert files == {f'ckpt-{found.step}' for found in manifest.all(str(command.folder / 'run'))}


@each_moment
def test_while_the_end_is_evaluated(train, moment):
    command = train('--train_steps=3', '--eval_batch_size=1', eval_data='slow_numbers')
    command.wait_for('BUILDING evaluation')
    command.send(at_random(moment, 'evaluation', 2.0))
    assert check_stopped(command) == 3
    assert not (command.folder / 'run/eval/test/results.jsonl').exists()


@pytest.mark.parametrize(
    ('settings', 'second', 'saved'),
    [(['--prefetch=2', '--save_steps=20', '--sync_checkpoint'], signal.SIGINT, 40), (['--grace_secs=1'], None, None)],
    ids=['second signal', 'end of the grace'],
)
def test_while_it_waits_for_data_that_never_comes(train, settings, second, saved):
    command = train('--train_steps=1000', '--log_steps=1', *settings, data='blocking_numbers')
    command.wait_for('step 50/')
    starter.wait_for(lambda: newest_step(command) == saved)
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    command.wait_for('stopping after the step in flight')
    start = time.monotonic()
    if second:
        command.send(second)
    assert command.wait() == UNSAVED
    assert time.monotonic() - start < 5 + (not second)
    assert newest_step(command) == saved and 'Traceback' not in command.text()


@pytest.mark.parametrize(
    ('settings', 'earlier'),
    [
        (['--prefetch=2', '--save_steps=20', '--sync_checkpoint'], 'that of batch 40'),
        (['--input_pipeline=sharded'], 'the start of the pass'),
        (['--prefetch=2', '--save_steps=20', '--sync_checkpoint', '--steps_per_run=20', '--log_steps=20'], 'that of batch 40'),
    ],
    ids=['an earlier checkpoint', 'the first', 'in a call of several steps'],
)
def test_the_last_step_is_saved_though_its_data_never_comes(train, settings, earlier):
    command = train('--train_steps=53', '--log_steps=1', *settings, data='blocking_numbers')
    is_several = '--steps_per_run=20' in settings
    command.wait_for('step 40/' if is_several else 'step 50/')
    time.sleep(3 * is_several)  # nothing tells of the ten steps behind
    command.send(signal.SIGTERM)
    assert check_stopped(command) == 50
    assert f'checkpoint 50 holds {earlier}, from where a resume reads on to batch 50 of pass 0' in command.text()
    (command.folder / 'pipe').unlink()
    (command.folder / 'pipe').write_text('2\n' * 12)  # now the data is there
    again = train('--train_steps=53', '--log_steps=1', *settings, data='blocking_numbers')
    assert again.wait() == 0 and newest_step(again) == 53, again.text()
    assert f'Read {10 if "40" in earlier else 50} batches that the run has trained on' in again.text()
    assert 'beginning of an epoch' not in again.text()


def test_a_save_does_not_wait_for_data(train):
    """The step is made and its checkpoint due, while the input waits for what comes after it."""
    command = train('--train_steps=1000', '--log_steps=1', '--prefetch=4', '--save_steps=48', '--sync_checkpoint', data='blocking_numbers')
    starter.wait_for(lambda: newest_step(command) == 48)
    assert 'checkpoint 48 holds the start of the pass' in command.text()
    command.wait_for('step 50/')
    command.send(signal.SIGTERM)
    assert check_stopped(command) == 50


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_behind_the_last_line_the_run_is_done(train, number):
    command = train('--train_steps=2')
    command.wait_for('TensorBoard')
    while command.code() is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            command.send(number)
        time.sleep(0.005)
    assert command.code() == 0


@each_moment
@pytest.mark.parametrize('mode', ['once', 'continuous'])
def test_in_an_evaluator(commands, train, tmp_path, moment, mode):
    assert train('--train_steps=2').wait() == 0
    shutil.rmtree(tmp_path / 'run/eval', ignore_errors=True)
    about = manifest.newest(str(tmp_path / 'run')).manifest
    manifest.write(str(tmp_path / 'run'), dataclasses.replace(about, final=False))
    data, how = ('numbers', ['--continuous']) if mode == 'continuous' else ('slow_numbers', [])
    command = commands.start(tmp_path, EVALUATE, '--model_dir=run', '--eval_batch_size=1', f'--eval_dataset=waiting_work:{data}', *how)
    command.wait_for('Evaluated ckpt-2' if mode == 'continuous' else 'BUILDING evaluation')
    command.send(at_random(moment, mode, 2.0))
    check_stopped(command)
    assert (tmp_path / 'run/eval/test/results.jsonl').exists() == (mode == 'continuous')


@each_moment
@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_with_an_evaluator_and_tensorboard_beside_it(train, moment, number):
    command = train('--train_steps=1000000', '--evaluate', '--tensorboard', '--log_steps=20', eval_data='slow_numbers')
    command.wait_for('\nstep 20/')
    at_random(moment, 'beside', 8.0 if moment else 0.0)
    children = ' '.join(command.processes().values())
    assert '_tensorboard' in children and 'spawn_main' in children
    command.send(number)
    if number == signal.SIGKILL:
        assert command.wait() == KILLED
        starter.wait_for(lambda: not command.processes(), 30)
    else:
        check_stopped(command)
