"""A signal, and a second loss, while a machine that was lost is waited for."""

import signal

import pytest
import starter

from towers.checkpoint import manifest

RARELY = {'save_steps': 100_000, 'save_secs': 3600.0}


@pytest.mark.parametrize('lost', [(1,), pytest.param((0, 2), marks=pytest.mark.soak)])
def test_a_signal_while_lost_workers_are_waited_for_saves_what_there_is(machines, training, lost):
    training.start(steps=5000, **RARELY)
    training.wait_for_step(14)
    for place in lost:
        machines.commands[place].send(signal.SIGKILL)
    training.command.wait_for('Lost:')
    training.command.send(signal.SIGINT)
    assert training.command.wait(45) == 0, training.command.text()
    saved = manifest.newest(str(training.folder / 'run')).step
    assert saved >= max(training.rows()) >= 14
    training.start(steps=saved + 20)
    assert training.command.wait() == 0, training.command.text()
    assert f'at step {saved}' in training.command.text()
    assert sorted(training.logs()[1]) == list(range(1, saved + 21))


@pytest.mark.soak
def test_a_worker_that_is_back_takes_the_place_of_another_that_is_lost(machines, training):
    training.start(steps=5000, worker_grace_secs=2, min_workers=2, step_timeout_secs=30, **RARELY)
    training.wait_for_step(14)
    machines.commands[1].send(signal.SIGKILL)
    training.command.wait_for('Going on with 2 machines')
    machines.commands[1] = machines.start(1)
    training.command.wait_for('A machine is back')
    machines.commands[0].send(signal.SIGKILL)
    training.command.wait_for('Back in the run: worker 1 at')
    starter.wait_for(lambda: training.command.text().count('the run goes on at step') == 2)
    reached = max(training.rows())
    training.wait_for_step(reached + 20)
    training.command.send(signal.SIGINT)
    assert training.command.wait() == 0, training.command.text()
    text = training.command.text()
    assert text.count('Going on with 2 machines') == 2 and text.count('4 towers on 2 machines') == 2
    saved = manifest.newest(str(training.folder / 'run')).step
    training.start(steps=saved + 20)
    assert training.command.wait() == 0, training.command.text()
    assert sorted(training.logs()[1]) == list(range(1, saved + 21))
