"""What a worker or parameter task of a cluster does: its server, until the run is over."""

import threading

from absl import logging

from towers import config as config_lib
from towers.cluster import spec, worker
from towers.jobs import connecting, joining

Ended = worker.Ended


def serve(config: config_lib.Config, job: str, index: int, stop: threading.Event) -> worker.Ended:
    """Serves one task of the cluster.

    Args:
      config: the same hosts as for the training, and the devices of this machine.
      job: 'worker' or 'ps'.
      index: which of them.
      stop: ends it when set.

    Returns:
      Why it ended. Its server can't be stopped: the process has to end, or to begin anew where the master was lost.

    Raises:
      ValueError: there is no such task, its port is taken, or it does not fit beside other sessions of this machine (Refused).
    """
    cluster = spec.of(config)
    if cluster is None:
        raise ValueError('A worker needs --worker_hosts, got none; give the same as for the training.')
    task = cluster.task(job, index)
    if task == cluster.master:
        raise ValueError(f'{task} is the master itself (--master_host={task.address}); start the training there, and no worker.')
    role = joining.Role('worker', which=f'{job}:{index}', model_dir=config.model_dir, remote=task not in cluster.workers)
    with joining.joined(config, role) as (config, _):
        server, card = connecting.started(config, cluster, task)
        logging.info('%s: ready, with %d GPUs and %d CPU devices.', task, card['gpus'], card['cpus'])
        ended = worker.watch(task, server.target, stop, keeps=job == 'ps')
    logging.info('%s: %s.', task, ended.value)
    return ended
