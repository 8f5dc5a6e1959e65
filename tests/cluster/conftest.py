"""Machines for the tests: processes on this one, started once for a module, and their master in the process of the tests."""

import contextlib
import pathlib
import signal
import socket
import threading

import harness
import pytest
import starter

from towers import connecting

WORKER = pathlib.Path(__file__).resolve().parent.parent.parent / 'scripts' / 'worker.py'


class Machines:
    """Worker processes and how to reach them."""

    def __init__(self, folder, count):
        self._folder = folder
        self._starter = starter.Starter()
        master, *workers = free_ports(1 + count)
        self.flags = {'worker_hosts': tuple(workers), 'master_host': master}
        self.commands = [self.start(index) for index in range(count)]

    def start(self, index, **more):
        """Starts a worker, perhaps again."""
        given = {
            'worker_hosts': ','.join(self.flags['worker_hosts']),
            'master_host': self.flags['master_host'],
            'task_index': index,
            **more,
        }
        folder = self._folder / f'worker-{index}{"-".join(more)}'
        flags = [f'--{name}={value}' for name, value in given.items()]
        return self._starter.start(folder, WORKER, '--device=cpu', '--intra_op_threads=1', '--inter_op_threads=2', *flags)

    def all(self):
        """Starts those again that have ended."""
        self.commands = [self.start(index) if each.code() is not None else each for index, each in enumerate(self.commands)]

    def run(self, folder, *argv):
        """Starts another command, such as a training."""
        return self._starter.start(folder, *argv)

    def config(self, **settings):
        """A configuration of these machines."""
        return harness.config(**{**self.flags, **settings})

    def close(self):
        for command in self.commands:
            command.send(signal.SIGKILL)
        self._starter.close()


def free_ports(count):
    """host:port of so many ports that are free now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(('127.0.0.1', 0))
        return [f'127.0.0.1:{probe.getsockname()[1]}' for probe in probes]


@pytest.fixture(scope='module')
def machines(tmp_path_factory):
    """Three worker processes."""
    made = Machines(tmp_path_factory.mktemp('machines'), 3)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope='module')
def link(machines):
    """The master's link to them, in this process."""
    with connecting.connected(machines.config(), threading.Event()) as made:
        yield made
