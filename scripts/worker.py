"""Serves one machine of a cluster: python scripts/worker.py --worker_hosts=a:2222,b:2222 --task_index=1.

Start it on each machine, and the training with the same hosts: python scripts/train.py --worker_hosts=a:2222,b:2222.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _cluster, _flags, _main


def main(values: flags.FlagValues) -> int:
    """Serves until the run is over."""
    config, task = _cluster.found(values, _flags.to_config(values))
    job, index = (values.job_name, values.task_index) if task is None else (task.job, task.index)
    if index is None:
        raise ValueError('--task_index is needed, got none; give the place of this machine in --worker_hosts, from 0 on.')
    if job == 'master':
        raise ValueError(f'This is the master, as {task.source} says; start scripts/train.py here.')
    return _cluster.serve(_cluster.offering(values, config), job, index)


if __name__ == '__main__':
    _main.run(main, _cluster.define(), __doc__)
