"""A disk that fills up, files that may not grow, folders that may not be written or vanish: the run says so and loses nothing."""

import contextlib
import os
import resource
import subprocess
import time

import injected
import pytest
import starter

from towers.checkpoint import manifest

BALLAST_BYTES = 8_000_000


@pytest.fixture
def small_disk(training):
    """A training on a file system of 8 MB; only root can make one."""
    training.run = training.folder / 'disk/run'
    mount(training.run.parent, '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs')
    training.disk_run = 'disk/run'
    yield training
    training.close()
    unmount(training.run.parent)


def mount(folder, *how):
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(['mount', *how, folder], capture_output=True, check=False).returncode:
        pytest.skip('a file system can only be mounted by root, and not in every container')


def unmount(folder):
    subprocess.run(['umount', '-l', folder], check=True)


def fill(folder):
    """Takes what is left of a file system; returns the file to delete."""
    ballast = folder / 'ballast'
    with contextlib.suppress(OSError), open(ballast, 'wb', buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


def saves_again(command, before):
    """Waits for the first save after `before` characters of output; returns the seconds that it took."""
    start = time.monotonic()
    starter.wait_for(lambda: 'Saved checkpoint' in command.text()[before:] or command.code() is not None)
    assert command.code() is None, command.text()
    return time.monotonic() - start


def warned_once(said, place):
    return sum(place in line and 'can not be written' in line for line in said.splitlines()) <= 1


def test_a_disk_that_is_full_for_a_while(small_disk):
    training = small_disk
    command = training.start(run=training.disk_run)
    command.wait_for('Saved checkpoint')
    ballast = fill(training.run.parent)
    command.wait_for('The training goes on and the next save tries again')
    whole = training.published()
    assert whole, 'the old checkpoints are gone'
    time.sleep(0.5)
    assert command.code() is None and training.published() == whole
    before = len(command.text())
    ballast.unlink()
    secs = saves_again(command, before)
    said = injected.check_stopped(command)
    assert 'No space left on device' in said and 'Traceback' not in said
    assert warned_once(said, 'metrics.jsonl') and warned_once(said, 'events.out')
    assert training.published()[-1] == training.last_made()
    assert training.strays() == []
    injected.show('full disk for a while', command.code(), training.last_made(), 0, secs, [])


@pytest.mark.parametrize('when', ['before the end', pytest.param('before the start', marks=pytest.mark.soak)])
def test_a_disk_that_stays_full(small_disk, when):
    training = small_disk
    if when == 'before the end':
        command = training.start(run=training.disk_run, steps=400)
        command.wait_for('Saved checkpoint')
        ballast = fill(training.run.parent)
    else:
        assert training.start(run=training.disk_run, steps=5).wait() == injected.DONE
        ballast = fill(training.run.parent)
        command = training.start(run=training.disk_run)
    assert command.wait() == injected.FAILED
    said = command.text()
    assert 'No space left on device' in said and 'Traceback' not in said, said
    assert when == 'before the start' or 'The last checkpoint, of step 400, was not saved' in said
    assert training.strays() == []
    ballast.unlink()
    training.goes_on(f'full disk {when}', command, run=training.disk_run)


@pytest.mark.parametrize('stays', [False, pytest.param(True, marks=pytest.mark.soak)])
def test_files_that_may_not_grow(training, stays):
    command = training.start(steps=injected.ENDLESS if not stays else 400)
    command.wait_for('Saved checkpoint')
    limit(command, 100_000)
    if stays:
        assert command.wait() == injected.FAILED
        said = command.text()
        assert 'The last checkpoint, of step 400, was not saved' in said and 'Traceback' not in said
        training.goes_on('RLIMIT_FSIZE to the end (EFBIG)', command)
        return
    command.wait_for('The training goes on and the next save tries again')
    whole, before = training.published(), len(command.text())
    assert whole, 'the old checkpoints are gone'
    limit(command, resource.RLIM_INFINITY)
    secs = saves_again(command, before)
    said = injected.check_stopped(command)
    assert 'Traceback' not in said and training.published()[-1] == training.last_made()
    assert training.strays() == []
    injected.show('RLIMIT_FSIZE for a while (EFBIG)', command.code(), training.last_made(), 0, secs, [])


def limit(command, size):
    _, hard = resource.prlimit(command.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (size, hard))


@contextlib.contextmanager
def read_only(folder):
    """The folder as it is, mounted over itself and not to be written: to root, too."""
    mount(folder, '--bind', folder)
    try:
        subprocess.run(['mount', '-o', 'remount,bind,ro', folder], check=True)
        yield
    finally:
        unmount(folder)


def test_a_run_directory_that_may_not_be_written(training):
    training.trained(3)
    with read_only(training.run):
        command = training.start()
        assert command.wait() == injected.MISUSED
        said = command.text()
        assert 'can not be written (Read-only file system); give a folder that can' in said and 'Traceback' not in said
    training.goes_on('run directory read-only at the start', command)


@pytest.mark.soak
def test_a_run_directory_that_becomes_read_only(training):
    command = training.start(steps=400)
    command.wait_for('Saved checkpoint')
    with read_only(training.run):
        assert command.wait() == injected.FAILED
        said = command.text()
        assert 'Read-only file system' in said and 'Traceback' not in said, said
    training.goes_on('run directory read-only from a step on', command)


@pytest.mark.parametrize('how', ['moved', pytest.param('deleted', marks=pytest.mark.soak)])
def test_a_run_directory_that_vanishes(training, how):
    command = training.start()
    command.wait_for('Saved checkpoint')
    moved = training.folder / 'moved'
    if how == 'moved':
        os.rename(training.run, moved)
    else:
        subprocess.run(['cp', '-a', training.run, moved], check=False)  # what vanishes meanwhile is not copied
        starter.wait_for(lambda: subprocess.run(['rm', '-rf', training.run], check=False).returncode == 0)  # it may be writing there
    assert command.wait() == injected.FAILED
    said = command.text()
    assert 'run directory with it' in said and 'Traceback' not in said, said
    assert not manifest.all(str(training.run))
    left = sorted(os.listdir(training.run)) if training.run.exists() else []
    training.goes_on(f'run directory {how} (going on in its copy)', command, run='moved')
    print('left in its old place:', left)
