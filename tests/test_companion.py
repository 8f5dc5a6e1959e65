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

from towers.evaluators import companion

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT_SECS = 120


def numbers():
    """Three numbers whose mean is 2; a function of a module, so that another process finds it."""
    return test_evaluation.DATA()


def parts(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays[0])


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


def test_it_evaluates_beside_and_ends_with_the_last_checkpoint(tmp_path):
    settings, before = runs.config(tmp_path, eval_idle_secs=0), os.getpriority(os.PRIO_PROCESS, 0)
    with companion.Companion(test_evaluation.scaled, functools.partial(parts, np.array([1, 2, 6], np.float32)), settings) as beside:
        [child] = multiprocessing.active_children()
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in (child.pid, os.getpid())] == [19, before]
        os.kill(child.pid, signal.SIGINT)  # as from a terminal; the parent decides
        test_evaluation.publish(tmp_path, 3, final=True)  # of an earlier run, which this one goes on with
        wait_until(lambda: os.path.exists(tmp_path / 'eval/test/results.jsonl'))
        test_evaluation.publish(tmp_path, 5)
        found = beside.wait(LIMIT_SECS)
    assert found == {'step': 5, 'examples': 3, 'loss': 15.0, 'twice': 30.0, 'both': [9.0, -9.0]}
    assert multiprocessing.active_children() == []
    assert test_evaluation.steps(tmp_path) == [3, 5]


def test_a_failing_evaluator_is_a_warning_and_one_that_hangs_is_stopped(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(companion.logging, 'warning', lambda text, *args: said.append(text % args))
    with companion.Companion(test_evaluation.scaled, functools.partial(int, 'x'), runs.config(tmp_path)) as beside:
        late = companion.Companion(test_evaluation.scaled, numbers, runs.config(tmp_path))
        late.start()
        start = time.monotonic()
        assert late.wait(0) == {}
        assert time.monotonic() - start < 5
        assert beside.wait(LIMIT_SECS) == {}
    assert [text.split(';')[0] for text in said] == [
        'The evaluator was stopped before the last checkpoint was evaluated',
        'The evaluator beside the training failed with exit code 1',
    ]
    assert multiprocessing.active_children() == []


SCRIPT = """
    import os, signal, sys, time
    if __name__ != '__main__':  # the child imports it
        print(os.getpid(), flush=True)
        time.sleep(sys.argv[2] == 'import' and 600)
    import tensorflow.compat.v1 as tf
    import towers
    from towers.evaluators import companion

    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('w', []))

    def data():
        print('data', flush=True)
        return tf.data.Dataset.from_tensor_slices([1.0, 2.0])

    if __name__ == '__main__':
        beside = companion.Companion(model, data, towers.Config(model_dir=sys.argv[1]))
        beside.start()
        time.sleep(600)
"""


@pytest.mark.parametrize('phase', ['import', 'poll'])
def test_it_dies_with_its_parent(tmp_path, phase):
    (tmp_path / 'script.py').write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / 'script.py'), str(tmp_path / 'run'), phase]
    environment = {**os.environ, 'PYTHONPATH': ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as parent:
        child = int(parent.stdout.readline())
        assert exists(child)
        if phase == 'poll':
            assert parent.stdout.readline() == 'data\n'
        parent.kill()
        start = time.monotonic()
        wait_until(lambda: not exists(child))
        assert time.monotonic() - start < 3


@pytest.mark.parametrize('what', ['model', 'eval_dataset'])
def test_what_can_not_be_sent_says_so_before_anything_starts(tmp_path, what):
    given = {'model': test_evaluation.scaled, 'eval_dataset': numbers, what: lambda *args, **kwargs: None}
    with pytest.raises(ValueError, match=f'evaluate=True sends {what} to another process, got .*lambda.*give a function of a module'):
        companion.Companion(given['model'], given['eval_dataset'], runs.config(tmp_path))
    with pytest.raises(ValueError, match='got none; give --model_dir'):
        companion.Companion(test_evaluation.scaled, numbers, runs.config(None))


def test_a_function_that_no_file_holds_is_refused(tmp_path, monkeypatch):
    main = types.ModuleType('__main__')  # of a notebook, or of python -c
    exec('def model(batch, *, training): pass', main.__dict__)
    monkeypatch.setitem(sys.modules, '__main__', main)
    with pytest.raises(ValueError, match='evaluate=True sends model to another process, got .*which no file holds'):
        companion.Companion(main.model, numbers, runs.config(tmp_path))


def test_a_script_that_trains_when_imported_is_told_so_in_the_child(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), 'name', 'towers-evaluator')
    with pytest.raises(ValueError, match="Put `if __name__ == '__main__':` before the call of towers.train"):
        companion.Companion(test_evaluation.scaled, numbers, runs.config(tmp_path))
