"""A signal, or the end of all patience, while machines are lost: what is in the memory of those that live is saved."""

import pathlib
import signal
import time

import processes
import pytest
import starter

from towers.checkpoint import manifest

PROGRAM = pathlib.Path(__file__).resolve().parent / 'stopped_training.py'
RARELY = {'save_steps': 100_000, 'save_secs': 3600.0, 'step_timeout_secs': 30}
STEPS, MORE, STOPPED = 200, 20, 75


@pytest.fixture
def training(machines, tmp_path):
    made = processes.Training(machines, tmp_path / 'trained', PROGRAM)
    yield made
    made.close()


@pytest.fixture(scope='module')
def whole(machines, tmp_path_factory):
    """A training of one process that nothing happened to."""
    made = processes.Training(machines, tmp_path_factory.mktemp('whole') / 'trained')
    assert made.start(steps=STEPS, worker_hosts=[], ps_hosts=[], master_host=None).wait() == 0, made.command.text()
    return made


def check_saved(training, whole, code):
    """It ends with a code and all whole steps saved, from where the next start goes on with every example once."""
    assert training.command.wait(45) == code, training.command.text()
    saved = manifest.newest(str(training.folder / 'run')).step
    assert saved >= max(training.rows()) >= 14
    assert 'Traceback' not in training.command.text() or code == 1
    training.start(steps=saved + MORE)
    assert training.command.wait() == 0, training.command.text()
    assert f'at step {saved}' in training.command.text()
    (ids, losses), (wanted_ids, wanted_losses) = training.logs(), ({s: of[s] for s in range(1, saved + MORE + 1)} for of in whole.logs())
    assert sorted(losses) == sorted(wanted_losses)
    processes.check_rows(losses, wanted_losses, training)
    processes.check_rows(ids, wanted_ids, training)
    return saved


@pytest.mark.parametrize('lost', [(1,), pytest.param((0, 2), marks=pytest.mark.soak)])
def test_a_signal_while_lost_workers_are_waited_for_saves_what_there_is(machines, training, whole, lost):
    training.start(steps=5000, **RARELY)
    training.wait_for_step(14)
    for place in lost:
        machines.commands[place].send(signal.SIGKILL)
    training.command.wait_for('Lost:')
    training.command.send(signal.SIGINT)
    check_saved(training, whole, STOPPED)


@pytest.mark.parametrize('order', ['master first', 'workers first'])
def test_a_signal_to_all_tasks_at_once_saves_what_the_master_holds(machines, training, whole, order):
    training.start(steps=5000, **RARELY)
    training.wait_for_step(14)
    tasks = [training.command, *machines.commands]
    for task in tasks if order == 'master first' else reversed(tasks):
        task.send(signal.SIGTERM)
    check_saved(training, whole, STOPPED)


@pytest.mark.parametrize('secs', [0.0, 1.0])
def test_a_signal_just_behind_the_death_of_a_worker_saves_what_the_master_holds(machines, training, whole, secs):
    training.start(steps=5000, **RARELY)
    training.wait_for_step(14)
    machines.commands[1].send(signal.SIGKILL)
    time.sleep(secs)
    training.command.send(signal.SIGTERM)
    check_saved(training, whole, STOPPED)


def test_a_signal_while_a_new_session_is_made_saves_what_the_master_holds(machines, training, whole):
    training.start(steps=5000, worker_grace_secs=1, min_workers=2, grace_secs=12, **RARELY)
    training.wait_for_step(14)
    machines.commands[1].send(signal.SIGKILL)
    training.command.wait_for('Going on with 2 machines')
    for task in (machines.commands[2], training.command):
        task.send(signal.SIGTERM)
    check_saved(training, whole, STOPPED)


def test_a_signal_while_a_worker_is_frozen_saves_within_the_grace_period(machines, training, whole):
    training.start(steps=5000, grace_secs=12, **RARELY)
    training.wait_for_step(14)
    machines.commands[0].send(signal.SIGSTOP)
    time.sleep(0.3)
    training.command.send(signal.SIGTERM)
    try:
        assert training.command.wait(45) == STOPPED, training.command.text()
    finally:
        machines.commands[0].send(signal.SIGCONT)
    check_saved(training, whole, STOPPED)


@pytest.mark.parametrize(
    ('settings', 'lost', 'said'),
    [
        ({'worker_grace_secs': 1, 'min_workers': 2}, (1, 2), '--min_workers=2 needs 2 machines with towers, 1 of them there. Step'),
        ({'max_recoveries': 0}, (0,), '0 recoveries in a row came no further than step'),
    ],
    ids=['workers', 'recoveries'],
)
def test_a_run_that_gives_up_saves_first(machines, training, whole, settings, lost, said):
    training.start(steps=5000, **settings, **RARELY)
    training.wait_for_step(14)
    for place in lost:
        machines.commands[place].send(signal.SIGKILL)
    saved = check_saved(training, whole, 1)
    assert said in training.text() and f'Step {saved} is saved; run the same command again' in training.text()


@pytest.mark.soak
def test_a_worker_that_is_back_takes_the_place_of_another_that_is_lost(machines, training):
    training.start(steps=5000, worker_grace_secs=2, min_workers=2, **RARELY)
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
    assert training.command.wait() == STOPPED, training.command.text()
    text = training.command.text()
    assert text.count('Going on with 2 machines') == 2 and text.count('4 towers on 2 machines') == 2
    saved = manifest.newest(str(training.folder / 'run')).step
    training.start(steps=saved + 20)
    assert training.command.wait() == 0, training.command.text()
    assert sorted(training.logs()[1]) == list(range(1, saved + 21))
