"""Real faults: processes killed while they save, files damaged in pairs, a full file system."""

import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import small_run

from towers.checkpoint import manifest

PROGRAM = str(pathlib.Path(__file__).with_name('small_run.py'))
MEGABYTES, KEEP = 60, 2


class Trainer:
    """A process that trains and saves at every step."""

    def __init__(self, model_dir):
        command = [sys.executable, PROGRAM, str(model_dir), str(MEGABYTES), str(KEEP)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def saves(self, count):
        """Waits for so many more saves and returns what the process said last."""
        return [self._process.stdout.readline().strip() for _ in range(count)][-1]

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def killed_while_saving(model_dir, delay):
    trainer = Trainer(model_dir)
    try:
        said = trainer.saves(3)
        time.sleep(delay)
    finally:
        trainer.kill()
    return said


def check_whole(model_dir, least):
    """The folder resumes at a step of at least `least`, with its values, and nothing else is in it."""
    with small_run.started(model_dir, size=int(MEGABYTES * 2**17), keep_checkpoints=KEEP) as run:
        step = run.resume()
        run.saver.prepare(run.session)
        values = run.values()
    assert step >= least and values['step'] == step
    np.testing.assert_array_equal([values['a'].min(), values['a'].max(), values['b'].min(), values['b'].max()], [step] * 4)
    steps = small_run.steps_in(model_dir)
    assert steps[-1] == step and len(steps) <= KEEP
    assert small_run.names_in(model_dir) == small_run.names_of(*steps)


def step_of(prefix):
    return int(prefix.rpartition('-')[2])


@pytest.mark.parametrize('kills', [1, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_while_saving(tmp_path, kills):
    moments = random.Random(kills)
    said = 'ckpt-0'
    for _ in range(kills):
        said = killed_while_saving(tmp_path, moments.uniform(0.0, 0.6))
        check_whole(tmp_path, step_of(said))


def delete(path):
    os.unlink(path)


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    with open(path, 'r+b') as file:
        file.seek(os.path.getsize(path) // 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 8]))


ENDINGS = ('data-00000-of-00001', 'index', 'json')
DAMAGES = [(damage, ending) for damage in (delete, cut, empty, flip) for ending in ENDINGS]
PAIRS = list(itertools.combinations_with_replacement(DAMAGES, 2))


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    """A run directory with checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp('good')
    with small_run.started(folder, size=3000) as run:
        for _ in range(3):
            run.steps()
            run.save()
    return folder


def test_any_two_damages_leave_the_oldest_and_resume_from_it(good, tmp_path):
    with small_run.started(tmp_path / 'unused', size=3000) as run:
        for index, pair in enumerate(PAIRS):
            folder = shutil.copytree(good, tmp_path / str(index))
            for step, (damage, ending) in zip((3, 2), pair, strict=True):
                damage(folder / f'ckpt-{step}.{ending}')
            found = manifest.newest(str(folder))
            assert found.step == 1, pair
            run.restorer.restore(run.session, found)
            assert run.values()['step'] == run.values()['a'].max() == 1
            shutil.rmtree(folder)


def named(pair):
    """The same in every process, where a function's own text holds its address."""
    return '+'.join(f'{damage.__name__}-{ending}' for damage, ending in pair)


@pytest.mark.parametrize('pair', [pair for pair in PAIRS if pair[0][1] != pair[1][1]][::5], ids=named)
def test_two_damages_of_one_checkpoint_are_one(good, tmp_path, pair):
    folder = shutil.copytree(good, tmp_path / 'run')
    for damage, ending in pair:
        damage(folder / f'ckpt-3.{ending}')
    assert manifest.newest(str(folder)).step == 2


def test_random_damage_never_gives_wrong_values(good, tmp_path):
    moments = random.Random(1)
    folder = shutil.copytree(good, tmp_path / 'run')
    data = [folder / f'ckpt-3.{ending}' for ending in ENDINGS]
    whole = [path.read_bytes() for path in data]
    for _ in range(150):
        path, content = moments.choice(list(zip(data, whole, strict=True)))
        bad = bytearray(content)
        bad[moments.randrange(len(bad))] ^= 1 << moments.randrange(8)
        path.write_bytes(bad[: moments.choice([len(bad), moments.randrange(len(bad))])])
        found = manifest.newest(str(folder))
        assert found.step == 2 or (found.step == 3 and manifest.read(found.prefix) == manifest.read(str(good / 'ckpt-3')))
        path.write_bytes(content)
    assert manifest.newest(str(folder)).step == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; only root can make one."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', folder], capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip('a file system can only be mounted by root')
    yield folder
    subprocess.run(['umount', folder], check=True)


def test_a_full_file_system(small_disk, caplog):
    with small_run.started(small_disk / 'run', size=100_000, keep_checkpoints=1) as run:  # 0.8 MB each
        run.steps()
        run.save()
        ballast = small_disk / 'ballast'
        ballast.write_bytes(bytes(2_000_000))
        run.steps()
        run.save()
        assert 'No space left on device' in caplog.text
        assert small_run.names_in(small_disk / 'run') == small_run.names_of(1)
        with pytest.raises(manifest.CheckpointError, match='No space left on device'):
            run.saver.save(run.session, last=True)
        ballast.unlink()
        run.steps()
        run.save(final=True)
        assert small_run.names_in(small_disk / 'run') == small_run.names_of(3)
        assert manifest.newest(str(small_disk / 'run')).manifest.final
