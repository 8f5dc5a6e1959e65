"""Variables that outlive their session in the tasks that hold them are gone on with where they are whole, and only there."""

import json
import pathlib
import random
import re
import signal
import time

import harness
import numpy as np
import processes
import pytest
import starter
import tensorflow.compat.v1 as tf

from towers.checkpoint import manifest

PROGRAM = pathlib.Path(__file__).resolve().parent / 'kept_training.py'
PATIENT = {'step_timeout_secs': 60}  # nothing is frozen here, but the machine may be busy
ENDLESS = {**PATIENT, 'save_steps': 10**6}  # a checkpoint at the end only


@pytest.fixture(scope='module')
def machines(tmp_path_factory):
    """Two workers, and two tasks for the parameters."""
    made = processes.Machines(tmp_path_factory.mktemp('machines'), 2, ps=2)
    yield made
    made.close()


@pytest.fixture
def training(machines, tmp_path):
    made = processes.Training(machines, tmp_path / 'trained', PROGRAM)
    yield made
    made.close()


@pytest.fixture(scope='module')
def whole(machines, tmp_path_factory):
    """A training of one process that nothing happened to, with all its checkpoints."""
    made = processes.Training(machines, tmp_path_factory.mktemp('whole') / 'trained', PROGRAM)
    alone = {'worker_hosts': [], 'ps_hosts': [], 'master_host': None, 'save_steps': 1, 'sync_checkpoint': True, 'keep_checkpoints': 100}
    assert made.start(**PATIENT, **alone).wait() == 0, made.command.text()
    return made


def going_on(training):
    """The steps at which variables were gone on with."""
    return [int(step) for step in re.findall(r'going on with them at step (\d+)', training.text())]


def held(machines):
    """The variables in the memory of the parameter tasks, by name."""
    found = {}
    for index, host in enumerate(machines.flags['ps_hosts']):
        with tf.Graph().as_default() as graph, tf.device(f'/job:ps/task:{index}/cpu:0'):
            for name in ('w', 'late', 'out', 'table'):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=None, shared_name=name)
                found_here = tf.raw_ops.VarIsInitializedOp(resource=handle), tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
                config = tf.ConfigProto(device_filters=[f'/job:ps/task:{index}'])
                with tf.Session(f'grpc://{host}', graph=graph, config=config) as session:
                    if session.run(found_here[0]):
                        found[name] = session.run(found_here[1])
    return found


def reported(training, step):
    """The rows of a step."""
    rows = map(json.loads, (training.folder / 'run/metrics.jsonl').read_text().splitlines())
    return [row for row in rows if row['step'] == step]


def losses_in_tensorboard(training):
    """Step -> loss."""
    paths = map(str, sorted((training.folder / 'run').glob('events.out.tfevents.*')))
    events = [event for path in paths for event in tf.train.summary_iterator(path)]
    return {event.step: value.simple_value for event in events for value in event.summary.value if value.tag == 'loss'}


def test_a_killed_master_loses_no_step_of_variables_on_parameter_tasks(machines, training, whole):
    pids = None
    for step in (14, 37):
        training.start(**ENDLESS)
        training.wait_for_step(step)
        pids = pids or [command.pid for command in machines.commands[2:]]
        training.kill()
    training.start(**ENDLESS)
    processes.check_same(training, whole)
    [first, second] = going_on(training)
    assert first >= 14 and second >= 37 and 'goes on from' not in training.text()
    assert [command.pid for command in machines.commands[2:]] == pids


@pytest.mark.parametrize('ended_by', [signal.SIGKILL, signal.SIGTERM])
def test_an_update_that_was_not_written_whole_is_not_gone_on_with(machines, training, whole, ended_by):
    (training.folder / 'hang').write_text('23')
    training.start(step_timeout_secs=60 if ended_by == signal.SIGKILL else 5)
    training.wait_for_step(22)
    at = {}

    def is_torn():
        """Some of the variables are those of step 23, others are those of step 22."""
        for name, value in held(machines).items():
            before, after = (processes.values_of(manifest.prefix_of(str(whole.folder / 'run'), step))[name] for step in (22, 23))
            at[name] = [step for step, wanted in ((22, before), (23, after)) if np.allclose(value, wanted, rtol=1e-5, atol=1e-5)]
        return at['late'] == [22] and at['w'] == at['out'] == [23]

    starter.wait_for(is_torn, 20)
    training.command.send(ended_by)
    assert training.command.wait(40) == (0 if ended_by == signal.SIGTERM else -ended_by), training.command.text()
    (training.folder / 'hang').unlink()
    training.start(**PATIENT)
    processes.check_same(training, whole)
    assert 'the update to step 23 was not written whole. Going on from checkpoint 20' in training.text()
    said = 'Nothing is saved that is newer than checkpoint 20: the update to step 23 was not written whole' in training.text()
    assert said == (ended_by == signal.SIGTERM)


@pytest.mark.parametrize(('who', 'step'), [('worker', 23), ('master', processes.STEPS)])
def test_a_step_that_its_session_did_not_live_to_report_has_its_row(machines, training, whole, who, step):
    machines.all()
    (training.folder / 'lose').write_text(f'{step} {machines.commands[1].pid if who == "worker" else 0}')
    training.start(**ENDLESS)
    if who == 'worker':
        training.command.wait_for('the cluster failed')
        starter.wait_for(lambda: machines.commands[1].code() is not None)
        machines.commands[1] = machines.start(1)
    else:
        assert training.command.wait() == -signal.SIGKILL
        training.start(**ENDLESS)
    processes.check_same(training, whole)
    assert going_on(training) == [step]
    [row], [wanted] = reported(training, step), reported(whole, step)
    assert row.keys() == {'step', 'examples', 'skipped', 'loss', 'penalty', 'total_loss', 'learning_rate'}
    assert row == pytest.approx({name: wanted[name] for name in row}, rel=harness.FP32_SUM)
    assert losses_in_tensorboard(training)[step] == pytest.approx(row['loss'])


def test_variables_of_another_run_are_not_gone_on_with(machines, training, whole, tmp_path):
    training.start(**ENDLESS)
    training.wait_for_step(5)
    training.kill()
    other = processes.Training(machines, tmp_path / 'other', PROGRAM)
    other.start(**PATIENT)
    processes.check_same(other, whole)
    other.close()
    assert 'are not gone on with: they are of another run. Going on from the start' in other.text()


@pytest.mark.soak
def test_a_restarted_parameter_task_is_noticed(machines, training, whole):
    training.start(**PATIENT)
    training.wait_for_step(14)
    training.kill()
    machines.commands[3].send(signal.SIGKILL)
    starter.wait_for(lambda: machines.commands[3].code() is not None)
    training.start(**PATIENT)
    processes.check_same(training, whole)
    assert '/job:ps/task:1/cpu:0 has none. Going on from checkpoint 10' in training.text()


@pytest.mark.soak
def test_a_lost_worker_loses_no_step_of_variables_on_parameter_tasks(machines, training, whole):
    training.start(**ENDLESS)
    for step in (14, 37):
        training.wait_for_step(step)
        machines.commands[1].send(signal.SIGKILL)
        starter.wait_for(lambda: machines.commands[1].code() is not None)
        machines.commands[1] = machines.start(1)
        training.command.wait_for('the cluster failed')
    processes.check_same(training, whole)
    assert len(going_on(training)) == 2 and min(going_on(training)) >= 14


@pytest.mark.soak
@pytest.mark.parametrize('seed', range(5))
def test_a_master_killed_at_random_moments(machines, training, whole, seed):
    chance = random.Random(seed)
    for step in (9, 20, 31, 42):
        training.start(**ENDLESS)
        training.wait_for_step(step)
        time.sleep(chance.uniform(0, 0.02))
        training.kill()
    training.start(**ENDLESS)
    processes.check_same(training, whole)
