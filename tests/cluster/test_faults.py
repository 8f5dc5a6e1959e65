"""A task that is lost is waited for: the run ends at its last step, with the examples and losses of a run that nothing happened to."""

import random
import re
import signal
import time

import processes
import pytest
import starter
import tensorflow.compat.v1 as tf

STEPS = processes.STEPS


@pytest.fixture(scope='module')
def whole(machines, tmp_path_factory):
    """A training of one process that nothing happened to."""
    made = processes.Training(machines, tmp_path_factory.mktemp('whole') / 'trained')
    assert made.start(worker_hosts=[], ps_hosts=[], master_host=None).wait() == 0, made.command.text()
    return made


def in_tensorboard(training):
    """Tag -> the largest value, of those about the cluster."""
    found = {}
    for path in sorted((training.command.folder / 'run').glob('events.out.tfevents.*')):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag.startswith('cluster/'):
                    found[value.tag] = max(found.get(value.tag, 0), value.simple_value)
    return found


def kill(machines, index):
    assert machines.commands[index].send(signal.SIGKILL)
    starter.wait_for(lambda: machines.commands[index].code() is not None)
    machines.commands[index] = machines.start(index)


def test_a_killed_worker_that_is_started_again_costs_no_example(machines, training, whole):
    training.start()
    training.wait_for_step(14)
    started = time.monotonic()
    kill(machines, 1)
    training.command.wait_for('the cluster failed')
    assert time.monotonic() - started < 5
    processes.check_same(training, whole)
    assert 'worker 1 at' in training.command.text() and in_tensorboard(training)['cluster/recoveries'] == 1
    shown = in_tensorboard(training)
    for worker in range(3):
        weights = 4 * (4 * 8 + 8)
        assert weights <= shown[f'cluster/worker_{worker}/bytes_in'] < 1.5 * weights  # and some numbers about the batch
        assert shown[f'cluster/worker_{worker}/bytes_out'] >= weights
        assert shown[f'cluster/worker_{worker}/work_ms'] > 0 and shown[f'cluster/worker_{worker}/examples_per_sec'] > 0
    going_on = re.search(r'from step (\d+) the run goes on at step (\d+)', training.command.text())
    assert 14 <= int(going_on[1]) <= int(going_on[2]) < STEPS  # the variables are on the master, which lives


@pytest.mark.soak
def test_a_frozen_worker_is_noticed_and_goes_on(machines, training, whole):
    training.start()
    training.wait_for_step(14)
    machines.commands[2].send(signal.SIGSTOP)
    try:
        training.command.wait_for('the cluster failed')
    finally:
        machines.commands[2].send(signal.SIGCONT)
    processes.check_same(training, whole)
    assert 'Deadline' in training.command.text() and in_tensorboard(training)['cluster/recoveries'] == 1


@pytest.mark.soak
def test_a_killed_master_is_waited_for_on_the_same_ports(machines, training, whole):
    training.start()
    training.wait_for_step(14)
    training.command.wait_for('Saved checkpoint')  # the step behind it may be made before it is written
    training.command.send(signal.SIGKILL)
    starter.wait_for(lambda: all('no sign of life of the master' in command.text() for command in machines.commands), 15)
    training.start()
    processes.check_same(training, whole)
    assert 'Going on from' in training.command.text(), training.text()


@pytest.mark.soak
@pytest.mark.parametrize('seed', range(5))
def test_workers_killed_at_random_steps(machines, training, whole, seed):
    chance = random.Random(seed)
    training.start(step_timeout_secs=30)
    for _ in range(2):
        training.wait_for_step(max(training.rows(), default=0) + chance.randint(1, 15))
        time.sleep(chance.uniform(0, 0.05))
        kill(machines, chance.randrange(3))
    processes.check_same(training, whole)


@pytest.mark.soak
def test_a_worker_that_does_not_come_back_ends_the_run(machines, training):
    training.start(worker_grace_secs=1)
    training.wait_for_step(14)
    machines.commands[1].send(signal.SIGKILL)
    try:
        assert training.command.wait() == 1
        assert 'Not back within 1 s (--worker_grace_secs): worker 1 at' in training.command.text()
    finally:
        machines.commands[1] = machines.start(1)


@pytest.mark.soak
def test_a_run_goes_on_without_a_worker_and_takes_it_in_again(machines, training, tmp_path):
    steps = 2000  # time for a worker to start
    alone = processes.Training(machines, tmp_path / 'alone')
    assert alone.start(steps=steps, worker_hosts=[], master_host=None).wait() == 0
    training.start(steps=steps, worker_grace_secs=1, min_workers=2, step_timeout_secs=30)
    training.wait_for_step(14)
    processes.leave_out_and_take_in(machines, training)
    processes.check_rows(
        training.rows(), alone.rows(), training
    )  # rounding aside the losses are the same too, but it grows in so many steps
    text = training.command.text()
    assert ['6 towers on 3 machines', '4 towers on 2 machines', '6 towers on 3 machines'] == re.findall(r'\d towers on \d machines', text)


@pytest.mark.soak
def test_a_killed_parameter_task_is_restored(tmp_path, whole):
    machines = processes.Machines(tmp_path / 'machines', 2, ps=2)
    training = processes.Training(machines, tmp_path / 'trained')
    try:
        training.start()
        training.wait_for_step(14)
        kill(machines, 3)
        processes.check_same(training, whole)
        assert 'ps 1 at' in training.command.text()
    finally:
        training.command.send(signal.SIGKILL)
        machines.close()
