"""One dataset split over several evaluators: every example once, whoever dies in between."""

import contextlib
import functools
import os
import signal
import threading

import numpy as np
import pytest
import runs
import tensorflow.compat.v1 as tf
import test_companion
import test_evaluation

import towers
from towers.checkpoint import manifest
from towers.directory import holder
from towers.evaluators import evaluation, parts
from towers.input import cutting, passes

VALUES = np.random.default_rng(3).integers(0, 50, 101).astype(np.float32)


def model(batch, *, training):
    del training
    error = tf.get_variable('w', []) * batch
    return towers.ModelOutput(
        tf.reduce_mean(error), metrics={'square': towers.mean(error**2), 'counts': towers.Metric((counted(batch),), np.array)}
    )


def counted(batch):
    return tf.math.bincount(tf.cast(batch, tf.int32), minlength=50, maxlength=50)


def numbers():
    return tf.data.Dataset.from_tensor_slices(VALUES).shuffle(101)  # without a seed


def dying(place):
    """The numbers; the process that reads the 60th one, over all processes, is killed."""

    def read(number):
        with open(place, 'a') as file:
            file.write('x')
        if os.path.getsize(place) == 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return numbers().map(lambda number: tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), []))


def check(folder, step):
    """One row for the step, which is numpy's over all numbers; nothing is left of the parts."""
    [row] = [row for row in test_evaluation.rows(folder) if row['step'] == step]
    assert row['examples'] == 101
    np.testing.assert_allclose(row['loss'], step * VALUES.mean(), rtol=1e-6)
    np.testing.assert_allclose(row['square'], ((step * VALUES) ** 2).mean(), rtol=1e-6)
    np.testing.assert_array_equal(row['counts'], np.bincount(VALUES.astype(int), minlength=50))
    assert os.listdir(folder / 'eval' / 'test' / 'parts') == []


def test_several_processes_split_it_and_a_dead_ones_part_is_redone(tmp_path, monkeypatch):
    settings = runs.config(tmp_path, eval_parts=5, eval_num_gpus=2, eval_batch_size=7, eval_restarts=0)
    data = functools.partial(dying, str(tmp_path / 'read'))
    evaluators = [test_companion.supervisor.Evaluator(settings, data) for _ in range(3)]
    test_evaluation.publish(tmp_path, 3, 4, final=True)
    with test_companion.supervisor.Supervisor(model, evaluators) as beside:
        found = beside.wait(test_companion.LIMIT_SECS)
    assert found['test']['step'] == 4
    assert os.path.getsize(tmp_path / 'read') > 2 * 101
    for step in (3, 4):
        check(tmp_path, step)


@pytest.mark.parametrize('count', [2, 101, 150])
def test_any_number_of_parts_gives_the_whole(tmp_path, count):
    test_evaluation.publish(tmp_path, 3)
    found = evaluation.evaluate(model, numbers, runs.config(tmp_path, eval_parts=count, eval_batch_size=7))
    assert found['examples'] == 101 and 'saved' not in found
    check(tmp_path, 3)


def elsewhere(place, generation):
    """A claim of a process on another machine."""
    claim = holder.Holder(generation=generation, host='far', pid=1, machine='another')
    place.write_bytes(claim.content())


def test_a_silent_claim_from_elsewhere_is_taken_over_and_a_beating_one_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, '_POLL_SECS', 0.02)
    test_evaluation.publish(tmp_path, 3)
    saved = manifest.read(manifest.prefix_of(str(tmp_path), 3)).time
    folder = tmp_path / 'eval' / 'test' / 'parts' / f'3-{saved:.6f}-2'
    folder.mkdir(parents=True)
    for part, number in (('0', 4), ('result', 1)):
        elsewhere(folder / f'{part}.claim-{number}', number)
    os.utime(folder / '0.claim-4', (1, 1))
    stop, ended = threading.Event(), []
    run = functools.partial(evaluation.once, model, numbers, runs.config(tmp_path, eval_parts=2), stop=stop)
    thread = threading.Thread(target=lambda: ended.append(run()), daemon=True)
    thread.start()
    test_companion.wait_until(lambda: {'0.npz', '1.npz'} <= set(os.listdir(folder)))
    thread.join(0.5)
    assert thread.is_alive() and not (tmp_path / 'eval/test/results.jsonl').exists()
    os.utime(folder / 'result.claim-1', (1, 1))
    thread.join(60)
    assert ended[0]['examples'] == 101
    check(tmp_path, 3)


N = 23
KINDS = {
    'map': lambda data, costly: data.map(costly),
    'maps and prefetch': lambda data, costly: data.map(costly).prefetch(2).map(lambda x: x + 1),
    'parallel map': lambda data, costly: data.map(costly, num_parallel_calls=2).apply(tf.data.experimental.assert_cardinality(N)),
    'map of shuffled numbers': lambda data, costly: data.shuffle(N).map(costly),
    'map of a structure': lambda data, costly: data.map(lambda x: {'a': x, 'b': (x, -x)}).map(lambda x: {'a': costly(x['a'])}),
    'map behind a cache': lambda data, costly: data.map(lambda x: 2 * x).cache().map(costly),
    'nothing': lambda data, costly: data,
    'filter behind': lambda data, costly: data.map(costly).filter(lambda x: x % 3 != 0),
    'shuffle behind': lambda data, costly: data.map(costly).shuffle(N),
    'flat_map': lambda data, costly: data.map(costly).flat_map(lambda x: tf.data.Dataset.range(x, x + 2)),
}
WHOLE = ('filter behind', 'shuffle behind', 'flat_map')


@pytest.mark.parametrize('kind', KINDS)
def test_a_part_is_every_so_many_th_example_and_makes_no_other_where_it_can(kind):
    made = []

    def counted(number):
        made.append(int(number))
        return number

    def costly(number):
        return tf.ensure_shape(tf.numpy_function(counted, [number], tf.int64), [])

    with tf.Graph().as_default(), tf.Session() as session:
        source = passes.of(KINDS[kind](tf.data.Dataset.range(N), costly))
        index = tf.placeholder(tf.int64, [])
        zero = tf.zeros([], tf.int64)

        def read(dataset, part=0):
            iterator = tf.data.make_initializable_iterator(dataset)
            session.run(iterator.initializer, {index: part})
            following, found = iterator.get_next(), []
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    found.append(session.run(following))
            return found

        whole = read(source.make(zero))
        for parts_ in (3, 8):
            for part in range(parts_):
                made.clear()
                assert read(cutting.part(source, parts_, index).make(zero), part=part) == whole[part::parts_]
                cost = 0 if kind == 'nothing' else N if kind in WHOLE else len(range(part, N, parts_))
                assert len(made) == cost
