"""A server all of whose threads wait for ever is found out by its own process, and the run leaves no process behind."""

import itertools
import os
import pathlib
import subprocess
import sys
import threading
import time

import harness
import processes
import pytest
import tensorflow.compat.v1 as tf

from towers.cluster import board, server, spec, worker
from towers.jobs import connecting

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
READS = 24  # more than the server has threads


@pytest.fixture
def block(tmp_path):
    """Gives a function that lets all threads of a server wait for somebody to write; the end of the test frees them."""
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    readers = []

    def read(task, target):
        config = tf.ConfigProto(device_filters=[task.device], operation_timeout_in_ms=180_000)
        config.rpc_options.use_rpc_for_inprocess_master = True
        with tf.Graph().as_default() as graph, tf.device(f'{task.device}/cpu:0'):
            names = [tf.placeholder(tf.string, []) for _ in range(READS)]  # the same name in all would be read once
            reads = [tf.io.read_file(name).op for name in names]
            try:
                tf.Session(target, graph=graph, config=config).run(reads, dict.fromkeys(names, str(pipe)))
            except tf.errors.OpError:
                pass  # the server is gone

    def start(task, target):
        readers.append(threading.Thread(target=read, args=(task, target), daemon=True))
        readers[-1].start()

    yield start
    for reader in readers:
        while reader.is_alive():
            os.close(os.open(pipe, os.O_RDWR))  # whoever waits finds the end of the file
            reader.join(0.1)


@pytest.mark.parametrize(('keeps', 'looks'), [(False, 3), (True, 9)])
def test_a_task_whose_server_does_nothing_finds_it_broken(block, monkeypatch, keeps, looks):
    monkeypatch.setattr(worker, '_READ_SECS', 0.2)
    [host, other] = processes.free_ports(2)
    cluster = spec.of(harness.config(worker_hosts=(host,), master_host=other))
    [task] = cluster.workers
    own, _ = server.start(cluster, task, tf.ConfigProto(inter_op_parallelism_threads=2))
    block(task, own.target)
    with board.Board(task, target=own.target, timeout_secs=1) as note, pytest.raises(tf.errors.OpError):
        for _ in range(1000):
            note.read(board.ORDERS)
            time.sleep(0.01)
    seconds = itertools.count(0, 1000)  # as if the process had been stopped between two looks
    counted = Looks()
    assert worker.watch(task, own.target, counted, keeps=keeps, clock=lambda: next(seconds)) is worker.Ended.BROKEN
    assert counted.count == looks


class Looks(threading.Event):
    """Counts the looks, without a wait."""

    count = 0

    def wait(self, timeout=None):
        self.count += 1
        return False


@pytest.mark.soak
def test_a_worker_whose_server_does_nothing_ends_with_the_run(block, tmp_path):
    machines = processes.Machines(tmp_path / 'machines', 2)
    try:
        with connecting.connected(machines.config(), threading.Event()) as link:
            task = spec.of(machines.config()).workers[1]
            block(task, f'grpc://{task.address}')
            machines.commands[1].wait_for('its own server does not answer')
            link.finish()
        assert [command.wait(60) for command in machines.commands] == [0, 0], machines.commands[1].text()
        assert 'Beginning anew' in machines.commands[1].text() and 'Beginning anew' not in machines.commands[0].text()
    finally:
        machines.close()


LEFT = """
import tensorflow.compat.v1 as tf
from towers.run import remote

server = tf.train.Server.create_local_server()
with tf.Graph().as_default() as graph:
    number = tf.constant(1)
session = remote.RemoteSession(server.target, graph, tf.ConfigProto(), 5.0)
session.run(number)
"""


@pytest.mark.parametrize('last', ['', 'session.close()'], ids=['open', 'closed'])
def test_a_session_that_is_there_when_python_ends_does_not_keep_it(last):
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    assert subprocess.run([sys.executable, '-c', LEFT + last], env=environment, timeout=60).returncode == 0
