"""What a training serves from its memory: versions that are whole, evaluated as a checkpoint would be."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import harness
import live_reader
import numpy as np
import pytest
import reaching
import runs
import starter
import tensorflow.compat.v1 as tf

import towers
from towers.directory import holder
from towers.evaluators import unsaved
from towers.live import naming, publisher, reader


def counting(batch, *, training):
    """Each entry of each variable is the number of the step; so is the loss out of training."""
    zeros = tf.zeros_initializer()
    found = [tf.get_variable(name, shape, initializer=zeros) for name, shape in live_reader.SHAPES.items()]
    if training:
        return towers.ModelOutput(-tf.add_n([tf.reduce_sum(variable) for variable in found]) * tf.reduce_mean(batch))
    return towers.ModelOutput(tf.reduce_mean(batch) * found[-1], metrics={'twice': 2 * tf.reduce_mean(found[0])})


ONES = harness.numbers(1, 1, 1, 1)


def config(folder, **changes):
    settings = {'serve_snapshots': 1, 'global_batch_size': 4, 'train_steps': 10**6, 'save_steps': 0, 'eval_idle_secs': 30}
    return harness.config(**{**settings, **changes}, model_dir=str(folder))


class Until(tf.train.SessionRunHook):
    """Ends a training when something holds, or after a minute."""

    def __init__(self, holds):
        self._holds, self._end = holds, time.monotonic() + 60

    def after_run(self, run_context, run_values):
        if self._holds() or time.monotonic() > self._end:
            run_context.request_stop()


@pytest.mark.parametrize(('strategy', 'n'), [('parameter_server', 1), ('mirrored', 2)])
def test_readers_in_a_tight_loop_never_see_two_steps_at_once(tmp_path, strategy, n):
    script = starter.ROOT / 'tests' / 'live_reader.py'
    command = [sys.executable, script, str(tmp_path), '150']
    with contextlib.ExitStack() as closing:
        readers = [closing.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) for _ in range(2)]
        for each in readers:
            closing.callback(each.kill)
        towers.train(
            counting, ONES, config(tmp_path, strategy=strategy, n=n), hooks=[Until(lambda: all(r.poll() is not None for r in readers))]
        )
        found = [json.loads(each.stdout.read()) for each in readers]
    for each in found:
        assert (each['reads'], each['torn'], each['sorted']) == (150, [], True) and each['steps'] > 1
    assert naming.find(str(tmp_path)) is None


@contextlib.contextmanager
def served(folder):
    """A publisher of two variables in a session, and a function that serves them with a number everywhere."""
    with tf.Graph().as_default(), contextlib.ExitStack() as closing:
        zeros = {'initializer': tf.zeros_initializer(), 'use_resource': True}
        variables = {name: tf.get_variable(name, shape, **zeros) for name, shape in (('a', [5]), ('b', [2, 3]))}
        variables['global_step'] = tf.train.get_or_create_global_step()
        number = tf.placeholder(tf.float32, [])
        fill = [variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype.base_dtype)) for variable in variables.values()]
        made = publisher.Publisher(variables, str(folder))
        made.build()
        session = closing.enter_context(tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)))
        session.run(tf.global_variables_initializer())
        made.begin(session)
        closing.callback(made.close)

        def serve(step):
            session.run(fill, {number: step})
            made.offer(step)
            made.wait()

        yield made, variables, serve


def test_a_buffer_that_is_written_over_between_two_reads_is_not_taken(tmp_path):
    with served(tmp_path) as (_, variables, serve), reader.Reader(str(tmp_path), variables) as source:
        assert source.read() is None
        serve(10)
        first = source.read()
        assert (first.number, first.step, first.values['a'].tolist()) == (1, 10, [10.0] * 5)
        assert source.read(after=first) is None
        asked, late = source._version, [20, 30]

        def version():
            found = asked()
            while late:  # while the reader is between the version and its buffer
                serve(late.pop(0))
            return found

        source._version = version
        second = source.read()
        assert (second.number, second.step) == (3, 30) and set(second.values['b'].ravel().tolist()) == {30.0}


def test_the_file_is_its_owners_and_one_of_a_dead_process_is_none(tmp_path):
    with served(tmp_path):
        path = naming.path_of(str(tmp_path), os.getpid())
        assert os.stat(path).st_mode & 0o777 == 0o600
        place = naming.find(str(tmp_path))
        assert place.pid == os.getpid() and len(place.token) == 32
        text = pathlib.Path(path).read_text()
    assert not os.path.exists(path)
    for broken in (text.replace(str(os.getpid()), '4194299'), text.replace(place.machine, 'another'), '{}', 'no json'):
        with open(path, 'w') as file:
            file.write(broken)
        assert naming.find(str(tmp_path)) is None


def test_nobody_but_this_machine_reaches_what_is_served(tmp_path, caplog):
    with served(tmp_path):
        assert reaching.reached(naming.find(str(tmp_path)).port) == {'127.0.0.1', *reaching.IPV6}
    assert 'every address' not in caplog.text


def test_a_server_that_fails_stops_the_serving_and_not_the_training(tmp_path, caplog):
    with served(tmp_path) as (made, variables, serve):
        serve(1)
        made._session.close()
        serve(2)
        serve(3)
        assert caplog.text.count('are not served any more') == 1 and naming.find(str(tmp_path)) is None
        with reader.Reader(str(tmp_path), variables) as source:
            assert source.read() is None


def other(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('another', []))


def longer(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch) * tf.reduce_sum(tf.get_variable('a', [6])))


@pytest.mark.parametrize(('model', 'message'), [(other, 'not served.*another'), (longer, 'a is served in the shape')])
def test_another_model_is_refused(tmp_path, model, message):
    with served(tmp_path) as (_, _, serve):
        serve(1)
        with pytest.raises(ValueError, match=message):
            unsaved.follow(model, ONES, runs.config(tmp_path), continuous=False, stop=threading.Event())


def test_nothing_served_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match='No training on this machine serves its variables in .*; start it with --serve_snapshots'):
        unsaved.follow(counting, ONES, runs.config(tmp_path), continuous=False, stop=threading.Event())
    assert unsaved.follow(counting, ONES, runs.config(tmp_path, eval_idle_secs=0.3), continuous=True, stop=threading.Event()) == {}


@pytest.mark.parametrize('end', ['trained', 'gone on with', 'not final'])
def test_what_is_waited_for_is_told_once_and_never_for_a_training_that_is_over(tmp_path, caplog, end):
    caplog.set_level('INFO')
    runs.publish(tmp_path, 3, final=end != 'not final', a=np.zeros([5], np.float32))
    if end == 'gone on with':
        os.makedirs(tmp_path / 'sessions')
        (tmp_path / 'sessions' / 'writer-1.json').write_bytes(holder.this_process(1).content())
    settings = runs.config(tmp_path, eval_idle_secs=1)
    assert unsaved.follow(counting, ONES, settings, continuous=True, stop=threading.Event()) == {}
    waits = end != 'trained'
    assert caplog.text.count('Waiting for a training on this machine to serve its variables') == waits
    assert ('is over, and serves nothing; without --live its checkpoints are evaluated' in caplog.text) != waits
    assert ('Nothing was served' in caplog.text) == waits


def rows(folder):
    path = folder / 'eval' / 'live' / 'results.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_evaluator_follows_what_is_served_until_the_training_ends(tmp_path):
    given, found = runs.config(tmp_path, eval_name='live', eval_idle_secs=60, eval_num_gpus=2), []
    thread = threading.Thread(
        target=lambda: found.append(unsaved.follow(counting, ONES, given, continuous=True, stop=threading.Event())), daemon=True
    )
    thread.start()
    result = towers.train(counting, ONES, config(tmp_path, n=2), hooks=[Until(lambda: len(rows(tmp_path)) >= 5)])
    thread.join(60)
    assert not thread.is_alive() and len(rows(tmp_path)) >= 5
    assert all((row['loss'], row['twice'], row['examples']) == (row['step'], 2 * row['step'], 4) for row in rows(tmp_path))
    steps = [row['step'] for row in rows(tmp_path)]
    assert steps == sorted(set(steps)) and steps[-1] <= result.step and found[0]['step'] == steps[-1]
    assert [name for name in os.listdir(tmp_path / 'sessions') if name.startswith('live')] == []
    assert np.isfinite(result.loss)
