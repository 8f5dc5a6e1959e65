"""Signals are handled at once, though the work is in the middle of something long."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import pytest

from towers.run import signals

SOURCE = pathlib.Path(signals.__file__)
# Loaded by its path, the file needs no TensorFlow, so a process starts at once.
ALONE = f"""
import importlib.util, multiprocessing, os, sys, threading, time
spec = importlib.util.spec_from_file_location('signals', {str(SOURCE)!r})
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)
"""
TERMINATED = (signal.SIGTERM, signal.SIGINT)


def start(script):
    process = subprocess.Popen(
        [sys.executable, '-c', ALONE + textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'ready\n', process.communicate()[1]
    return process


def finish(process, limit=20):
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        process.kill()
    return process.returncode, out, err


def is_alive(pid):
    """Whether a process runs; nobody may have collected a dead one."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except FileNotFoundError:
        return False


def test_the_value_comes_back_and_the_handlers_are_restored():
    before = [signal.getsignal(number) for number in TERMINATED]
    inside = []

    def body(stop):
        inside.append([signal.getsignal(number) for number in TERMINATED])
        return threading.current_thread(), stop.is_set()

    worker, stopped = signals.run_in_worker(body)
    assert worker is not threading.main_thread() and not stopped
    assert inside[0] != before
    assert [signal.getsignal(number) for number in TERMINATED] == before


@pytest.mark.parametrize('error', [ValueError('bad'), SystemExit(2), KeyboardInterrupt()], ids=repr)
def test_an_error_comes_back_with_its_frames(error):
    before = signal.getsignal(signal.SIGTERM)

    def the_failing_line(stop):
        raise error

    with pytest.raises(type(error)) as caught:
        signals.run_in_worker(the_failing_line)
    assert caught.value is error
    assert 'the_failing_line' in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize('number', TERMINATED)
def test_a_first_signal_asks_to_stop(number):
    def body(stop):
        os.kill(os.getpid(), number)
        return stop.wait(10)

    assert signals.run_in_worker(body) is True


def test_a_signal_that_does_not_wake_the_main_thread_is_seen():
    def body(stop):
        time.sleep(0.1)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # the system gives it to this thread
        return stop.wait(10)

    assert signals.run_in_worker(body) is True


def test_in_another_thread_it_calls_the_body_and_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body(stop):
        seen.append((threading.current_thread(), signal.getsignal(signal.SIGTERM), stop.is_set()))

    thread = threading.Thread(target=signals.run_in_worker, args=(body,))
    thread.start()
    thread.join()
    assert seen == [(thread, before, False)]


def test_within_a_body_it_calls_the_inner_body():
    assert signals.run_in_worker(lambda stop: signals.run_in_worker(lambda inner: inner is not stop)) is True


def test_a_second_signal_ends_a_blocked_process_and_its_children_though_closing_hangs():
    process = start("""
        child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(100,))
        def body(stop):
            child.start()
            print('ready', child.pid, sep='\\n', flush=True)
            stop.wait()
            print('asked', flush=True)
            threading.Event().wait()
        signals.run_in_worker(body, close=lambda: time.sleep(100))
    """)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == 'asked\n'
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, limit=5)
    assert code == signals.EXIT_UNSAVED
    assert 'SIGTERM: stopping after the step in flight' in err and 'Second signal (SIGINT)' in err
    assert not is_alive(child)


def test_the_end_of_the_grace_ends_a_blocked_process():
    process = start("""
        def body(stop):
            print('ready', flush=True)
            threading.Event().wait()
        signals.run_in_worker(body, grace_secs=0.2, close=lambda: print('closed'))
    """)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process, limit=5)
    assert (code, out) == (signals.EXIT_UNSAVED, 'closed\n')
    assert 'did not end within 0.2 s' in err


def test_a_body_that_ends_in_time_decides_the_exit():
    process = start("""
        def body(stop):
            print('ready', flush=True)
            stop.wait()
            return 75
        sys.exit(signals.run_in_worker(body))
    """)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 75 and 'Traceback' not in err


def test_a_long_step_is_finished_and_a_blocked_one_is_left():
    """A real session: the first signal lets the operation in flight end, a blocked input needs the second."""
    process = start(f"""
        sys.path.insert(0, {str(SOURCE.parent.parent)!r})
        import tensorflow.compat.v1 as tf
        from towers.run import session as session_lib
        from towers.hooks import stop as stop_hooks
        with tf.Graph().as_default() as graph:
            i = tf.while_loop(lambda i: i < 1500000, lambda i: [i + 1], [tf.constant(0)])
            blocked = tf.FIFOQueue(1, tf.int64, shapes=[[]]).dequeue()
        class Ready(tf.train.SessionRunHook):
            def before_run(self, run_context):
                threading.Timer(0.2, lambda: print('ready', flush=True)).start()
        def body(fetches, stop):
            hooks = [Ready(), stop_hooks.StopWhen(stop)]
            with session_lib.MasterSession(graph, hooks, initialize=lambda raw: None) as running:
                while not running.should_stop():
                    print('value', running.run(fetches), flush=True)
            return running.stopped_by
        print(signals.run_in_worker(lambda stop: body(i, stop)), flush=True)
        signals.run_in_worker(lambda stop: body(blocked, stop))
    """)
    process.send_signal(signal.SIGTERM)
    assert [process.stdout.readline() for _ in range(3)] == ['value 1500000\n', 'signal\n', 'ready\n']
    process.send_signal(signal.SIGTERM)
    while 'stopping after' not in process.stderr.readline():
        pass
    while 'stopping after' not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process, limit=10)
    assert code == signals.EXIT_UNSAVED and out == ''
