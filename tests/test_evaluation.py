"""Evaluations of a run directory: which checkpoint, what is written where, and following a run to its end."""

import dataclasses
import glob
import json
import os
import signal
import threading
import time

import harness
import numpy as np
import pytest
import runs
import tensorflow.compat.v1 as tf

import towers
from towers import identity
from towers.checkpoint import manifest
from towers.directory import lock
from towers.evaluators import evaluation, evaluator, queue
from towers.sessions import ledger, membership


def scaled(batch, *, training):
    """A model whose score is its variable times the mean of the data."""
    del training
    value = tf.reduce_mean(batch) * tf.get_variable('w', [])
    both = towers.Metric((tf.reduce_sum(batch),), lambda total: np.array([total, -total]))
    return towers.ModelOutput(value, metrics={'twice': 2 * value, 'both': both})


DATA = harness.numbers(1, 2, 3)  # mean 2


def publish(folder, *steps, final=False):
    """Checkpoints whose variable is their step: loss 2 * step."""
    for step in steps:
        runs.publish(folder, step, final=final and step == steps[-1], w=np.float32(step))


def evaluate(folder, *, settings=None, **given):
    return evaluation.evaluate(scaled, DATA, runs.config(folder, **settings or {}), **given)


def follow(folder, *, settings=None, **given):
    return evaluation.follow(scaled, DATA, runs.config(folder, **settings or {}), **given)


def rows(folder, name='test'):
    with open(os.path.join(folder, 'eval', name, 'results.jsonl')) as file:
        return [json.loads(line) for line in file]


def steps(folder):
    return [row['step'] for row in rows(folder)]


def after_first_result(folder, act):
    """Calls `act` in a thread once something is evaluated."""

    def wait():
        while not os.path.exists(folder / 'eval/test/results.jsonl'):
            time.sleep(0.01)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(evaluation, 'POLL_SECS', 0.02)


@pytest.fixture
def messages(monkeypatch):
    """What the evaluation logs, line by line."""
    said = []
    for level in ('info', 'warning'):  # one logger is all modules'
        monkeypatch.setattr(evaluation.logging, level, lambda text, *args: said.append(text % args))
    return said


def test_the_newest_is_evaluated_and_written(tmp_path):
    publish(tmp_path, 3, 20)
    found = evaluate(tmp_path, settings={'eval_name': 'held_out'})
    np.testing.assert_array_equal(found.pop('both'), [6, -6])
    assert found == {'step': 20, 'examples': 3, 'loss': 40.0, 'twice': 80.0}
    [row] = rows(tmp_path, 'held_out')
    assert row.pop('seconds') > 0
    assert row.pop('saved') == manifest.read(manifest.prefix_of(str(tmp_path), 20)).time
    assert row == {**found, 'both': [6, -6], 'checkpoint': 'ckpt-20'}


def test_tags_are_the_trainings(tmp_path):
    publish(tmp_path, 3)
    evaluate(tmp_path)
    [path] = glob.glob(str(tmp_path / 'eval/test/events*'))
    points = [(e.step, value.tag, value.simple_value) for e in tf.train.summary_iterator(path) for value in e.summary.value]
    assert points == [(3, 'loss', 6.0), (3, 'twice', 12.0)]


def confused(batch, *, training):
    del training
    logits = tf.one_hot(tf.cast(batch, tf.int32) % 3, 3) + 0.0 * tf.get_variable('w', [])
    return towers.ModelOutput(metrics={'confusion': towers.confusion_matrix(tf.ones_like(batch, tf.int64), logits)})


def test_a_matrix_is_a_picture_in_tensorboard(tmp_path):
    publish(tmp_path, 3)
    found = evaluation.evaluate(confused, harness.numbers(1, 1, 2, 4, 3), runs.config(tmp_path))
    np.testing.assert_array_equal(found['confusion'], [[0, 0, 0], [1, 3, 1], [0, 0, 0]])
    [path] = glob.glob(str(tmp_path / 'eval/test/events*'))
    [(tag, image)] = [(v.tag, v.image) for e in tf.train.summary_iterator(path) for v in e.summary.value if v.HasField('image')]
    with tf.Graph().as_default(), tf.Session() as session:
        pixels = session.run(tf.io.decode_png(image.encoded_image_string))
    assert (tag, pixels.shape) == ('confusion', (image.height, image.width, 1)) and image.height >= 255
    third = image.height // 3
    assert pixels[third // 2 :: third, third // 2 :: third, 0].tolist() == [[255] * 3, [204, 102, 204], [255] * 3]


def test_nothing_else_in_the_run_directory_changes(tmp_path):
    publish(tmp_path, 3, 20)

    def state():
        others = [entry for entry in os.scandir(tmp_path) if entry.name not in ('eval', 'sessions')]
        return {entry.name: (entry.stat().st_mtime_ns, entry.stat().st_size) for entry in others}

    before = state()
    evaluate(tmp_path)
    follow(tmp_path, done=lambda: True)
    assert state() == before
    assert os.listdir(tmp_path / 'eval') == ['test']
    assert os.listdir(tmp_path / 'sessions') == []


def test_the_same_result_is_written_once(tmp_path):
    publish(tmp_path, 3)
    evaluate(tmp_path)
    evaluation.evaluate(scaled, harness.numbers(2, 1, 3 + 1e-6), runs.config(tmp_path))
    assert steps(tmp_path) == [3]
    evaluation.evaluate(scaled, harness.numbers(5), runs.config(tmp_path))
    assert [row['loss'] for row in rows(tmp_path)] == [6.0, 15.0]


@pytest.mark.parametrize('named', [3, '3', 'ckpt-3', 'ckpt-3.index', '{}/ckpt-3', '{}/ckpt-3.data-00000-of-00001'])
def test_a_checkpoint_can_be_named(tmp_path, named):
    publish(tmp_path, 3, 20)
    found = evaluation.find(str(tmp_path), named.format(tmp_path) if isinstance(named, str) else named)
    assert (found.step, found.prefix) == (3, str(tmp_path / 'ckpt-3'))


def test_a_named_checkpoint_is_the_one_evaluated(tmp_path):
    publish(tmp_path, 3, 20)
    assert evaluate(tmp_path, checkpoint=3)['loss'] == 6.0


def test_a_checkpoint_of_another_program_is_taken_with_its_step(tmp_path):
    runs.save(str(tmp_path / 'model.ckpt-7'), global_step=np.int64(7), w=np.float32(5))
    assert evaluate(tmp_path, checkpoint=tmp_path / 'model.ckpt-7')['loss'] == 10.0
    assert steps(tmp_path) == [7]


def damage(folder, step):
    with open(folder / f'ckpt-{step}.data-00000-of-00001', 'r+b') as file:
        file.write(b'\xff')


def test_a_checkpoint_that_is_not_there_or_damaged_says_so(tmp_path):
    publish(tmp_path, 3, 20)
    damage(tmp_path, 3)
    with pytest.raises(ValueError, match='ckpt-4.json is missing. Give one of those in .*, of steps 3, 20'):
        evaluate(tmp_path, checkpoint=4)
    with pytest.raises(ValueError, match='--checkpoint=3 is not whole: ckpt-3.data-00000-of-00001 has another checksum'):
        evaluate(tmp_path, checkpoint=3)


@pytest.mark.parametrize(
    ('settings', 'given', 'message'),
    [
        ({}, {}, 'There is no checkpoint in .*; train first'),
        ({'model_dir': None}, {}, 'got none; give --model_dir'),
        ({}, {'continuous': True, 'checkpoint': 3}, '--continuous takes each new checkpoint, got --checkpoint=3'),
    ],
)
def test_wrong_use_says_what_to_do(tmp_path, settings, given, message):
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(scaled, DATA, runs.config(**{'model_dir': tmp_path, **settings}), **given)
    assert os.listdir(tmp_path) == []


def test_only_damaged_checkpoints_are_a_failure(tmp_path):
    publish(tmp_path, 3)
    damage(tmp_path, 3)
    with pytest.raises(manifest.CheckpointError, match='None of .*1 checkpoints'):
        evaluate(tmp_path)


def test_following_takes_each_in_order_and_ends_with_the_final_one(tmp_path, monkeypatch):
    publish(tmp_path, 3, 4)
    real = evaluator.Evaluator.run

    def run(self, checkpoint, stop):
        if checkpoint.step == 4:  # while this one is evaluated
            publish(tmp_path, 6, 7)
        elif checkpoint.step == 7:
            publish(tmp_path, 9, final=True)
        return real(self, checkpoint, stop)

    monkeypatch.setattr(evaluator.Evaluator, 'run', run)
    found = follow(tmp_path)
    assert (found['step'], found['loss'], found['examples']) == (9, 18.0, 3)
    assert [(row['step'], row['loss']) for row in rows(tmp_path)] == [(step, 2.0 * step) for step in (3, 4, 6, 7, 9)]


def test_one_that_goes_while_another_is_evaluated_is_told_of(tmp_path, monkeypatch, messages):
    publish(tmp_path, 3, 4)
    real = evaluator.Evaluator.run

    def run(self, checkpoint, stop):
        if checkpoint.step == 3:
            manifest.remove(str(tmp_path), 4)  # as the training's retention does
            publish(tmp_path, 5, final=True)
        return real(self, checkpoint, stop)

    monkeypatch.setattr(evaluator.Evaluator, 'run', run)
    follow(tmp_path)
    assert steps(tmp_path) == [3, 5]
    assert [text.split(';')[0] for text in messages if 'Passed over' in text] == [
        'Passed over the checkpoints of steps 4 (evaluator test): removed before they were evaluated'
    ]


def test_a_final_checkpoint_that_something_newer_follows_is_not_the_end(tmp_path):
    publish(tmp_path, 3, final=True)
    publish(tmp_path, 5)
    assert follow(tmp_path, settings={'eval_idle_secs': 0.1})['step'] == 5


def test_a_final_one_that_comes_between_two_looks_is_evaluated(tmp_path, monkeypatch):
    publish(tmp_path, 3)
    real = queue.Queue.is_empty

    def is_empty(self, **given):
        found = real(self, **given)
        if found and not os.path.exists(tmp_path / 'ckpt-5.json'):
            publish(tmp_path, 5, final=True)
        return found

    monkeypatch.setattr(queue.Queue, 'is_empty', is_empty)
    follow(tmp_path)
    assert steps(tmp_path) == [3, 5]


def test_one_that_becomes_final_later_is_the_end(tmp_path):
    publish(tmp_path, 3)

    def finish():
        about = manifest.read(manifest.prefix_of(str(tmp_path), 3))
        manifest.write(str(tmp_path), dataclasses.replace(about, final=True))

    after_first_result(tmp_path, finish)
    assert follow(tmp_path)['step'] == 3
    assert steps(tmp_path) == [3]


def test_a_restart_does_not_evaluate_again(tmp_path, monkeypatch):
    publish(tmp_path, 3, final=True)
    first = follow(tmp_path)
    with open(tmp_path / 'eval/test/results.jsonl', 'a') as file:
        file.write('{"step": 4, "los')  # what a killed process leaves
    with monkeypatch.context() as patch:
        patch.setattr(evaluator.Evaluator, 'run', None)
        again = follow(tmp_path)
    np.testing.assert_array_equal(again.pop('both'), first.pop('both'))
    assert again == first
    publish(tmp_path, 3, final=True)  # the same step saved anew
    follow(tmp_path)
    text = (tmp_path / 'eval/test/results.jsonl').read_text()
    assert [line[:10] for line in text.splitlines()] == ['{"step": 3', '{"step": 4', '{"step": 3']


def test_an_idle_limit_counts_from_the_start(tmp_path, messages):
    assert follow(tmp_path / 'none', settings={'eval_idle_secs': 0.1}) == {}
    assert 'No new checkpoint came' in messages[-1]
    assert not os.path.exists(tmp_path / 'none')


def test_the_idle_limit_does_not_count_while_a_trainer_is_at_work(tmp_path, messages):
    ended, settings = [], {'eval_idle_secs': 0.2}
    with lock.WriterLock(str(tmp_path)):
        thread = threading.Thread(target=lambda: ended.append(follow(tmp_path, settings=settings)), daemon=True)
        thread.start()
        thread.join(1.5)
        assert thread.is_alive()
    thread.join(60)
    assert ended == [{}] and 'nobody trains there' in messages[-1]


def test_a_damaged_checkpoint_is_passed_over_and_the_next_one_taken(tmp_path, monkeypatch):
    publish(tmp_path, 3)
    damage(tmp_path, 3)

    class Stop(threading.Event):
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 2:
                publish(tmp_path, 5, final=True)

    assert follow(tmp_path, stop=Stop())['step'] == 5
    assert steps(tmp_path) == [5]


def test_a_checkpoint_that_vanishes_while_it_is_read_gives_way_to_a_newer_one(tmp_path, monkeypatch):
    publish(tmp_path, 3)
    real = evaluator.Evaluator.load

    def load(self, checkpoint):
        if checkpoint.step == 3:
            publish(tmp_path, 4, final=True)
            manifest.remove(str(tmp_path), 3)
        real(self, checkpoint)

    monkeypatch.setattr(evaluator.Evaluator, 'load', load)
    assert evaluate(tmp_path)['step'] == 4
    assert follow(tmp_path)['step'] == 4
    assert steps(tmp_path) == [4]


def test_stop_ends_at_once(tmp_path):
    publish(tmp_path, 3)
    stop, at = threading.Event(), []
    after_first_result(tmp_path, lambda: at.append(time.monotonic()) or stop.set())
    assert follow(tmp_path, stop=stop)['step'] == 3
    assert time.monotonic() - at[0] < 3
    assert evaluation.once(scaled, DATA, runs.config(tmp_path), stop=stop) == {}


def test_done_ends_with_the_newest_though_none_is_final(tmp_path):
    publish(tmp_path, 3)
    asked = []

    def done():
        asked.append(1)
        if len(asked) == 3:
            publish(tmp_path, 8)  # saved before it says so
        return len(asked) >= 3

    assert follow(tmp_path, done=done, settings={'eval_idle_secs': 0})['step'] == 8
    assert steps(tmp_path) == [3, 8]


def test_a_signal_ends_an_evaluation_as_an_interrupt(tmp_path):
    publish(tmp_path, 3)
    after_first_result(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path, continuous=True)
    assert steps(tmp_path) == [3]


def test_a_second_evaluator_of_a_name_waits_for_the_first_one(tmp_path, messages, monkeypatch):
    publish(tmp_path, 3, final=True)
    folder = os.path.join(tmp_path, membership.FOLDER)
    os.makedirs(folder)
    first = ledger.Entry(role='evaluator', name='test', pid=1, started=identity.start_of(1), since=0.0)
    monkeypatch.setattr(evaluation.logging, 'log_first_n', lambda level, text, n, *args: messages.append(text % args))
    for other in (dataclasses.replace(first, name='more'), dataclasses.replace(first, since=time.time() + 99)):
        ledger.write(folder, other)
    ledger.write(folder, first)
    assert follow(tmp_path, settings={'eval_idle_secs': 0.3}) == {}  # nothing is evaluated twice
    assert 'An evaluator test is at work already (process 1 on' in '\n'.join(messages)
    os.utime(ledger.path_of(folder, first), (0, time.time() - ledger.SILENT_SECS - 1))  # it is stopped
    assert follow(tmp_path)['step'] == 3


def test_several_of_a_name_with_parts_do_not_wait(tmp_path):
    publish(tmp_path, 3, final=True)
    folder = os.path.join(tmp_path, membership.FOLDER)
    os.makedirs(folder)
    ledger.write(folder, ledger.Entry(role='evaluator', name='test', pid=1, started=identity.start_of(1), since=0.0))
    assert follow(tmp_path, settings={'eval_parts': 2})['step'] == 3
