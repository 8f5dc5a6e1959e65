"""Leases: what is being read stays, whoever comes first; one whose reader is gone expires."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
import small_run
import tensorflow.compat.v1 as tf

from towers import config
from towers.checkpoint import leases, manifest, retention, warm

TRAINER = pathlib.Path(__file__).with_name('small_run.py')
KEEP_ONE = config.CheckpointConfig(keep_checkpoints=1)


def tidied(folder):
    retention.tidy(str(folder), KEEP_ONE, manifest.all(str(folder)))
    return small_run.steps_in(folder)


def published(folder, *steps):
    for step in steps:
        runs.publish(folder, step, w=np.float32(step))


def files_of(folder):
    return sorted(os.listdir(folder / 'sessions'))


def test_what_is_pinned_stays_until_it_is_given_back(tmp_path):
    published(tmp_path, 1, 2, 3)
    with leases.Lease(str(tmp_path), 'a test') as lease:
        assert tidied(tmp_path) == [1, 2, 3]  # while the reader looks for one
        lease.narrow(2)
        assert tidied(tmp_path) == [2, 3]
        with leases.Lease(str(tmp_path), 'another') as other:
            other.narrow(3)
            published(tmp_path, 4)
            assert tidied(tmp_path) == [2, 3, 4]
    assert files_of(tmp_path) == []
    assert tidied(tmp_path) == [4]


def test_a_lease_that_comes_while_the_checkpoint_is_taken_away_brings_it_back(tmp_path, monkeypatch):
    published(tmp_path, 1, 2)
    lease, real = leases.Lease(str(tmp_path), 'a test'), leases.is_pinned

    def looked(model_dir, step):
        assert not (tmp_path / 'ckpt-1.json').exists()  # a reader finds it no more
        lease.__enter__()
        return real(model_dir, step)

    monkeypatch.setattr(leases, 'is_pinned', looked)
    assert tidied(tmp_path) == [1, 2]
    assert manifest.check(manifest.prefix_of(str(tmp_path), 1)) is None
    lease.__exit__()
    monkeypatch.undo()
    assert tidied(tmp_path) == [2]


@pytest.mark.parametrize('moment', ['pinned', 'best_step', 'is_pinned'])
def test_the_best_stays_though_its_evaluation_ends_while_retention_looks(tmp_path, monkeypatch, moment):
    """The result is written and then the lease given back, before retention looks at leases, at results, or again."""
    published(tmp_path, 1, 2)
    lease = leases.Lease(str(tmp_path), 'an evaluator')
    where = retention if moment == 'best_step' else leases
    real = getattr(where, moment)

    def looked(*args):
        if not (tmp_path / 'eval').exists():
            (tmp_path / 'eval' / 'test').mkdir(parents=True)
            saved = json.loads(manifest_of_1)['time']
            (tmp_path / 'eval' / 'test' / 'results.jsonl').write_text(json.dumps({'step': 1, 'accuracy': 0.9, 'saved': saved}) + '\n')
            lease.__exit__()
        return real(*args)

    manifest_of_1 = (tmp_path / 'ckpt-1.json').read_text()
    if moment != 'is_pinned':  # else it came after the first look
        lease.__enter__()
        lease.narrow(1)
    monkeypatch.setattr(where, moment, looked)
    best = config.CheckpointConfig(keep_checkpoints=1, keep_best='accuracy')
    retention.tidy(str(tmp_path), best, manifest.all(str(tmp_path)))
    assert small_run.steps_in(tmp_path) == [1, 2]


def test_a_dead_readers_lease_of_another_machine_expires_and_a_living_ones_does_not(tmp_path):
    published(tmp_path, 1, 2)
    code = (
        'import os; from towers.checkpoint import leases; '
        'leases.identity.machine = lambda: "another"; '
        f'leases.Lease({str(tmp_path)!r}, "evaluator dead", limit_secs=1.0).__enter__(); os.kill(os.getpid(), 9)'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=TRAINER.parent.parent, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGKILL
    with leases.Lease(str(tmp_path), 'a test', limit_secs=1.0) as lease:
        lease.narrow(2)
        [dead] = [name for name in files_of(tmp_path) if name not in os.path.basename(lease._path)]
        end = time.monotonic() + 60
        while leases.is_pinned(str(tmp_path), 1):
            assert time.monotonic() < end and dead in files_of(tmp_path)
            time.sleep(0.05)
        assert leases.is_pinned(str(tmp_path), 2)
        assert dead not in files_of(tmp_path)
    assert tidied(tmp_path) == [2]


def test_a_dead_readers_lease_of_this_machine_is_void_at_once(tmp_path):
    published(tmp_path, 1, 2)
    code = f'import os; from towers.checkpoint import leases; leases.Lease({str(tmp_path)!r}, "x").__enter__(); os.kill(os.getpid(), 9)'
    subprocess.run([sys.executable, '-c', code], cwd=TRAINER.parent.parent, stderr=subprocess.DEVNULL, check=False)
    assert len(files_of(tmp_path)) == 1
    with leases.Lease(str(tmp_path), 'a test') as lease:
        lease.narrow(2)
        leases.sweep(str(tmp_path))
        assert files_of(tmp_path) == [os.path.basename(lease.path)]
    assert tidied(tmp_path) == [2]


def test_a_run_directory_that_is_not_there_or_not_ones_own_has_no_lease(tmp_path):
    with leases.Lease(str(tmp_path / 'none'), 'a test') as lease:
        lease.narrow(3)
    assert not (tmp_path / 'none').exists()
    (tmp_path / 'sessions').write_text('no folder')
    with leases.Lease(str(tmp_path), 'a test') as lease:
        lease.narrow(3)


def test_a_file_that_can_not_be_read_pins_all(tmp_path):
    published(tmp_path, 1, 2)
    os.makedirs(tmp_path / 'sessions')
    (tmp_path / 'sessions' / 'lease-00.json').write_text('{"of": "another version"}')
    assert tidied(tmp_path) == [1, 2]


def test_what_was_still_read_at_the_end_goes_when_the_run_is_settled(tmp_path):
    published(tmp_path, 1, 2)
    retention.settle(str(tmp_path), KEEP_ONE)
    assert small_run.steps_in(tmp_path) == [1, 2]  # it isn't done
    runs.publish(tmp_path, 3, final=True, w=np.float32(3))
    published(tmp_path, 9)  # of an older run, which was passed over
    retention.settle(str(tmp_path), KEEP_ONE)
    assert small_run.steps_in(tmp_path) == [3, 9]


def test_a_warm_start_pins_what_it_reads(tmp_path):
    published(tmp_path, 1, 2)
    with tf.Graph().as_default(), tf.Session() as session:
        variables = {'w': tf.get_variable('w', [])}
        start = warm.WarmStart(variables, config=config.CheckpointConfig(init_checkpoint=str(tmp_path)))
        published(tmp_path, 3)
        assert tidied(tmp_path) == [2, 3]
        start.load(session)
        assert session.run(variables['w']) == 2
    assert tidied(tmp_path) == [3]


@pytest.mark.parametrize('secs', [1.5, pytest.param(8, marks=pytest.mark.soak)])
def test_reading_without_pause_beside_keep_one_never_has_to_try_again(tmp_path, secs):
    """A trainer saves 1 MB at each step and keeps one; every checkpoint found is read at the first try, in both orders."""
    command = [sys.executable, str(TRAINER), str(tmp_path), '1', '1']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        try:
            for _ in range(3):
                trainer.stdout.readline()
            read, end = [], time.monotonic() + secs
            while time.monotonic() < end:
                with leases.Lease(str(tmp_path), 'a test') as lease:
                    found = manifest.all(str(tmp_path))[-len(read) % 2 - 1]  # the newest, or the oldest where there are two
                    lease.narrow(found.step)
                    values = small_run.contents(found.prefix)
                assert set(values['layer/a']) == {found.step}
                read.append(found.step)
        finally:
            trainer.kill()
    assert len(set(read)) > 3
    print(f'{len(read)} reads of {len(set(read))} checkpoints, 0 retries')
