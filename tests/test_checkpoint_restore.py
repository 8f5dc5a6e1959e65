"""Restoring a run's own checkpoint, starting from another's, and reading beside a trainer."""

import dataclasses
import logging as std_logging
import os
import threading
import time

import numpy as np
import pytest
import small_run
import tensorflow.compat.v1 as tf

from towers import config
from towers.checkpoint import manifest, restore, warm


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    with small_run.started(tmp_path / 'whole') as run:
        whole = run.steps(40)
    with small_run.started(tmp_path / 'parts') as run:
        first = run.steps(17)
        run.save()
        run.steps(5)  # lost
    with small_run.started(tmp_path / 'parts') as run:
        assert run.restorer.restore(run.session, manifest.newest(run.model_dir)) is True
        assert run.values()['step'] == 17
        assert first + run.steps(23) == whole
        np.testing.assert_array_equal(run.values()['b'], [40.0, 40.0, 40.0])


def test_values_come_in_parts_that_a_message_can_hold(tmp_path, monkeypatch):
    with small_run.started(tmp_path) as run:
        run.steps(2)
        run.save()
        whole = run.values()
    monkeypatch.setattr(restore, '_MOST_BYTES', 16)  # a and b have 12 bytes each, the counters 8
    with small_run.started(tmp_path) as run:
        assert run.resume() == 2
        for name, value in run.values().items():
            np.testing.assert_array_equal(value, whole[name])


def test_a_moved_folder_resumes(tmp_path):
    with small_run.started(tmp_path / 'here') as run:
        run.steps(2)
        run.save()
    os.rename(tmp_path / 'here', tmp_path / 'there')
    with small_run.started(tmp_path / 'there') as run:
        assert run.resume() == 2
        run.steps()
        run.save()
        assert tf.train.latest_checkpoint(run.model_dir) == os.path.join(run.model_dir, 'ckpt-3')


@pytest.mark.parametrize('damage', [b'', b'\x00garbage', b'model_checkpoint_path: "ckpt-999"', None])
def test_the_state_file_decides_nothing_and_is_set_right(tmp_path, damage):
    with small_run.started(tmp_path) as run:
        run.steps(2)
        run.save()
    if damage is None:
        os.unlink(tmp_path / 'checkpoint')
    else:
        (tmp_path / 'checkpoint').write_bytes(damage)
    with small_run.started(tmp_path) as run:
        assert run.resume() == 2
        run.saver.prepare(run.session)
        assert tf.train.latest_checkpoint(run.model_dir) == os.path.join(run.model_dir, 'ckpt-2')


def test_another_input_restarts_its_epoch_and_says_so(tmp_path, caplog):
    with small_run.started(tmp_path) as run:
        beginning = run.steps(4)
        run.save()
    with small_run.started(tmp_path, fingerprint='shuffle-10') as run, caplog.at_level(std_logging.WARNING):
        assert run.restorer.restore(run.session, manifest.newest(run.model_dir)) is False
        assert run.values()['step'] == 4
        assert run.steps(4) == beginning
    assert 'beginning of an epoch' in caplog.text and 'of another input pipeline' in caplog.text


def test_a_position_that_cannot_be_set_restarts_the_epoch(tmp_path, caplog):
    with small_run.started(tmp_path) as run:
        beginning = run.steps(3)
        run.save()
        found = manifest.newest(run.model_dir)
        run.restorer._input = dataclasses.replace(run.restorer._input)
        run.restorer._position_set = tf_failing(run)
        with caplog.at_level(std_logging.WARNING):
            assert run.restorer.restore(run.session, found) is False
        assert run.steps(3) == beginning
    assert 'setting its position failed' in caplog.text


def tf_failing(run):
    """Any operation of the graph that fails and takes the fed position: the checkpoint's own reader of a shadow that is not set."""
    [held] = [op for op in run.graph.get_operations() if op.type == 'ReadVariableOp' and op.outputs[0].dtype == tf.variant]
    return held


def test_without_an_input_only_variables_are_set(tmp_path):
    with small_run.started(tmp_path) as run:
        run.steps(3)
        run.save()
        found = manifest.newest(run.model_dir)
    with tf.Graph().as_default(), tf.Session() as session:
        b = tf.get_variable('layer/b', [3])
        assert restore.Restorer({'layer/b': b}).restore(session, found) is False
        np.testing.assert_array_equal(session.run(b), [3.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ('name', 'shape', 'dtype', 'message'),
    [
        ('layer/c', [3], tf.float32, r'does not fit 1 of 2 variables \(layer/c: layer/c is missing in the checkpoint\).*--init_checkpoint'),
        ('layer/b', [4], tf.float32, r'layer/b: shape \[4\], in the checkpoint \[3\]'),
        ('layer/b', [3], tf.float64, 'layer/b: type float64, in the checkpoint float32'),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_set(tmp_path, name, shape, dtype, message):
    with small_run.started(tmp_path) as run:
        run.steps()
        run.save()
        found = manifest.newest(run.model_dir)
    with tf.Graph().as_default(), tf.Session() as session:
        zeros = tf.zeros_initializer()
        variables = {n: tf.get_variable(n, s, t, initializer=zeros) for n, s, t in (('layer/a', [3], None), (name, shape, dtype))}
        restorer = restore.Restorer(variables)
        session.run(tf.global_variables_initializer())
        with pytest.raises(ValueError, match=message):
            restorer.restore(session, found)
        np.testing.assert_array_equal(session.run(variables['layer/a']), [0.0, 0.0, 0.0])


# Starting from another run


@pytest.fixture(scope='module')
def other(tmp_path_factory):
    """A run directory whose checkpoint 5 holds layer/a and layer/b of fives."""
    folder = tmp_path_factory.mktemp('other')
    with small_run.started(folder) as run:
        run.steps(5)
        run.save()
    return str(folder)


def warmed(names, shape=(3,), **settings):
    """The report of a warm start of float variables, and their values."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        variables = {name: tf.get_variable(name, shape, initializer=tf.zeros_initializer()) for name in names}
        variables['global_step'] = tf.get_variable('global_step', [], tf.int64, initializer=tf.zeros_initializer())
        start = warm.WarmStart(variables, config=config.CheckpointConfig(**settings))
        graph.finalize()
        session.run([variable.initializer for variable in variables.values()])
        report = start.load(session)
        return report, session.run(variables)


@pytest.mark.parametrize('path', ['', 'ckpt-5', 'ckpt-5.index', 'ckpt-5.data-00000-of-00001', 'ckpt-5.json'])
def test_what_matches_is_set_and_the_rest_is_told(other, path, caplog):
    with caplog.at_level(std_logging.INFO):
        report, values = warmed(['layer/a', 'head'], init_checkpoint=os.path.join(other, path))
    assert report.loaded == {'layer/a': 'layer/a'}
    assert report.left == {'head': 'head is missing in the checkpoint'}
    assert list(report.unused) == ['layer/b']
    np.testing.assert_array_equal(values['layer/a'], [5.0, 5.0, 5.0])
    np.testing.assert_array_equal(values['head'], [0.0, 0.0, 0.0])
    assert values['global_step'] == 0
    (record,) = [r for r in caplog.records if 'Initial values' in r.getMessage()]
    assert (
        '1 variables set (layer/a), 1 left (head: head is missing in the checkpoint), 1 of the checkpoint unused (layer/b)'
        in record.getMessage()
    )


def test_what_an_optimizer_keeps_starts_anew(tmp_path):
    names = ('w', 'w/Adam', 'w/Adam_1', 'beta1_power', 'scope/beta2_power_1')
    with tf.Graph().as_default(), tf.Session() as session:
        made = {name: tf.get_variable(name, (3,), initializer=tf.ones_initializer()) for name in (*names, 'power')}
        session.run(tf.global_variables_initializer())
        tf.train.Saver(made).save(session, str(tmp_path / 'other'), write_meta_graph=False)
    report, values = warmed([*names, 'power'], init_checkpoint=str(tmp_path / 'other'))
    assert set(report.loaded) == {'w', 'power'} and {report.left[name] for name in names[1:]} == {"an optimizer's"}
    assert values['w'].tolist() == [1.0] * 3 and values['w/Adam'].tolist() == [0.0] * 3


def test_exclude_and_rename(other):
    report, values = warmed(
        ['net/x', 'net/b', 'net/c'], init_checkpoint=other, init_exclude=('/b$',), init_rename=('^net/:layer/', r'layer/(?:x|c)$:layer/a')
    )
    assert report.loaded == {'net/c': 'layer/a', 'net/x': 'layer/a'}
    assert report.left == {'net/b': 'excluded'} and list(report.unused) == ['layer/b']
    assert [values[name][0] for name in ('net/x', 'net/b', 'net/c')] == [5.0, 0.0, 5.0]


def test_another_shape_is_left(other):
    with pytest.raises(ValueError, match=r"sets none of 1 variables .*'shape \[4\], in the checkpoint \[3\]'.*--init_rename=pattern"):
        warmed(['layer/a'], shape=(4,), init_checkpoint=other)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'init_checkpoint': None}, '--init_checkpoint, got none'),
        ({'init_checkpoint': '{}/ckpt-6'}, '--init_checkpoint=.*ckpt-6 is not a readable checkpoint'),
        ({'init_checkpoint': '{}/empty'}, 'is a folder without a checkpoint'),
        ({'init_checkpoint': '{}', 'init_exclude': ('(',)}, '--init_exclude needs regular expressions'),
        ({'init_checkpoint': '{}', 'init_rename': ('nothing',)}, '--init_rename needs pattern:replacement'),
        ({'init_checkpoint': '{}', 'init_rename': ('^layer/:other/',)}, r'sets none of 1 variables.*layer/a'),
    ],
)
def test_wrong_warm_starts(other, settings, message):
    os.makedirs(os.path.join(other, 'empty'), exist_ok=True)
    settings = {name: value.format(other) if isinstance(value, str) else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        warmed(['layer/a'], **settings)


def test_a_checkpoint_of_tensorflows_own_saver(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable('theirs/a', initializer=[7.0, 8.0, 9.0])
        session.run(variable.initializer)
        tf.train.Saver([variable]).save(session, str(tmp_path / 'model.ckpt'), global_step=12)
    report, values = warmed(['layer/a'], init_checkpoint=str(tmp_path), init_rename=('layer:theirs',))
    assert report.prefix == str(tmp_path / 'model.ckpt-12')
    np.testing.assert_array_equal(values['layer/a'], [7.0, 8.0, 9.0])


# Beside a trainer


def test_a_checkpoint_that_vanishes_is_read_anew(tmp_path):
    with small_run.started(tmp_path, keep_checkpoints=1) as run:
        run.steps()
        run.save()
        seen = []

        def load(found):
            seen.append(found.step)
            if len(seen) < 3:
                run.steps()
                run.save()  # removes what is being read
            return small_run.contents(found.prefix)['global_step']

        found, value = restore.retrying(run.model_dir, load)
    assert seen == [1, 2, 3] and found.step == value == 3


def test_an_error_of_the_reader_itself_is_raised_at_once(tmp_path):
    with small_run.started(tmp_path) as run:
        run.steps()
        run.save()
        seen = []
        with pytest.raises(ValueError, match='mine'):
            restore.retrying(run.model_dir, lambda found: seen.append(found) or raise_(ValueError('mine')))
        assert len(seen) == 1


def raise_(error):
    raise error


def test_nothing_to_read_is_none(tmp_path):
    assert restore.retrying(str(tmp_path), lambda found: 1 / 0) is None


def test_a_checkpoint_that_always_vanishes_is_an_error_in_the_end(tmp_path):
    with small_run.started(tmp_path) as run:
        run.steps()
        run.save()

        def load(found):
            manifest.remove(run.model_dir, found.step)
            run.steps()
            run.save()
            raise tf.errors.NotFoundError(None, None, 'gone')

        with pytest.raises(tf.errors.NotFoundError):
            restore.retrying(run.model_dir, load, attempts=3)


def read_in_a_loop(model_dir, seconds, seen, failures):
    """What an evaluator does, as often as it can."""
    with tf.Graph().as_default(), tf.Session() as session:
        zeros = tf.zeros_initializer()
        variables = {name: tf.get_variable(name, [20_000], initializer=zeros) for name in ('layer/a', 'layer/b')}
        restorer = restore.Restorer(variables)
        reader = manifest.Reader(model_dir)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                found, _ = restore.retrying(model_dir, lambda found: restorer.restore(session, found), reader=reader)
                seen.append((found.step, session.run(variables)))
            except Exception as error:
                failures.append(error)


@pytest.mark.parametrize('seconds', [2.0, pytest.param(8.0, marks=pytest.mark.soak)])
def test_readers_in_a_tight_loop_never_fail_nor_read_torn_values(tmp_path, seconds):
    with small_run.started(tmp_path, size=20_000, keep_checkpoints=1) as run:
        run.steps()
        run.save()
        seen, failures = ([], []), []
        threads = [threading.Thread(target=read_in_a_loop, args=(run.model_dir, seconds, each, failures)) for each in seen]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            run.steps()
            run.saver.save(run.session)
        run.saver.wait()
        last = run.values()['step']
        read_in_a_loop(run.model_dir, 0.2, seen[0], failures)
    assert failures == []
    assert len({step for step, _ in seen[0]}) > 1 and seen[0][-1][0] == last
    for step, values in (*seen[0], *seen[1]):
        for value in values.values():
            np.testing.assert_array_equal(value, step)
