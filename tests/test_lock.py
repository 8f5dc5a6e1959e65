"""One writer for one run directory: refused, given back, taken over, lost, and fought for by many processes."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from towers import identity
from towers.directory import holder, lock

RACER = str(pathlib.Path(__file__).with_name('lock_racer.py'))


def names(model_dir):
    return sorted(os.listdir(model_dir / 'sessions'))


def started(*args):
    return subprocess.Popen([sys.executable, RACER, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def put(model_dir, **changes):
    """The lock file of a holder, by default a living one: this process."""
    folder = model_dir / 'sessions'
    folder.mkdir(exist_ok=True)
    made = dataclasses.replace(holder.this_process(3), **changes)
    path = folder / f'writer-{made.generation}.json'
    path.write_bytes(made.content())
    return path


def test_held_by_one_and_given_back(tmp_path, caplog):
    for generation in (1, 2, 3):
        with lock.WriterLock(str(tmp_path)) as held:
            held.check()
            assert held.generation == generation
            with pytest.raises(
                ValueError, match=rf'{tmp_path} is being trained by process {os.getpid()} on .* \(generation {generation}\)'
            ):
                lock.WriterLock(str(tmp_path)).__enter__()
            held.check()
        assert names(tmp_path) == [f'writer-{generation}.json']
    assert json.loads((tmp_path / 'sessions' / 'writer-3.json').read_text())['released'] is True
    assert 'taken over' not in caplog.text


def test_given_back_after_an_error_too(tmp_path):
    with pytest.raises(KeyError), lock.WriterLock(str(tmp_path)):
        raise KeyError
    with lock.WriterLock(str(tmp_path)):
        pass


def test_a_killed_holder_is_taken_over_with_a_warning(tmp_path, caplog):
    dead = started(tmp_path, 'hold')
    assert dead.stdout.readline() == 'held 1\n'
    with pytest.raises(ValueError, match=f'trained by process {dead.pid} on .*; stop it, wait for its end, or give another --model_dir'):
        lock.WriterLock(str(tmp_path)).__enter__()
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked for its exit code yet
    with lock.WriterLock(str(tmp_path)) as held:
        held.check()
        assert held.generation == 2
    assert f'process {dead.pid} on' in caplog.text and 'is gone without having given it back: taken over' in caplog.text
    dead.wait()
    dead.stdout.close()


def test_a_stopped_holder_on_this_machine_still_holds(tmp_path):
    process = started(tmp_path, 'hold')
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=f'process {process.pid}'):
        lock.WriterLock(str(tmp_path), limit_secs=0.0).__enter__()
    process.kill()
    process.communicate()


def test_a_later_process_of_the_same_number_is_not_the_holder(tmp_path):
    put(tmp_path, started=holder.this_process(3).started - 1)
    with lock.WriterLock(str(tmp_path)) as held:
        assert held.generation == 4


def test_a_holder_whose_start_the_system_does_not_say_lives_while_its_number_does(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, '_PROC', pathlib.Path('/nowhere'))
    assert holder.this_process(1).lives_here and holder.this_process(1).started is None
    ended = subprocess.Popen([sys.executable, '-c', ''])
    ended.wait()
    assert not dataclasses.replace(holder.this_process(1), pid=ended.pid).lives_here


def test_a_silent_holder_elsewhere_is_taken_over_after_the_limit(tmp_path, caplog):
    path = put(tmp_path, machine='another', host='there')
    start = time.monotonic()
    with lock.WriterLock(str(tmp_path), limit_secs=0.5) as held:
        assert held.generation == 4
        assert time.monotonic() - start >= 0.4
    assert 'on there' in caplog.text and not path.exists()


def test_a_holder_elsewhere_that_has_long_been_silent_is_not_waited_for(tmp_path):
    path = put(tmp_path, machine='another')
    os.utime(path, (time.time() - 100, time.time() - 100))
    start = time.monotonic()
    with lock.WriterLock(str(tmp_path), limit_secs=60.0):
        assert time.monotonic() - start < 5


@contextlib.contextmanager
def beating(path):
    """A holder elsewhere: touches its lock file now and then."""
    over = threading.Event()

    def beat():
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_holder_elsewhere_that_beats_is_refused(tmp_path):
    path = put(tmp_path, machine='another')
    with beating(path), pytest.raises(ValueError, match='generation 3'):
        lock.WriterLock(str(tmp_path), limit_secs=60.0).__enter__()


def test_the_heart_beats(tmp_path):
    with lock.WriterLock(str(tmp_path), beat_secs=0.05):
        path = tmp_path / 'sessions' / 'writer-1.json'
        os.utime(path, (0, 0))
        end = time.monotonic() + 20
        while path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_signal_ends_the_wait(tmp_path):
    put(tmp_path, machine='another')
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        lock.WriterLock(str(tmp_path), stop=stop).__enter__()
    assert names(tmp_path) == ['writer-3.json']


@pytest.mark.parametrize('content', [b'', b'{"generation": 3, "pi', b'[]', b'{"other": 1}'])
def test_a_lock_that_can_not_be_read_is_one_of_somebody_elsewhere(tmp_path, content):
    put(tmp_path).write_bytes(content)
    with pytest.raises(KeyboardInterrupt):
        stop = threading.Event()
        stop.set()
        lock.WriterLock(str(tmp_path), stop=stop).__enter__()
    with lock.WriterLock(str(tmp_path), limit_secs=0.0) as held:
        assert held.generation == 4


def take_over(model_dir):
    put(model_dir, generation=2, token='new')


def remove_the_lock(model_dir):
    os.unlink(model_dir / 'sessions' / 'writer-1.json')


def remove_everything(model_dir):
    shutil.rmtree(model_dir)


def start_anew(model_dir):
    remove_everything(model_dir)
    model_dir.mkdir()
    put(model_dir, generation=1)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (take_over, r'taken over by process \d+ on .*, generation 2: process \d+, of generation 1, stops and writes nothing more'),
        (remove_the_lock, 'is gone, or all of the run directory with it'),
        (remove_everything, 'is gone, or all of the run directory with it'),
        (start_anew, 'was taken over by process'),
    ],
)
def test_a_lost_lock_is_noticed_and_let_be(tmp_path, change, message):
    folder = tmp_path / 'run'
    with lock.WriterLock(str(folder)) as held:
        change(folder)
        held.check(every_secs=60.0)  # not due yet
        before = sorted(map(str, tmp_path.rglob('*')))
        for _ in range(2):
            with pytest.raises(lock.LockError, match=message):
                held.check()
    assert sorted(map(str, tmp_path.rglob('*'))) == before
    assert not any('released": true' in path.read_text() for path in tmp_path.rglob('writer-*'))


def test_what_killed_trainers_left_is_swept(tmp_path):
    put(tmp_path, released=True)
    put(tmp_path, generation=2)
    (tmp_path / 'sessions' / 'writer-0123.tmp').touch()
    (tmp_path / 'sessions' / 'evaluator-7.json').touch()
    with lock.WriterLock(str(tmp_path)):
        assert names(tmp_path) == ['evaluator-7.json', 'writer-4.json']


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', refuse)
    put(tmp_path, generation=1, released=True)
    with lock.WriterLock(str(tmp_path)) as held:
        held.check()
        with pytest.raises(ValueError, match='generation 2'):
            lock.WriterLock(str(tmp_path)).__enter__()


@pytest.mark.parametrize(
    ('where', 'why'),
    [
        ('{}/file', 'Not a directory'),
        ('{}/file/under', 'Not a directory'),
        ('/proc/none', 'No such file or directory'),
        ('{}/' + 'n' * 300, 'File name too long'),
    ],
    ids=['a file', 'under a file', 'not to be made', 'too long'],
)
def test_a_run_directory_that_can_not_be_one(tmp_path, where, why):
    (tmp_path / 'file').touch()
    with pytest.raises(ValueError, match=rf'--model_dir=.* can not be written \({why}\); give a folder that can'):
        lock.WriterLock(where.format(tmp_path)).__enter__()


def test_a_read_only_run_directory(tmp_path):
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', tmp_path], capture_output=True, check=False).returncode:
        pytest.skip('a file system can only be mounted by root')
    try:
        with pytest.raises(ValueError, match=r'can not be written \(Read-only file system\); give a folder that can'):
            lock.WriterLock(str(tmp_path)).__enter__()
    finally:
        subprocess.run(['umount', tmp_path], check=True)


@pytest.mark.parametrize('before', ['nothing', 'a dead holder', 'a silent one elsewhere'])
def test_of_many_that_start_at_once_one_holds(tmp_path, before):
    if before != 'nothing':
        path = put(tmp_path, **({'pid': 0} if before == 'a dead holder' else {'machine': 'another'}))
        os.utime(path, (0, 0))
    (tmp_path / 'wait').touch()
    processes = [started(tmp_path, 'hold') for _ in range(6)]
    time.sleep(0.5)  # most of them are waiting by then
    (tmp_path / 'go').touch()
    said = [process.stdout.readline() for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    assert len([line for line in said if line.startswith('held')]) == 1, said
    assert len([line for line in said if 'is being trained by process' in line]) == 5, said


@pytest.mark.parametrize('rounds', [1, pytest.param(30, marks=pytest.mark.soak)])
def test_many_fight_and_die_and_never_two_hold(tmp_path, rounds):
    taken = 0
    for number in range(rounds):
        processes = [started(tmp_path, 'race', f'{number} {index}', 1.5) for index in range(6)]
        for process in processes:
            said, _ = process.communicate(timeout=60)
            assert process.returncode in (0, -signal.SIGKILL)
            taken += int(said)
    assert taken > 10 * rounds
    assert sorted(os.listdir(tmp_path)) == ['sessions']
    [left] = names(tmp_path)
    assert left == f'writer-{taken}.json'
