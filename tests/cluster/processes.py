"""Processes of this machine that stand in for machines of a cluster."""

import contextlib
import pathlib
import signal
import socket

import harness
import starter

WORKER = pathlib.Path(__file__).resolve().parent.parent.parent / 'scripts' / 'worker.py'


class Machines:
    """Worker processes, perhaps others that can hold the parameters, and how to reach them.

    Args:
      folder: for what they write.
      count: workers.
      ps: tasks for parameters.
    """

    def __init__(self, folder, count, *, ps=0):
        self._folder = folder
        self._starter = starter.Starter()
        hosts = free_ports(1 + count + ps)
        self.flags = {'worker_hosts': tuple(hosts[1 : 1 + count]), 'ps_hosts': tuple(hosts[1 + count :]), 'master_host': hosts[0]}
        self._tasks = [*[('worker', index) for index in range(count)], *[('ps', index) for index in range(ps)]]
        self.commands = [self.start(place) for place in range(len(self._tasks))]

    def start(self, place):
        """Starts a task, perhaps again."""
        job, index = self._tasks[place]
        given = {name: ','.join(value) if isinstance(value, tuple) else value for name, value in self.flags.items()}
        flags = [f'--{name}={value}' for name, value in {**given, 'job_name': job, 'task_index': index}.items()]
        threads = [f'--{name}={value}' for name, value in harness.THREADS.items()]
        return self._starter.start(self._folder / f'{job}-{index}', WORKER, '--device=cpu', *threads, *flags)

    def all(self):
        """Starts those again that have ended."""
        self.commands = [self.start(place) if each.code() is not None else each for place, each in enumerate(self.commands)]

    def run(self, folder, *argv):
        """Starts another command, such as a training."""
        return self._starter.start(folder, *argv)

    def config(self, **settings):
        """A configuration of these machines, with the parameters on the master."""
        return harness.config(**{**self.flags, 'ps_hosts': (), **settings})

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
