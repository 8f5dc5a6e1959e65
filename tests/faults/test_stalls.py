"""Steps and inputs that hang: what is waited for is named, the stacks are there, and the run ends or goes on as asked."""

import re
import signal
import time

import pytest
import starter
import test_signals_phases as phases

from towers.checkpoint import manifest

FAILED, STOPPED = 1, 75
train = phases.train  # the fixture
LIMIT = '--step_timeout_secs=3'


def stacks(folder):
    """The text of the only file of stacks in a folder."""
    (path,) = folder.glob('stacks-*.txt')
    return path.read_text()


def last_line(command):
    return command.text().splitlines()[-1]


def test_an_input_that_never_comes(train):
    """It can't be cancelled, so the process has to leave."""
    command = train('--train_steps=1000', '--prefetch=2', '--save_steps=20', '--sync_checkpoint', LIMIT, data='blocking_numbers')
    assert command.wait() == FAILED, command.text()
    assert 'The step after step 50 has not ended within' in last_line(command) and ', waiting for the input (' in last_line(command)
    assert 'Traceback' not in command.text() and 'session.py' in stacks(command.folder / 'run')
    assert manifest.newest(str(command.folder / 'run')).step == 40


def test_a_tower_that_hangs_is_named_and_the_run_ends_by_itself(train):
    command = train('--train_steps=1000', LIMIT, stuck=1)
    assert command.wait() == FAILED, command.text()
    assert 'The step after step 2 has not ended within' in last_line(command) and ', waiting for tower 1 on /cpu:2 (' in last_line(command)
    assert 'Traceback' not in command.text() and 'was not closed' not in command.text()


def test_with_warn_it_waits_on_until_the_input_comes(train):
    command = train('--train_steps=60', '--noexact_resume', LIMIT, '--on_step_timeout=warn', data='gated_numbers')
    command.wait_for('waiting on')
    (command.folder / 'open').write_text('')
    assert command.wait() == 0, command.text()
    assert 'waiting for the input' in command.text()
    assert re.search('(generated_file|waiting_work).* in wait', stacks(command.folder / 'run'))
    assert manifest.newest(str(command.folder / 'run')).step == 60


@pytest.mark.soak
@pytest.mark.parametrize('rounds', [5])
def test_a_process_stopped_and_continued_again_and_again_goes_on(train, rounds):
    command = train('--train_steps=1000000', '--log_steps=20', LIMIT, op_secs=0.02)
    command.wait_for('\nstep 20/')
    for _ in range(rounds):
        command.send(signal.SIGSTOP)
        time.sleep(5.0)
        size = len(command.text())
        command.send(signal.SIGCONT)
        starter.wait_for(lambda size=size: '\nstep ' in command.text()[size:])
    command.send(signal.SIGTERM)
    assert phases.check_stopped(command) > 20
    assert 'has not ended' not in command.text()


def test_an_evaluation_that_hangs(commands, train, tmp_path):
    assert train('--train_steps=2').wait() == 0
    data = '--eval_dataset=waiting_work:blocking_numbers'
    command = commands.start(tmp_path, phases.EVALUATE, '--model_dir=run', data, '--step_timeout_secs=0.7')
    assert command.wait() == FAILED, command.text()
    assert 'Batch 1 of the evaluation of step 2 has not ended within' in last_line(command)
    assert 'waiting for the input' in last_line(command) and stacks(tmp_path / 'run/eval/test')


INSIDE = (
    '--train_steps=1000',
    '--eval_every_steps=2',
    '--save_steps=2',
    '--sync_checkpoint',
)


def test_an_evaluation_between_two_steps_that_hangs_ends_the_run_as_a_step_does(train):
    command = train(*INSIDE, '--step_timeout_secs=0.7', eval_data='blocking_numbers')
    assert command.wait() == FAILED, command.text()
    assert 'Batch 1 of the evaluation of step 2 has not ended within' in last_line(command)
    assert 'waiting for the input' in last_line(command) and stacks(command.folder / 'run/eval/test')
    assert manifest.newest(str(command.folder / 'run')).step == 2


def test_a_signal_while_an_evaluation_between_two_steps_hangs_ends_the_process(train):
    command = train(*INSIDE, '--grace_secs=2', eval_data='stuck_numbers')
    starter.wait_for(lambda: (command.folder / 'stuck').exists())
    command.send(signal.SIGTERM)
    assert command.wait() == 76, command.text()
    assert manifest.newest(str(command.folder / 'run')).step == 2
