"""The evaluator beside a training: its process, how it ends, and what can't be sent to it."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import numpy as np
import pytest
import runs
import tensorflow.compat.v1 as tf
import test_evaluation

from towers import config
from towers.checkpoint import leases, manifest, retention
from towers.evaluators import companion, supervisor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT_SECS = 120


def numbers():
    """Three numbers whose mean is 2; a function of a module, so that another process finds it."""
    return test_evaluation.DATA()


def parts(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays[0])


def crashing(place):
    """Numbers, in the middle of which the process is killed two times, as by a machine without memory."""

    def read(number):
        with open(place, 'a') as file:
            file.write('x')
        if os.path.getsize(place) in (2, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return test_evaluation.DATA().map(lambda number: tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), []))


def waiting(place):
    """Numbers that never come."""

    def read(number):
        open(place, 'w').close()
        time.sleep(LIMIT_SECS)
        return number

    return test_evaluation.DATA().map(lambda number: tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), []))


def always_crashing(place):
    with open(place, 'a') as file:
        file.write('x')
    os._exit(7)


def supervised(*given):
    """A Supervisor of evaluators as (dataset, settings)."""
    return supervisor.Supervisor(test_evaluation.scaled, [supervisor.Evaluator(settings, dataset) for dataset, settings in given])


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(supervisor.logging, 'warning', lambda text, *args: said.append(text % args))
    return said


def wait_until(holds):
    end = time.monotonic() + LIMIT_SECS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def exists(pid):
    """Whether a process runs, and is no zombie."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_several_evaluate_beside_and_end_with_the_last_checkpoint(tmp_path):
    first = runs.config(tmp_path, eval_idle_secs=0)
    second = runs.config(tmp_path, eval_name='other', eval_cadence='newest', eval_nice=12, eval_num_gpus=2)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    data = functools.partial(parts, np.array([1, 2, 6], np.float32))
    with supervised((data, first), (numbers, second)) as beside:
        children = {child.name: child.pid for child in multiprocessing.active_children()}
        priorities = [os.getpriority(os.PRIO_PROCESS, children[f'towers-evaluator-{name}']) for name in ('test', 'other')]
        assert (*priorities, os.getpriority(os.PRIO_PROCESS, 0)) == (max(19, before), max(12, before), before)
        for pid in children.values():
            os.kill(pid, signal.SIGINT)  # as from a terminal; the parent decides
        test_evaluation.publish(tmp_path, 3, final=True)  # of an earlier run, which this one goes on with
        wait_until(lambda: all(os.path.exists(tmp_path / 'eval' / name / 'results.jsonl') for name in ('test', 'other')))
        test_evaluation.publish(tmp_path, 5)
        found = beside.wait(LIMIT_SECS)
    assert found['test'] == {'step': 5, 'examples': 3, 'loss': 15.0, 'twice': 30.0, 'both': [9.0, -9.0]}
    assert found['other'] == {'step': 5, 'examples': 3, 'loss': 10.0, 'twice': 20.0, 'both': [6.0, -6.0]}
    assert multiprocessing.active_children() == []
    assert test_evaluation.steps(tmp_path) == [3, 5]


def test_a_stopped_one_leaves_no_entry_and_no_lease(tmp_path):
    test_evaluation.publish(tmp_path, 3)
    folder = tmp_path / 'sessions'
    with supervised((functools.partial(waiting, str(tmp_path / 'reached')), runs.config(tmp_path))):
        wait_until((tmp_path / 'reached').exists)
        wait_until(lambda: any(name.startswith('session-') for name in os.listdir(folder)))
        assert any(name.startswith('lease-') for name in os.listdir(folder))
    assert os.listdir(folder) == []


def test_no_checkpoint_goes_before_it_is_up(tmp_path):
    keep_one = config.CheckpointConfig(keep_checkpoints=1)
    with supervised((numbers, runs.config(tmp_path))) as beside:
        for step in (1, 2, 3):
            test_evaluation.publish(tmp_path, step)
            retention.tidy(str(tmp_path), keep_one, manifest.all(str(tmp_path)))
        assert [each.step for each in manifest.all(str(tmp_path))] == [1, 2, 3]
        wait_until(lambda: not leases.is_pinned(str(tmp_path), 99))
        beside.wait(LIMIT_SECS)
    assert test_evaluation.steps(tmp_path) == [1, 2, 3]


def test_a_crashed_one_is_started_again_and_a_hopeless_or_late_one_is_a_warning(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(supervisor, '_FIRST_DELAY_SECS', 0.01)
    test_evaluation.publish(tmp_path, 3)
    given = [
        (functools.partial(crashing, str(tmp_path / 'crashes')), 'crashing', 2),
        (functools.partial(always_crashing, str(tmp_path / 'starts')), 'always', 1),
        (functools.partial(int, 'x'), 'wrong', 5),
    ]
    with supervised(*[(data, runs.config(tmp_path, eval_name=name, eval_restarts=limit)) for data, name, limit in given]) as beside:
        found = beside.wait(LIMIT_SECS)
    assert (found['crashing']['step'], found['always'], found['wrong']) == (3, {}, {})
    assert test_evaluation.rows(tmp_path, 'crashing')[0]['loss'] == 6.0 and len(test_evaluation.rows(tmp_path, 'crashing')) == 1
    assert (os.path.getsize(tmp_path / 'crashes'), os.path.getsize(tmp_path / 'starts')) == (8, 2)  # 2 + 3 + 3 numbers
    texts = sorted(text.split(';')[0] for text in warnings)
    assert texts == [
        'The evaluator always beside the training failed with exit code 7',
        'The evaluator always ended with 7',
        'The evaluator crashing ended with -9',
        'The evaluator crashing ended with -9',
        'The evaluator wrong beside the training failed with exit code 2',
    ]
    with supervised((numbers, runs.config(tmp_path))) as late:
        start = time.monotonic()
        assert late.wait(0) == {'test': {}}
        assert time.monotonic() - start < 5
    assert warnings[-1].startswith('The evaluator test was stopped before the last checkpoint was evaluated')
    assert multiprocessing.active_children() == []


def test_a_machine_without_processes_left_is_a_warning(tmp_path, warnings, monkeypatch):
    def refuse(process, nice):
        raise BlockingIOError(11, 'Resource temporarily unavailable')

    monkeypatch.setattr(companion, '_launch', refuse)
    with supervised((numbers, runs.config(tmp_path))) as beside:
        assert beside.wait(LIMIT_SECS) == {'test': {}}
    assert len(warnings) == 1 and 'The evaluator test could not be started' in warnings[0]


def test_one_that_waits_for_the_first_checkpoint_takes_next_to_no_processor(tmp_path):
    def used(pid):
        with open(f'/proc/{pid}/stat') as file:
            fields = file.read().rpartition(')')[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

    place = tmp_path / 'asked'
    with supervised((functools.partial(asked, str(place)), runs.config(tmp_path / 'run'))):
        [child] = multiprocessing.active_children()
        wait_until(place.exists)  # it has TensorFlow, and builds its graph
        last = -1.0
        while used(child.pid) - last > 0.01:
            last = used(child.pid)
            time.sleep(1)
        before, start = used(child.pid), time.monotonic()
        time.sleep(2)
        assert used(child.pid) - before < 0.05 * (time.monotonic() - start)


def asked(place):
    open(place, 'w').close()
    return test_evaluation.DATA()


SCRIPT = """
    import fcntl, os, signal, sys, time
    if __name__ != '__main__':  # the child imports it
        print(os.getpid(), flush=True)
        time.sleep(sys.argv[2] == 'import' and 600)
    import tensorflow.compat.v1 as tf
    import towers
    from towers.evaluators import companion, supervisor

    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('w', []))

    def data():
        print('data', flush=True)
        return tf.data.Dataset.from_tensor_slices([1.0, 2.0])

    if __name__ == '__main__':
        beside = companion.Companion(model, data, towers.Config(model_dir=sys.argv[1]))
        if sys.argv[2] == 'start':  # the child is there, and does not know yet what ends it
            fcntl.fcntl = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        beside.start()
        print('started', flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize('phase', ['import', 'poll'])
def test_it_dies_with_its_parent(tmp_path, phase):
    (tmp_path / 'script.py').write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / 'script.py'), str(tmp_path / 'run'), phase]
    environment = {**os.environ, 'PYTHONPATH': ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as parent:
        said = {parent.stdout.readline().strip() for _ in range(2 + (phase == 'poll'))}
        [child] = [int(word) for word in said if word.isdigit()]
        assert exists(child) and said == {str(child), 'started', *(['data'] if phase == 'poll' else [])}
        parent.kill()
        start = time.monotonic()
        wait_until(lambda: not exists(child))
        assert time.monotonic() - start < 3


def test_it_ends_before_it_builds_anything_where_its_parent_is_killed_while_it_starts_it(tmp_path):
    (tmp_path / 'script.py').write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / 'script.py'), str(tmp_path / 'run'), 'start']
    environment = {**os.environ, 'PYTHONPATH': ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as parent:
        [child] = parent.communicate(timeout=LIMIT_SECS)[0].split()  # all that the child wrote until its end, too
        assert parent.returncode == -signal.SIGKILL
        wait_until(lambda: not exists(int(child)))


@pytest.mark.parametrize('what', ['model', 'eval_dataset'])
def test_what_can_not_be_sent_says_so_before_anything_starts(tmp_path, what):
    given = {'model': test_evaluation.scaled, 'eval_dataset': numbers, what: lambda *args, **kwargs: None}
    named = {'eval_dataset': "eval_dataset of 'test'"}.get(what, what)
    with pytest.raises(
        ValueError, match=f'beside the training takes {named} to a process of its own, got .*lambda.*give a function of a module'
    ):
        companion.Companion(given['model'], given['eval_dataset'], runs.config(tmp_path))
    with pytest.raises(ValueError, match='got none; give --model_dir'):
        companion.Companion(test_evaluation.scaled, numbers, runs.config(None))


def test_a_function_that_no_file_holds_is_refused(tmp_path, monkeypatch):
    main = types.ModuleType('__main__')  # of a notebook, or of python -c
    exec('def model(batch, *, training): pass', main.__dict__)
    monkeypatch.setitem(sys.modules, '__main__', main)
    with pytest.raises(ValueError, match='takes model to a process of its own, got .*which no file holds'):
        companion.Companion(main.model, numbers, runs.config(tmp_path))


def test_a_script_that_trains_when_imported_is_told_so_in_the_child(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), 'name', 'towers-evaluator-test')
    with pytest.raises(ValueError, match="Put `if __name__ == '__main__':` before the call of towers.train"):
        companion.Companion(test_evaluation.scaled, numbers, runs.config(tmp_path))
