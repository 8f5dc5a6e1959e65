"""Two trainers in one run directory, and resumes under other terms, as commands: exit codes, one line each, nothing touched."""

import json
import os
import signal

import pytest
import starter

from towers.checkpoint import manifest

TRAIN = str(starter.ROOT / 'scripts' / 'train.py')
DONE, FAILED, MISUSED, STOPPED = 0, 1, 2, 75
LONG = '--train_steps=1000000'


@pytest.fixture
def train(commands, tmp_path):
    """Starts a training of digits in tmp_path/run, as the command `name`."""
    flags = ['--model=mlp', f'--model_dir={tmp_path / "run"}', '--device=cpu', '--eval_dataset=none', '--save_steps=5', '--log_steps=5']
    return lambda name, *more: commands.start(tmp_path / name, TRAIN, *flags, *more)


def running(command, run):
    """Waits until a training has saved."""
    starter.wait_for(lambda: manifest.all(str(run)) or command.code() is not None)
    assert command.code() is None, command.text()
    return command


def refused(command, *parts, code=MISUSED):
    assert command.wait() == code, command.text()
    last = command.text().strip().splitlines()[-1]
    assert all(part in last for part in parts), last
    assert 'Traceback' not in command.text()


def test_a_second_trainer_is_refused_and_a_dead_ones_place_is_taken(train, tmp_path):
    first = running(train('first', LONG), tmp_path / 'run')
    refused(train('second', LONG), f'is being trained by process {first.pid} on', 'give another --model_dir')
    first.send(signal.SIGSTOP)
    refused(train('second', '--from_scratch'), f'process {first.pid}')
    assert first.code() is None
    first.send(signal.SIGKILL)
    first.wait()
    step = manifest.newest(str(tmp_path / 'run')).step
    third = train('third', f'--train_steps={step + 2}')
    assert third.wait() == DONE, third.text()
    assert f'process {first.pid} on' in third.text() and 'taken over' in third.text() and '(2 in this run)' in third.text()


@pytest.mark.soak
def test_of_several_started_at_once_one_trains(train, tmp_path):
    made = [train(f'trainer-{number}', LONG) for number in range(4)]
    starter.wait_for(lambda: len([command for command in made if command.code() == MISUSED]) == 3)
    [left] = [command for command in made if command.code() is None]
    running(left, tmp_path / 'run').send(signal.SIGTERM)
    assert left.wait() == STOPPED, left.text()
    assert [json.loads(line)['step'] for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()][:2] == [5, 10]


def take_over(run):
    os.rename(run / 'sessions/writer-1.json', run / 'sessions/writer-2.json')


def move_away(run):
    os.rename(run, run.with_name('elsewhere'))


@pytest.mark.parametrize(
    ('fault', 'message'),
    [(take_over, 'was taken over by process'), pytest.param(move_away, 'is gone, or all of the run', marks=pytest.mark.soak)],
)
def test_a_trainer_that_lost_the_run_directory_stops_writing(train, tmp_path, fault, message):
    run = tmp_path / 'run'
    command = running(train('command', LONG), run)
    fault(run)
    refused(command, message, 'stops and writes nothing more', code=FAILED)
    assert run.exists() == (fault is take_over)
    assert not any(found.manifest.final for folder in tmp_path.iterdir() for found in manifest.all(str(folder)))


@pytest.mark.soak
def test_other_terms_are_refused_and_a_new_run_takes_the_place_of_the_old_one(train, tmp_path):
    assert train('first', '--train_steps=5', '--num_gpus=2').wait() == DONE
    more = train('second', '--train_steps=6', '--num_gpus=4')
    refused(more, 'global_batch_size was 64, is 128. As before: --global_batch_size=64. To accept it: --allow_changed=global_batch_size.')
    anew = train('third', '--train_steps=6', '--num_gpus=4', '--from_scratch')
    assert anew.wait() == DONE and '(6 in this run)' in anew.text(), anew.text()
    assert [found.step for found in (manifest.newest(str(tmp_path / 'run' / part)) for part in ('', 'old-1'))] == [6, 5]
