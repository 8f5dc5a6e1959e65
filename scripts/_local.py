"""A cluster of processes on this machine: started, shown, started again, and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from absl import flags

from scripts import _cluster, _flags, _main, _zoo
from towers.cluster import spec

_HOST = '127.0.0.1'
_END_SECS = 10.0
_LOOK_SECS = 0.5
_RESTARTS = 20
_SET_HERE = ('worker_hosts', 'ps_hosts', 'master_host', 'hosts_file', 'job_name', 'task_index')


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before `--` and those behind it."""
    place = argv.index('--') if '--' in argv else len(argv)
    return list(argv[:place]), list(argv[place + 1 :])


class Rehearsal:
    """The processes of a cluster.

    Args:
      values: machines, num_gpus, ps, base_port and restart.
      training: flags of scripts/train.py.

    Raises:
      ValueError, FileNotFoundError: the training would not begin with them.
    """

    def __init__(self, values: flags.FlagValues, training: Sequence[str]) -> None:
        hosts = addresses(1 + values.machines + values.ps, values.base_port)
        master, workers, ps = hosts[0], hosts[1 : 1 + values.machines], hosts[1 + values.machines :]
        common = [f'--worker_hosts={",".join(workers)}', f'--master_host={master}', *([f'--ps_hosts={",".join(ps)}'] if ps else [])]
        common.append('--device=cpu')  # real GPUs can't be had by several processes at once
        self._restart = bool(values.restart)
        self._jobs = {'master': ['train.py', *common, f'--num_gpus={values.num_gpus}', *training]}
        _check(self._jobs['master'], training, values.num_gpus)
        for job, tasks in (('worker', workers), ('ps', ps)):
            own = [f'--num_gpus={values.num_gpus}'] if job == 'worker' else []
            for index in range(len(tasks)):
                self._jobs[f'{job} {index}'] = ['worker.py', *common, *own, f'--job_name={job}', f'--task_index={index}']
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts = 0

    def run(self) -> int:
        """Starts all, and waits for the training; returns its exit code."""
        with self._ended():
            for name in [name for name in self._jobs if name != 'master'] + ['master']:
                self._start(name)
            master = self._running['master']
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda number, frame: _pass_on(master, number, frame))
            while master.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    master.wait(_LOOK_SECS)
                self._look_after()
            if master.returncode == _main.DONE:
                self._let_end()
            return master.returncode

    def _let_end(self) -> None:
        """Gives the servers the time to end by themselves."""
        end = time.monotonic() + _END_SECS
        while time.monotonic() < end and any(child.poll() is None for child in self._running.values()):
            time.sleep(0.1)

    def _look_after(self) -> None:
        """Starts again what was lost; what ended well is not needed any more."""
        for name, child in list(self._running.items()):
            if name == 'master' or child.poll() in (None, _main.DONE) or self._running['master'].poll() is not None:
                continue
            del self._running[name]
            if not self._restart or self._restarts >= _RESTARTS:
                _show(name, f'ended with {child.returncode}.')
                continue
            self._restarts += 1
            _show(name, f'ended with {child.returncode}; started again.')
            self._start(name)

    def _start(self, name: str) -> None:
        folder = os.path.dirname(os.path.abspath(__file__))
        script, *arguments = self._jobs[name]
        # A group of its own, so that a signal from the terminal reaches the training by this process alone.
        child = subprocess.Popen(
            [sys.executable, '-P', os.path.join(folder, '_child.py'), os.path.join(folder, script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.stdout is not None
        self._running[name] = child
        threading.Thread(target=_relay, args=(name, child.stdout), daemon=True).start()

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Leaves no process behind."""
        try:
            yield
        finally:
            for child in self._running.values():
                child.terminate()
            for child in self._running.values():
                try:
                    child.wait(_END_SECS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def _check(command: Sequence[str], training: Sequence[str], num_gpus: int) -> None:
    """Reads the flags of the training as it will, before anything is started; and none may be what the rehearsal sets for each process."""
    values = _cluster.define()
    _flags.parse(values, ['', *training])
    for name in _SET_HERE:
        if values[name].present:
            raise ValueError(
                f'Behind -- expected flags of the training alone, got --{name}, which the rehearsal sets itself; leave it out.'
            )
    for name, wanted in (('num_gpus', num_gpus), ('device', 'cpu')):
        if values[name].present and values[name].value != wanted:
            raise ValueError(f'Behind -- expected --{name}={wanted} as in all processes, got {values[name].value}; leave it out there.')
    values = _flags.define()
    _flags.parse(values, command)
    spec.of(_flags.to_config(values, _zoo.load(values).recipe))


def addresses(count: int, base: int | None = None) -> list[str]:
    """host:port for so many tasks on this machine: from port `base` on, or free ones."""
    if base is not None:
        return [f'{_HOST}:{base + index}' for index in range(count)]
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((_HOST, 0))
        return [f'{_HOST}:{probe.getsockname()[1]}' for probe in probes]


def _pass_on(child: subprocess.Popen[bytes], number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _relay(name: str, stream: IO[bytes]) -> None:
    for line in stream:
        _show(name, line.decode(errors='replace').rstrip())


def _show(name: str, line: str) -> None:
    sys.stdout.write(f'{name:9}| {line}\n')
    sys.stdout.flush()
