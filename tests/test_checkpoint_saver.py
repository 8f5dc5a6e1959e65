"""Saving: consistent, whole, finite, beside the training, and what of it stays on the disk."""

import logging as std_logging
import os
import resource
import threading

import numpy as np
import pytest
import small_run
import tensorflow.compat.v1 as tf

from towers import config
from towers.checkpoint import files, manifest, saver

DATA = '.data-00000-of-00001'


@pytest.fixture
def run(tmp_path):
    with small_run.started(tmp_path / 'run', keep_checkpoints=100) as made:
        yield made


@pytest.fixture
def slow_disk(monkeypatch):
    """The writer stands still before it makes a file durable, until the event is set."""
    go, real = threading.Event(), files.sync_file
    monkeypatch.setattr(files, 'sync_file', lambda path: go.wait(60) and real(path))
    yield go
    go.set()


def test_a_checkpoint_is_an_ordinary_one_with_a_manifest(run):
    run.steps(3)
    run.save()
    prefix = run.saver.newest
    assert prefix == tf.train.latest_checkpoint(run.model_dir) == os.path.join(run.model_dir, 'ckpt-3')
    values = small_run.contents(prefix)
    assert sorted(values) == ['examples_seen', 'global_step', 'input_position', 'layer/a', 'layer/b']
    np.testing.assert_array_equal(values['layer/a'], [3.0, 3.0, 3.0])
    found = manifest.newest(run.model_dir)
    facts = (found.step, found.manifest.examples, found.manifest.final, found.manifest.input_fingerprint, found.manifest.semantics)
    assert facts == (3, 21, False, 'shuffle-50', {'towers': 2})
    assert small_run.names_in(run.model_dir) == small_run.names_of(3)


def test_a_plain_saver_restores_it_by_names(run):
    run.steps(2)
    run.save()
    with tf.Graph().as_default(), tf.Session() as session:
        a = tf.get_variable('layer/a', [3])
        tf.train.Saver().restore(session, tf.train.latest_checkpoint(run.model_dir))
        np.testing.assert_array_equal(session.run(a), [2.0, 2.0, 2.0])


def test_each_checkpoint_is_of_one_moment_while_the_training_goes_on(run):
    for _ in range(40):
        run.steps()
        run.saver.save(run.session)  # not waited for: the next steps change the variables while this is written
        run.steps(3)
    run.saver.wait()
    found = manifest.all(run.model_dir)
    assert len(found) == 40
    for each in found:
        values = small_run.contents(each.prefix)
        np.testing.assert_array_equal([*values['layer/a'], *values['layer/b'], values['global_step']], [each.step] * 7)
        assert values['examples_seen'] == each.step * small_run.EXAMPLES == each.manifest.examples


def writers():
    """Operations that change a variable in every way there is, on resource and reference variables."""
    made = {}
    for kind, resource_variable in (('resource', True), ('reference', False)):
        table = tf.get_variable(f'{kind}_table', [4, 2], initializer=tf.zeros_initializer(), use_resource=resource_variable)
        made[f'{kind}_table'] = table
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]))
        changes = [table.assign_add(tf.ones([4, 2])), table.scatter_add(rows), table.scatter_update(rows), table.assign(table + 2.0)]
        for optimizer in (tf.train.GradientDescentOptimizer(1.0), tf.train.MomentumOptimizer(1.0, 0.9), tf.train.AdamOptimizer(1.0)):
            changes += [optimizer.apply_gradients([(gradient, table)]) for gradient in (tf.ones([4, 2]), rows)]
        made[f'{kind}_changes'] = changes
    return made


@pytest.mark.parametrize('kind', ['resource', 'reference'])
def test_no_way_of_changing_a_variable_reaches_a_snapshot(tmp_path, slow_disk, kind, monkeypatch):
    with small_run.started(tmp_path, extra=writers, keep_checkpoints=100) as run:
        run.saver.prepare(run.session)
        before, real = [], run.saver._publish
        started = threading.Event()
        monkeypatch.setattr(run.saver, '_publish', lambda *args: started.wait(60) and real(*args))  # written after all changes
        for change in run.extra[f'{kind}_changes']:
            run.steps()
            before.append(run.session.run(run.extra[f'{kind}_table']))
            started.clear()
            run.saver.save(run.session)
            for _ in range(3):
                run.session.run(change)
            assert (run.session.run(run.extra[f'{kind}_table']) != before[-1]).any()
            slow_disk.set()
            started.set()
            run.saver.wait(60)
        for value, found in zip(before, manifest.all(run.model_dir), strict=True):
            np.testing.assert_array_equal(small_run.contents(found.prefix)[f'{kind}_table'], value)


def typed():
    values = {
        'bool': np.array([True, False]), 'int32': np.arange(3, dtype=np.int32), 'half': np.array([1.5, 65504], np.float16),
        'double': np.array(1e300), 'complex': np.array([1 + 2j], np.complex64), 'text': np.array([b'a\x00b', b''], object),
    }  # fmt: skip
    made = {name: tf.Variable(value, name=name, use_resource=True) for name, value in values.items()}
    return {**made, 'bfloat16': tf.Variable(tf.constant([0.5, 3e38], tf.bfloat16), name='bfloat16', use_resource=True)}


def test_every_type_is_saved(tmp_path):
    with small_run.started(tmp_path, extra=typed) as run:
        run.steps()
        run.save()
        expected = run.session.run(run.extra)
        values = small_run.contents(run.saver.newest)
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value)
            assert values[name].dtype == value.dtype


def test_saving_adds_no_operation(run):
    count = len(run.graph.get_operations())
    for _ in range(3):
        run.steps()
        run.save()
    assert len(run.graph.get_operations()) == count


def test_the_shadows_are_dropped_once_written(run):
    run.steps()
    run.save()
    [held] = [op for op in run.graph.get_operations() if op.type == 'ReadVariableOp' and op.outputs[0].dtype == tf.variant]
    with pytest.raises(tf.errors.FailedPreconditionError):
        run.session.run(held)


def test_the_training_goes_on_while_a_checkpoint_is_written(run, slow_disk):
    run.steps()
    run.saver.save(run.session)
    run.steps(5)
    assert run.saver.busy and run.values()['step'] == 6
    assert run.saver.newest is None and manifest.newest(run.model_dir) is None
    assert not run.saver.wait(0.01)
    slow_disk.set()
    assert run.saver.wait(60) and not run.saver.busy
    assert small_run.steps_in(run.model_dir) == [1]


def test_a_save_waits_for_the_one_before(run, slow_disk):
    run.steps()
    run.saver.save(run.session)
    run.steps()
    threading.Timer(0.05, slow_disk.set).start()
    run.saver.save(run.session)
    assert small_run.steps_in(run.model_dir)[0] == 1
    run.saver.wait()
    assert small_run.steps_in(run.model_dir) == [1, 2]


def test_a_synchronous_save_is_published_when_it_returns(tmp_path):
    with small_run.started(tmp_path, sync_checkpoint=True) as run:
        for step in (1, 2):
            run.steps()
            run.saver.save(run.session)
            assert not run.saver.busy and small_run.steps_in(tmp_path)[-1] == step


def test_a_step_is_saved_once_and_marked_final_later(run, monkeypatch):
    run.steps(2)
    run.save()
    before = os.stat(run.saver.newest + DATA)
    run.save()
    run.save(last=True)
    assert not manifest.newest(run.model_dir).manifest.final
    run.save(final=True)
    assert manifest.newest(run.model_dir).manifest.final
    after = os.stat(run.saver.newest + DATA)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_final_save_makes_sure_that_the_file_is_whole(run):
    run.steps(2)
    run.save()
    os.truncate(run.saver.newest + DATA, 5)
    run.save(final=True)
    assert manifest.check(run.saver.newest) is None and manifest.newest(run.model_dir).manifest.final


def test_a_run_without_a_step_marks_what_is_there(tmp_path):
    with small_run.started(tmp_path) as run:
        run.steps(2)
        run.save()
        inode = os.stat(run.saver.newest + DATA).st_ino
    with small_run.started(tmp_path) as run:
        run.resume()
        run.save(final=True)
        assert os.stat(run.saver.newest + DATA).st_ino == inode
        assert manifest.newest(tmp_path).manifest.final


# Only whole and finite ones


@pytest.mark.parametrize('value', ['nan', 'inf'])
@pytest.mark.parametrize(('sync', 'size'), [(False, 3), (True, 3), (False, 100_000)])
def test_values_that_are_not_finite_are_never_published(tmp_path, caplog, value, sync, size):
    with small_run.started(tmp_path, size=size, sync_checkpoint=sync) as run, caplog.at_level(std_logging.WARNING):
        run.steps()
        run.save()
        run.session.run(run.changes[value])
        run.steps()
        run.save()
        (record,) = [each for each in caplog.records if each.name == 'absl']
        assert 'Checkpoint of step 2 was not saved: layer/a has' in record.getMessage()
        assert small_run.names_in(tmp_path) == small_run.names_of(1)
        with pytest.raises(manifest.CheckpointError, match=r'of step 2, was not saved in .*: layer/a has (NaN|\+Inf)'):
            run.saver.save(run.session, final=True)
        assert small_run.names_in(tmp_path) == small_run.names_of(1)


@pytest.mark.parametrize('size', [3, 100_000])
def test_large_values_are_finite(tmp_path, size):
    with small_run.started(tmp_path, size=size) as run:
        run.session.run(run.changes['huge'])
        run.steps()
        run.save()
        np.testing.assert_array_equal(small_run.contents(run.saver.newest)['layer/a'], np.full([size], np.float32(3e38)))


@pytest.fixture
def file_limit():
    """Files of this process can't grow past so many bytes, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_a_warning_and_the_next_save_tries_again(tmp_path, caplog, file_limit):
    with small_run.started(tmp_path, size=50_000) as run, caplog.at_level(std_logging.WARNING):
        run.steps()
        run.save()
        file_limit(100_000)
        for _ in range(2):
            run.steps()
            run.save()
        messages = [record.getMessage() for record in caplog.records]
        file_limit(resource.RLIM_INFINITY)
        assert len(messages) == 2 and 'Checkpoint of step 2 was not saved' in messages[0] and 'File too large' in messages[0]
        assert '\n' not in messages[0]
        assert small_run.names_in(tmp_path) == small_run.names_of(1)
        run.steps()
        run.save()
        assert small_run.names_in(tmp_path) == small_run.names_of(1, 4)
        np.testing.assert_array_equal(small_run.contents(run.saver.newest)['layer/b'], np.full([50_000], 4.0))


def test_a_full_disk_at_the_last_save_is_an_error(tmp_path, file_limit):
    with small_run.started(tmp_path, size=50_000) as run:
        run.steps()
        run.save()
        run.steps()
        file_limit(100_000)
        with pytest.raises(manifest.CheckpointError, match='The last checkpoint, of step 2, was not saved in .*File too large'):
            run.saver.save(run.session, last=True)
        file_limit(resource.RLIM_INFINITY)
        assert small_run.names_in(tmp_path) == small_run.names_of(1)


@pytest.mark.parametrize(('owner', 'call'), [(os, 'replace'), (os, 'fsync'), (files, 'measure')])
def test_any_failing_call_is_a_warning_and_leaves_no_part(run, caplog, monkeypatch, owner, call):
    run.steps()
    run.save()
    run.steps()
    real, count = getattr(owner, call), iter(range(100))

    def fail(*args):
        if next(count) == 1:
            raise OSError(28, 'No space left on device')
        return real(*args)

    with monkeypatch.context() as patch, caplog.at_level(std_logging.WARNING):
        patch.setattr(owner, call, fail)
        run.save()
    warnings = [record for record in caplog.records if record.levelno >= std_logging.WARNING]
    assert ['No space left' in record.getMessage() for record in warnings] == [True]
    assert small_run.names_in(run.model_dir) == small_run.names_of(1)


def test_a_defect_in_the_writer_is_raised_where_it_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(files, 'measure', lambda path: 1 / 0)
    run.steps()
    run.saver.save(run.session)
    with pytest.raises(ZeroDivisionError):
        run.saver.wait(60)
    assert run.saver.wait(60)
    run.saver.save(run.session)
    assert run.saver.close(60)


def test_a_session_that_closes_under_the_writer_ends_it(tmp_path, monkeypatch, caplog):
    with small_run.started(tmp_path) as run:
        run.steps()
        run.save()
        run.steps()
        closed, real = threading.Event(), run.saver._publish
        monkeypatch.setattr(run.saver, '_publish', lambda *args: closed.wait(60) and real(*args))
        run.saver.save(run.session)
        run.session.close()
        closed.set()
        assert run.saver.close(60)
    assert 'was not' in caplog.text
    assert small_run.names_in(tmp_path) == small_run.names_of(1)


def test_a_vanished_folder_comes_back(tmp_path):
    with small_run.started(tmp_path / 'run') as run:
        run.steps()
        run.save()
        os.rename(tmp_path / 'run', tmp_path / 'elsewhere')
        run.steps()
        run.save()
        assert small_run.names_in(tmp_path / 'run') == small_run.names_of(2)


def test_the_step_is_required():
    with pytest.raises(ValueError, match="must hold 'global_step'"):
        saver.Saver({}, None, config=config.CheckpointConfig(), model_dir='never')


# What stays


def test_the_newest_stay_also_over_restarts(tmp_path):
    for start in (0, 4):
        with small_run.started(tmp_path, keep_checkpoints=3) as run:
            if start:
                assert run.resume() == start
            for _ in range(4):
                run.steps()
                run.save()
    assert small_run.names_in(tmp_path) == small_run.names_of(6, 7, 8)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [os.path.basename(path) for path in state.all_model_checkpoint_paths] == ['ckpt-6', 'ckpt-7', 'ckpt-8']


def test_what_others_wrote_stays(tmp_path):
    theirs = ['config.json', 'ckpt-best.index', 'model.ckpt-1.index', 'ckpt-1.meta', 'events.out.tfevents.1.v2']
    for name in theirs:
        (tmp_path / name).write_text('theirs')
    with small_run.started(tmp_path, keep_checkpoints=1) as run:
        for _ in range(3):
            run.steps()
            run.save()
    assert small_run.names_in(tmp_path) == sorted([*small_run.names_of(3), *theirs])


def test_a_bad_newer_one_counts_for_nothing_and_is_replaced(tmp_path, caplog):
    with small_run.started(tmp_path, keep_checkpoints=2) as run:
        for _ in range(4):
            run.steps(10)
            run.save()
    os.truncate(tmp_path / f'ckpt-40{DATA}', 10)
    with small_run.started(tmp_path, keep_checkpoints=2) as run:
        assert run.resume() == 30
        for _ in range(2):
            run.steps(3)
            run.save()
        assert small_run.steps_in(tmp_path) == [33, 36, 40]  # the bad one took no good one's place
        run.steps(4)
        run.save()
        assert small_run.steps_in(tmp_path) == [36, 40]
    assert manifest.newest(tmp_path).step == 40
    np.testing.assert_array_equal(small_run.contents(manifest.newest(tmp_path).prefix)['layer/a'], [40.0] * 3)


def test_what_a_stopped_writer_left_is_swept_at_the_start(tmp_path):
    for name in ('ckpt-9.tmp.index', 'ckpt-9.json.tmp', f'ckpt-9{DATA}', 'checkpoint.tmp'):
        (tmp_path / name).touch()
    with small_run.started(tmp_path) as run:
        run.saver.prepare(run.session)
        assert small_run.names_in(tmp_path) == []
