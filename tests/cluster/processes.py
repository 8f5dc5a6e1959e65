"""Processes of this machine that stand in for machines of a cluster."""

import contextlib
import json
import pathlib
import re
import signal
import socket

import harness
import numpy as np
import starter
import tensorflow.compat.v1 as tf

from towers.checkpoint import manifest

STEPS, STEP_TIMEOUT_SECS = 60, 2.0
LOGGED = pathlib.Path(__file__).resolve().parent.parent / 'faults' / 'logged_training.py'
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


class Training:
    """A training over the machines, in a folder of its own."""

    def __init__(self, machines, folder, program=LOGGED):
        self._machines, self.folder, self._program = machines, folder, program
        self.command, self._said = None, ''
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *, steps=STEPS, **settings):
        limits = {
            'step_timeout_secs': STEP_TIMEOUT_SECS,
            'connect_timeout_secs': 60,
            'worker_grace_secs': 60,
            'save_steps': 10,
            'summary_steps': 20,
        }
        self._machines.all()
        self._said = self.text()
        given = json.dumps({**self._machines.flags, **limits, **settings})
        self.command = self._machines.run(self.folder, self._program, 2, steps, given)
        return self.command

    def close(self):
        """Ends it; where it has ended well every server has to end by itself."""
        if self.command is not None and self.command.code() == 0:
            # A server may answer nothing for a while (BUILD_NOTES, TensorFlow's notes), and then begins anew.
            assert {command.wait() for command in self._machines.commands} == {0}
        elif self.command is not None:
            self.command.send(signal.SIGKILL)

    def text(self):
        """What all its starts have written so far."""
        return self._said + (self.command.text() if self.command else '')

    def rows(self, name='ids.jsonl', value='ids'):
        """Step -> value of a log, later lines winning."""
        path = self.folder / name
        return {line['step']: line[value] for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}

    def logs(self):
        """The examples and the losses by step."""
        return self.rows(), self.rows('run/metrics.jsonl', 'loss')

    def final(self):
        """All numbers in the newest checkpoint by name."""
        return values_of(manifest.newest(str(self.folder / 'run')).prefix)

    def kill(self):
        """Kills the master, and waits until it is dead."""
        assert self.command.send(signal.SIGKILL)
        assert self.command.wait() == -signal.SIGKILL

    def wait_for_step(self, step):
        starter.wait_for(lambda: max(self.rows(), default=0) >= step or self.command.code() is not None)
        assert self.command.code() is None, self.command.text()


def leave_out_and_take_in(machines, training):
    """Kills a worker, starts it again when the run has gone on without it, and waits for the run, which takes it in again, to end."""
    machines.commands[1].send(signal.SIGKILL)
    training.command.wait_for('Going on with 2 machines')
    machines.commands[1] = machines.start(1)
    training.command.wait_for('Back in the run: worker 1 at')
    assert training.command.wait() == 0, training.command.text()


def check_same(training, whole):
    """Every example once, in the same steps, with the same losses, and variables that end the same."""
    assert training.command.wait() == 0, training.text()
    assert sorted(whole.rows()) == list(range(1, STEPS + 1))
    (ids, losses), (wanted_ids, wanted_losses) = training.logs(), whole.logs()
    assert losses.keys() == wanted_losses.keys()
    check_rows(losses, wanted_losses, training)
    check_rows(ids, wanted_ids, training)
    wanted = whole.final()
    for name, value in training.final().items():
        np.testing.assert_allclose(value, wanted[name], rtol=harness.FP32_SUM, atol=harness.FP32_SUM, err_msg=name)


def check_rows(found, wanted, training):
    """The same by step; where variables were gone on with, the step may be missing in a log of a hook that wasn't told of it."""
    unsaid = set(map(int, re.findall(r'(?:going on with them|are whole) at step (\d+)', training.text())))
    assert found.keys() <= wanted.keys() and wanted.keys() - found.keys() <= unsaid
    for step, value in found.items():
        np.testing.assert_allclose(value, wanted[step], rtol=harness.FP32_SUM, atol=harness.FP32_SUM, err_msg=f'step {step}')


def values_of(prefix):
    """The numbers in a checkpoint by name."""
    reader = tf.train.load_checkpoint(prefix)
    return {name: reader.get_tensor(name) for name, dtype in reader.get_variable_to_dtype_map().items() if dtype != tf.string}


def free_ports(count):
    """host:port of so many ports that are free now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(('127.0.0.1', 0))
        return [f'127.0.0.1:{probe.getsockname()[1]}' for probe in probes]
