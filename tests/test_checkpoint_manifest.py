"""Which checkpoint is the newest whole one, whatever has happened to the files; no TensorFlow needed."""

import dataclasses
import json
import logging as std_logging
import os
import re
import threading
import zlib

import pytest

from towers.checkpoint import files, manifest

NAMES = ('data-00000-of-00001', 'index')


def publish(model_dir, step, content=b'0123456789' * 10, **facts):
    prefix = manifest.prefix_of(model_dir, step)
    written = {}
    for name in NAMES:
        with open(f'{prefix}.tmp.{name}', 'wb') as file:
            file.write(content + name.encode())
        written[f'ckpt-{step}.{name}'] = files.measure(f'{prefix}.tmp.{name}')
    manifest.publish(model_dir, manifest.Manifest(step=step, examples=10 * step, files=written, **facts))


def newest_step(model_dir):
    return manifest.newest(model_dir).step


@pytest.fixture
def run_dir(tmp_path):
    for step in (100, 200, 300):
        publish(str(tmp_path), step)
    return str(tmp_path)


def delete(path):
    os.unlink(path)


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    with open(path, 'r+b') as file:
        middle = os.path.getsize(path) // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def garbage(path):
    with open(path, 'wb') as file:
        file.write(b'\x00\xff[garbage')


def grow(path):
    with open(path, 'ab') as file:
        file.write(b'x')


DAMAGES = (delete, cut, empty, flip, garbage, grow)
EACH = [(damage, name) for damage in DAMAGES for name in (*NAMES, 'json')]


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    publish(str(tmp_path), 7, final=True, input_fingerprint='range', semantics={'towers': 4, 'loss': ['mean']}, time=12.5)
    found = manifest.newest(str(tmp_path))
    assert (found.step, found.prefix) == (7, str(tmp_path / 'ckpt-7'))
    expected = {'step': 7, 'examples': 70, 'final': True, 'finite': True, 'input_fingerprint': 'range', 'time': 12.5}
    assert {name: getattr(found.manifest, name) for name in expected} == expected
    assert found.manifest.semantics == {'towers': 4, 'loss': ['mean']}
    assert sorted(os.listdir(tmp_path)) == ['ckpt-7.data-00000-of-00001', 'ckpt-7.index', 'ckpt-7.json']


def test_checkpoints_are_listed_by_number(tmp_path):
    for step in (1000, 9, 200):
        publish(str(tmp_path), step)
    assert [found.step for found in manifest.all(str(tmp_path))] == [9, 200, 1000]


@pytest.mark.parametrize('folder', ['', 'missing'])
def test_there_may_be_none(tmp_path, folder):
    (tmp_path / 'events.out.tfevents.1').touch()
    (tmp_path / 'ckpt-best.json').touch()
    assert manifest.newest(str(tmp_path / folder)) is None
    assert manifest.all(str(tmp_path / folder)) == []


@pytest.mark.parametrize(('damage', 'name'), EACH)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run_dir, caplog, damage, name):
    damage(os.path.join(run_dir, f'ckpt-300.{name}'))
    with caplog.at_level(std_logging.WARNING):
        assert newest_step(run_dir) == 200
    (record,) = caplog.records
    assert 'ckpt-300' in record.getMessage() and f'ckpt-300.{name}' in record.getMessage()


@pytest.mark.parametrize(('damage', 'name'), EACH)
def test_two_damaged_ones_are_passed_over(run_dir, damage, name):
    before = set(os.listdir(run_dir))
    damage(os.path.join(run_dir, f'ckpt-300.{name}'))
    flip(os.path.join(run_dir, 'ckpt-200.json'))
    assert newest_step(run_dir) == 100
    assert before - set(os.listdir(run_dir)) <= {f'ckpt-300.{name}'}


@pytest.mark.parametrize(('damage', 'name'), EACH)
def test_when_all_are_bad_it_is_an_error_and_nothing_is_deleted(run_dir, damage, name):
    for step in (100, 200, 300):
        damage(os.path.join(run_dir, f'ckpt-{step}.{name}'))
    before = sorted(os.listdir(run_dir))
    with pytest.raises(manifest.CheckpointError, match=r'None of 3 checkpoints in .* is whole \(ckpt-300: .*nothing was deleted'):
        manifest.newest(run_dir)
    manifest.sweep(run_dir)
    assert sorted(os.listdir(run_dir)) == before


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    publish(str(tmp_path), 1, semantics={'a': 1.5})
    path = tmp_path / 'ckpt-1.json'
    good = path.read_bytes()
    assert manifest.check(str(tmp_path / 'ckpt-1')) is None
    fields = json.loads(good)
    for index in range(0, len(good) * 8, 5):
        bad = bytearray(good)
        bad[index // 8] ^= 1 << index % 8
        path.write_bytes(bad)
        if manifest.check(str(tmp_path / 'ckpt-1')) is None:  # only white space differs
            assert json.loads(bad) == fields


@pytest.mark.parametrize(
    ('fields', 'problem'),
    [
        ({'step': 5, 'examples': 1, 'files': {}, 'a_later_field': [1]}, None),
        ({'step': 5, 'examples': 1}, "not as it was written .*'files'"),
        ([5], 'not as it was written'),
    ],
)
def test_a_manifest_of_another_version(tmp_path, fields, problem):
    crc = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(',', ':')).encode())
    (tmp_path / 'ckpt-5.json').write_text(json.dumps({**fields, 'crc32': crc} if isinstance(fields, dict) else fields))
    found = manifest.check(str(tmp_path / 'ckpt-5'))
    assert found is None if problem is None else re.search(problem, found)


def test_a_manifest_of_another_step_is_bad(run_dir):
    os.replace(os.path.join(run_dir, 'ckpt-200.json'), os.path.join(run_dir, 'ckpt-300.json'))
    assert 'ckpt-300.json is that of step 200' in manifest.check(os.path.join(run_dir, 'ckpt-300'))


def test_values_that_are_not_finite_are_not_whole(run_dir):
    publish(run_dir, 400, finite=False)
    assert newest_step(run_dir) == 300
    assert 'not finite' in manifest.check(os.path.join(run_dir, 'ckpt-400'))


def test_files_without_a_manifest_are_never_taken_and_never_deleted(run_dir):
    for step in (100, 200, 300):
        os.unlink(os.path.join(run_dir, f'ckpt-{step}.json'))
    before = sorted(os.listdir(run_dir))
    assert list(manifest.sweep(run_dir)) == []
    with pytest.raises(manifest.CheckpointError, match='ckpt-200: its manifest ckpt-200.json is missing'):
        manifest.newest(run_dir)
    assert sorted(os.listdir(run_dir)) == before


def test_a_folder_can_be_moved(run_dir, tmp_path_factory):
    moved = str(tmp_path_factory.mktemp('other') / 'place')
    os.rename(run_dir, moved)
    assert manifest.newest(moved).prefix == os.path.join(moved, 'ckpt-300')


def test_a_final_mark_replaces_the_manifest_alone(run_dir):
    found = manifest.newest(run_dir)
    manifest.write(run_dir, dataclasses.replace(found.manifest, final=True))
    assert manifest.newest(run_dir).manifest == dataclasses.replace(found.manifest, final=True)


def test_sweeping_takes_only_what_a_writer_left(run_dir):
    ours = ['ckpt-300.json.tmp', 'ckpt-400.tmp.data-00000-of-00001.tempstate12', 'ckpt-400.tmp.index', 'checkpoint.tmp',
            'ckpt-500.json.tmp', 'ckpt-500.index', 'ckpt-500.data-00000-of-00001', 'ckpt-500.tmp.data-00000-of-00001']  # fmt: skip
    theirs = ['notes.tmp', 'ckpt-best.index', 'model.ckpt-1.index', 'ckpt-600.index', 'ckpt-5000.index', 'checkpoint', 'ckpt-7.tmp']
    for name in ours + theirs:
        open(os.path.join(run_dir, name), 'wb').close()
    before = set(os.listdir(run_dir))
    assert list(manifest.sweep(run_dir)) == sorted(ours)
    assert before - set(os.listdir(run_dir)) == set(ours)
    assert list(manifest.sweep(run_dir)) == []
    os.unlink(os.path.join(run_dir, 'ckpt-600.index'))
    os.unlink(os.path.join(run_dir, 'ckpt-5000.index'))
    assert newest_step(run_dir) == 300


@pytest.mark.parametrize('step', [300, 100])
def test_removing_leaves_the_others(run_dir, step):
    manifest.remove(run_dir, step)
    assert not [name for name in os.listdir(run_dir) if name.startswith(f'ckpt-{step}.')]
    assert newest_step(run_dir) == (200 if step == 300 else 300)
    manifest.remove(run_dir, step)


class Stop(BaseException):
    """A crash: no handler of the product catches it."""


OPERATIONS = ('replace', 'unlink', 'fsync')


def crash_at(monkeypatch, count):
    """The system call of that number, and each after it, does nothing but stop the program."""
    left = iter(range(count))
    for name in OPERATIONS:
        real = getattr(os, name)

        def call(*args, real=real):
            if next(left, None) is None:
                raise Stop
            return real(*args)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize('count', range(22))
def test_a_crash_between_any_two_calls_leaves_a_whole_checkpoint_and_nothing_else(run_dir, monkeypatch, count):
    with monkeypatch.context() as patch:
        crash_at(patch, count)
        with pytest.raises(Stop):
            publish(run_dir, 400)
            manifest.remove(run_dir, 100)
            manifest.remove(run_dir, 400)
            publish(run_dir, 400)
    manifest.sweep(run_dir)
    step = newest_step(run_dir)
    kept = [found.step for found in manifest.all(run_dir)]
    assert step >= 300 and all(manifest.check(found.prefix) is None for found in manifest.all(run_dir))
    assert sorted(os.listdir(run_dir)) == sorted(f'ckpt-{step}.{name}' for step in kept for name in (*NAMES, 'json'))


def test_a_reader_reads_nothing_twice_and_warns_once(run_dir, caplog, monkeypatch):
    flip(os.path.join(run_dir, 'ckpt-300.index'))
    measured = []
    real = files.measure
    monkeypatch.setattr(files, 'measure', lambda path: measured.append(os.path.basename(path)) or real(path))
    reader = manifest.Reader(run_dir)
    with caplog.at_level(std_logging.WARNING):
        assert [reader.newest().step for _ in range(3)] == [200, 200, 200]
    assert len(caplog.records) == 1
    assert sorted(measured) == sorted([f'ckpt-{step}.{name}' for step in (200, 300) for name in NAMES])
    publish(run_dir, 300)
    assert reader.newest().step == 300


def test_a_reader_beside_a_writer_that_keeps_one_never_fails_nor_warns(tmp_path, caplog):
    model_dir = str(tmp_path)
    publish(model_dir, 0)
    reader, seen, over = manifest.Reader(model_dir), [], threading.Event()

    def read():
        while not over.is_set():
            seen.append(reader.newest().step)

    thread = threading.Thread(target=read)
    with caplog.at_level(std_logging.WARNING):
        thread.start()
        for step in range(1, 150):
            publish(model_dir, step)
            manifest.remove(model_dir, step - 1)
        over.set()
        thread.join()
    assert seen == sorted(seen) and seen[-1] >= 140 and len(set(seen)) > 5
    assert [record.getMessage() for record in caplog.records] == []
