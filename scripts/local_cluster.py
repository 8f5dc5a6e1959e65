"""Rehearses a cluster on this machine: python scripts/local_cluster.py --machines=3 --num_gpus=2 -- --train_steps=400.

What stands behind `--` are flags of scripts/train.py. The machines are processes on this one, which talk over its loopback.
"""

import functools
import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _flags, _local, _main


def define() -> flags.FlagValues:
    """The flags of the rehearsal."""
    values = flags.FlagValues()
    _flags.add(
        values,
        'Rehearsal: how many processes stand in for machines.',
        _flags.Option('machines', 2, 'workers, each a process with towers', kind=int),
        _flags.Option('num_gpus', 2, 'towers on each, on CPU devices in place of GPUs', kind=int),
        _flags.Option('ps', 0, 'processes that hold the parameters, in place of the master', kind=int),
        _flags.Option('base_port', None, 'the first of the ports to use; free ones if not given', kind=int),
        _flags.Option('restart', True, 'start a worker again that ends before the training', kind=bool),
    )
    return values


def main(values: flags.FlagValues, *, training: list[str]) -> int:
    """Starts the processes, shows what they say, and ends with the training's exit code."""
    if values.machines < 1 or values.num_gpus < 1 or values.ps < 0:
        raise ValueError(f'--machines and --num_gpus want at least 1, --ps 0, got {values.machines}, {values.num_gpus}, {values.ps}.')
    return _local.Rehearsal(values, training).run()


if __name__ == '__main__':
    sys.argv[:], rest = _local.split(sys.argv)
    _main.run(functools.partial(main, training=rest), define(), __doc__)
