"""What a step over two processes costs, which stand in for machines, against the same step of one process with as many towers."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from scripts import _flags, _local, _measure, _zoo
from scripts._bench import running
from towers import config as config_lib
from towers.jobs import connecting, program

_MACHINES, _THREADS = 2, {'intra_op_threads': 1, 'inter_op_threads': 2}
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_END_SECS = 20.0


def measure(values: object, *, rounds: int, steps: int) -> dict[str, str]:
    """Both sides' rates and their ratio, as rows of a table; the steps are those of a training, hooks included.

    Every tower computes on one thread, on either side, so that both have the same cores at work.

    Args:
      values: the flags of a training; `num_gpus` counts the towers of each machine.
      rounds: slices of each side.
      steps: steps in a slice.
    """
    work = _zoo.load(values)
    config = dataclasses.replace(_flags.to_config(values, work.recipe), device='cpu', train_steps=10**9, **_THREADS)
    hosts = _local.addresses(_MACHINES)
    cluster = {'master_host': hosts[0], 'worker_hosts': tuple(hosts)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='towers-benchmark-'))
        stack.enter_context(_workers(cluster, config.num_gpus))
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, 'w'))))  # the progress lines
        alone = dataclasses.replace(config, num_gpus=_MACHINES * config.num_gpus, model_dir=os.path.join(folder, 'alone'))
        both = dataclasses.replace(config, model_dir=os.path.join(folder, 'both'), **cluster)
        link = stack.enter_context(connecting.connected(both, threading.Event()))
        assert link is not None
        made = {
            'two processes': (program.at(link.site(both), work.model, work.dataset, both), both),
            'one process': (program.make(work.model, work.dataset, alone), alone),
        }
        rates = _rates(stack, made, rounds, steps)
        link.finish()
    return _measure.table(rates)


def _rates(
    stack: contextlib.ExitStack, made: dict[str, tuple[program.Program, config_lib.Config]], rounds: int, steps: int
) -> dict[str, list[float]]:
    sides = {name: stack.enter_context(running.opened(*pair))[1] for name, pair in made.items()}
    return _measure.in_turn(sides, rounds=rounds, steps=steps)


@contextlib.contextmanager
def _workers(cluster: dict[str, object], towers: int) -> Iterator[None]:
    """The processes of the machines but the first, which is this one; they end with the run, or with this process at the latest."""
    hosts = cluster['worker_hosts']
    assert isinstance(hosts, tuple)
    flags = [f'--worker_hosts={",".join(hosts)}', f'--master_host={cluster["master_host"]}', '--device=cpu', f'--num_gpus={towers}']
    flags += [f'--{name}={count}' for name, count in _THREADS.items()]
    command = [sys.executable, '-P', os.path.join(_FOLDER, '_child.py'), os.path.join(_FOLDER, 'worker.py'), *flags]
    started = [
        subprocess.Popen([*command, f'--task_index={index}'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for index in range(1, len(hosts))
    ]
    try:
        yield
    finally:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECS)
            process.kill()
            process.wait()
