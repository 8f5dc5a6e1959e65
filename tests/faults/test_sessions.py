"""Sessions that share GPUs, as commands: who is refused, what is shown, and what a killed one leaves."""

import json
import os
import signal
import subprocess
import sys

import pytest
import starter

TRAIN, SESSIONS = (str(starter.ROOT / 'scripts' / name) for name in ('train.py', 'sessions.py'))
NUMBER = 1000 + os.getpid()  # a fake GPU that nobody else on this machine asks for
DONE, MISUSED, STOPPED = 0, 2, 75


@pytest.fixture
def train(commands, tmp_path):
    """Starts a long training of digits in tmp_path/<name> with a share of one fake GPU, if one is given."""
    flags = ['--model=mlp', '--device=cpu', '--eval_dataset=none', '--log_steps=5', '--train_steps=1000000']

    made = []

    def start(name, share, *more):
        where = [f'--model_dir={tmp_path / name}', f'--visible_gpus={NUMBER}']
        where += [f'--gpu_memory_fraction={share}'] if share else []
        made.append(commands.start(tmp_path / f'of-{name}', TRAIN, *flags, *where, *more))
        return made[-1]

    yield start
    for command in made:
        if command.code() is None:
            command.send(signal.SIGKILL)
            command.wait()


def shown(commands, folder, *flags):
    command = commands.start(folder, SESSIONS, *flags)
    assert command.wait() == DONE, command.text()
    return command.text()


def test_a_share_that_does_not_fit_is_refused_with_the_table(commands, train, tmp_path):
    first = train('first', 0.7, '--intra_op_threads=1', '--inter_op_threads=2')
    first.wait_for('step 5/')
    second = train('second', 0.5)
    assert second.wait() == MISUSED
    lines = second.text().strip().splitlines()[-4:]
    assert lines[0] == f'This session wants 0.50 of fake GPU {NUMBER}, of which 0.70 is held and 0.30 free.'
    assert lines[2].split()[:2] == ['master', str(first.pid)] and lines[2].endswith(str(tmp_path / 'first'))
    assert lines[3].startswith('What would fit: --gpu_memory_fraction=0.3, or --visible_gpus=0, or wait for the end of')
    assert 'Traceback' not in second.text() and not (tmp_path / 'second').exists()

    third = train('third', 0.3)
    third.wait_for('step 5/')
    rows = [json.loads(line) for line in shown(commands, tmp_path / 'look', '--json', f'--model_dir={tmp_path / "first"}').splitlines()]
    facts = {name: rows[0][name] for name in ('role', 'state', 'pid', 'gpus', 'fake', 'share', 'intra_op_threads', 'inter_op_threads')}
    expected = ('master', 'live', first.pid, [NUMBER], True, 0.7, 1, 2)
    assert (len(rows), tuple(facts.values())) == (1, expected)
    table = shown(commands, tmp_path / 'all')
    assert [line.split()[2] for line in table.splitlines() if f'fake {NUMBER}' in line] == [str(first.pid), str(third.pid)]

    first.send(signal.SIGKILL)
    first.wait()
    assert 'gone' in shown(commands, tmp_path / 'again', f'--model_dir={tmp_path / "first"}')
    assert 'gone' not in shown(commands, tmp_path / 'once more', f'--model_dir={tmp_path / "first"}')
    fourth = train('fourth', 0.7)
    fourth.wait_for('step 5/')
    for command in (third, fourth):
        command.send(signal.SIGTERM)
        assert command.wait() == STOPPED, command.text()
    assert f'fake {NUMBER}' not in shown(commands, tmp_path / 'end')


def test_a_plan_takes_what_is_left(commands, train, tmp_path):
    first = train('first', 0.25)
    first.wait_for('step 5/')
    second = train('second', None, '--memory_plan=auto')
    second.wait_for('step 5/')
    [row] = [json.loads(line) for line in shown(commands, tmp_path / 'look', '--json', f'--model_dir={tmp_path / "second"}').splitlines()]
    assert row['share'] == 0.75
    for command in (first, second):
        command.send(signal.SIGTERM)
        command.wait()


def test_a_folder_that_is_not_there_is_wrong_use(commands, tmp_path):
    command = commands.start(tmp_path / 'look', SESSIONS, '--model_dir=nowhere')
    assert command.wait() == MISUSED
    assert command.text().endswith('--model_dir=nowhere is no folder; give that of a run, or none for this machine.\n')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_watching_ends_quietly_by_a_signal(commands, tmp_path, number):
    command = commands.start(tmp_path / 'look', SESSIONS, '--watch', '--every_secs=0.1', f'--model_dir={tmp_path}')
    command.wait_for('run directory')
    command.send(number)
    assert command.wait() == DONE
    assert {line.split()[0] for line in command.text().splitlines()} == {'session'}


def test_nobody_reads_it_any_more(tmp_path):
    watch = [sys.executable, SESSIONS, '--watch', '--every_secs=0.05', f'--model_dir={tmp_path}']
    with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout.readline().startswith('session')
        command.stdout.close()
        assert command.wait(60) == DONE
        assert command.stderr.read() == ''


@pytest.mark.parametrize('secs', ['0', '-1'])
def test_looks_have_time_between_them(commands, tmp_path, secs):
    command = commands.start(tmp_path / 'look', SESSIONS, '--watch', f'--every_secs={secs}')
    assert command.wait() == MISUSED
    assert command.text().endswith(f'--every_secs must be above 0, got {secs}; give e.g. 2.\n')
