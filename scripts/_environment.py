"""A cluster that the surroundings describe: TF_CONFIG, Slurm, or a file of hosts, as flags."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers.cluster import spec

_JOBS = ('chief', 'master', 'worker', 'ps', 'evaluator')
_PORT = 2222
_FORM = 'expected {"cluster": {"worker": [...]}, "task": {"type": ..., "index": ...}}'
# Slurm's names for one thing, those of the step first, then those of the job, the older ones last.
_STEP = ('SLURM_STEP_NUM_TASKS', 'SLURM_STEP_ID', 'SLURM_STEPID', 'SLURM_LAUNCH_NODE_IPADDR')  # one of them is there in what srun starts
_TASKS = ('SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS', 'SLURM_NPROCS')
_LAYOUT = ('SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')
_NODES = ('SLURM_STEP_NODELIST', 'SLURM_JOB_NODELIST', 'SLURM_NODELIST')
_NUM_NODES = ('SLURM_STEP_NUM_NODES', 'SLURM_JOB_NUM_NODES', 'SLURM_NNODES')


@dataclasses.dataclass(frozen=True)
class Found:
    """A cluster, and which task of it this process is.

    Attributes:
      source: where it was found, for messages.
      flags: worker_hosts, ps_hosts and master_host.
      job: 'master', 'worker' or 'ps'.
      index: within `worker_hosts` or `ps_hosts`.
    """

    source: str
    flags: Mapping[str, Any]
    job: str
    index: int


def read(environ: Mapping[str, str]) -> Found | None:
    """What the environment says of a cluster; None = nothing.

    Raises:
      ValueError: it says something that can't be right; the message names the key.
    """
    if _has_tf_config(environ):
        return tf_config(environ['TF_CONFIG'])
    nodes = _number(environ, _NUM_NODES)
    if _is_step(environ):
        if _first(environ, _TASKS) is None and nodes > 1:
            raise ValueError(f'The Slurm step has {nodes} nodes, got none of {", ".join(_TASKS)}; give --worker_hosts.')
        return slurm(environ) if _number(environ, _TASKS) > 1 else None
    if nodes > 1:
        raise ValueError(
            f'Slurm gave this job {nodes} nodes, but this process is no task of a step on them; start it with srun '
            '--ntasks-per-node=1 (srun --nodes=1 --ntasks=1 for one of them), or give --worker_hosts.'
        )
    return None


def sources(environ: Mapping[str, str]) -> list[str]:
    """What in an environment speaks of a cluster, right or wrong; `read` takes the first."""
    several = [
        value
        for names in ((_NUM_NODES, _TASKS) if _is_step(environ) else (_NUM_NODES,))
        if (value := _first(environ, names)) not in (None, '1')
    ]
    return [*(['TF_CONFIG'] if _has_tf_config(environ) else []), *(['Slurm'] if several else [])]


def _has_tf_config(environ: Mapping[str, str]) -> bool:
    """Whether there is one that says something; an empty object is what TensorFlow itself takes for none."""
    return ''.join(environ.get('TF_CONFIG', '').split()) not in ('', '{}')


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that srun started."""
    return 'SLURM_PROCID' in environ and any(name in environ for name in _STEP)


def tf_config(text: str) -> Found | None:
    """The cluster of a TF_CONFIG; None where it describes one machine.

    A `chief` or `master` is the first machine, and the process of the training; where there is none the first worker is.

    Raises:
      ValueError: a key is missing or wrong; the message names it.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f'TF_CONFIG is no JSON ({error}); {_FORM}.') from None
    if not isinstance(config, dict):
        raise ValueError(f'TF_CONFIG wants an object, got {json.dumps(config)}; {_FORM}.')
    if config.get('rpc_layer', 'grpc') != 'grpc':
        raise ValueError(f'TF_CONFIG: rpc_layer is {json.dumps(config["rpc_layer"])}, which TensorFlow has no more; leave it out for grpc.')
    cluster, task = _entry(config, 'cluster', dict), _entry(config, 'task', dict)
    for job, hosts in cluster.items():
        if job not in _JOBS:
            raise ValueError(f'TF_CONFIG: cluster.{job} is no job; expected some of {", ".join(_JOBS)}.')
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError(f'TF_CONFIG: cluster.{job} wants a list of "host:port", got {json.dumps(hosts)}.')
        for host in hosts:
            _address(f'cluster.{job}', host)
    first = [*cluster.get('chief', []), *cluster.get('master', [])]
    if len(first) > 1:
        raise ValueError(f'TF_CONFIG: cluster.chief and cluster.master hold {len(first)} tasks; expected one at most.')
    machines = [*first, *cluster.get('worker', [])]
    everyone = [(job, host) for job, hosts in cluster.items() if job != 'evaluator' for host in hosts]
    for place, (job, host) in enumerate(everyone):
        if host in [other for _, other in everyone[:place]]:
            raise ValueError(f'TF_CONFIG: cluster.{job} holds {host!r}, which stands there twice; expected an address for each task.')
    if not machines:
        raise ValueError('TF_CONFIG: cluster.worker holds no task; expected one for each machine with towers.')
    job, index = _entry(task, 'type', str, 'task.'), _entry(task, 'index', int, 'task.')
    if job == 'evaluator':
        raise ValueError('TF_CONFIG: task.type is evaluator; start scripts/evaluate.py --continuous there, which needs no cluster.')
    if not 0 <= index < len(cluster.get(job, [])):
        raise ValueError(f'TF_CONFIG: task is {job} {index}, which cluster.{job} does not hold; expected one of its tasks.')
    if len(machines) == 1 and not cluster.get('ps'):
        return None
    flags = {'worker_hosts': machines, 'ps_hosts': cluster.get('ps', []), 'master_host': machines[0]}
    place = index if job == 'ps' else index + (len(first) if job == 'worker' else 0)
    return Found('TF_CONFIG', flags, 'ps' if job == 'ps' else 'worker' if place else 'master', place)


def slurm(environ: Mapping[str, str]) -> Found:
    """The cluster of a Slurm step with one task on each node; the first is the training.

    Raises:
      ValueError: a node has several tasks, or it is not said which nodes there are.
    """
    count, layout, nodes = _number(environ, _TASKS), _first(environ, _LAYOUT) or '1', _first(environ, _NODES)
    index = _number(environ, ('SLURM_PROCID',))
    if index >= count:
        raise ValueError(f'SLURM_PROCID is {index}, got {count} tasks in the Slurm step; expected a number below; give --worker_hosts.')
    if nodes is None:
        raise ValueError(f'The Slurm step has {count} tasks, got none of {", ".join(_NODES)} that names its nodes; give --worker_hosts.')
    if any(part.partition('(')[0] != '1' for part in layout.split(',')):
        raise ValueError(f'{_LAYOUT[0]} is {layout}; expected one task on each node, which has all its GPUs: --ntasks-per-node=1.')
    os.environ.setdefault(_NODES[0], nodes)  # where the resolver looks
    try:
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            jobs={'worker': count}, port_base=_PORT, gpus_per_node=1, gpus_per_task=1, tasks_per_node=1, auto_set_gpu=False
        )
        hosts = resolver.cluster_spec().as_dict()['worker']
    except RuntimeError:
        raise ValueError(f'The Slurm step has {count} tasks, got other nodes for them: {nodes}; give --worker_hosts.') from None
    except ValueError:
        name = next(name for name in _NODES if environ.get(name))
        raise ValueError(f'{name} wants a list of nodes as node[1-3,7], got {nodes!r}; give --worker_hosts.') from None
    node = environ.get('SLURMD_NODENAME', '')
    if node and hosts[index].rpartition(':')[0] != node:  # the resolver sorts the names, and so does Slurm by default
        raise ValueError(f'Task {index} of the Slurm step is on {node}, the list of nodes has {hosts[index]} there; give --worker_hosts.')
    return Found('Slurm', {'worker_hosts': hosts, 'ps_hosts': [], 'master_host': hosts[0]}, 'worker' if index else 'master', index)


def hosts_file(path: str) -> list[str]:
    """The machines of a file: host or host:port, one a line; # begins a comment.

    Raises:
      ValueError: a line is neither, or there is none.
    """
    try:
        with open(path, encoding='utf-8') as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except OSError as error:
        raise ValueError(f'--hosts_file={path} can not be read ({error.strerror}); expected a file of hosts, one a line.') from None
    hosts = [line if ':' in line else f'{line}:{_PORT}' for line in lines if line]
    if not hosts:
        raise ValueError(f'--hosts_file={path} names no host; expected host or host:port, one a line.')
    return [spec.checked('hosts_file', host) for host in hosts]


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The value of the first name that has one."""
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int:
    """The number of the first name that has one; 1 where none has.

    Raises:
      ValueError: it is no number.
    """
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return 1
    if not (environ[name].isascii() and environ[name].isdigit()):
        raise ValueError(f'{name} wants a whole number, got {environ[name]!r}; start this process with srun, or give --worker_hosts.')
    return int(environ[name])


def _entry(holder: Mapping[str, Any], key: str, kind: type, above: str = '') -> Any:
    if key not in holder:
        keys = ', '.join(map(repr, holder)) or 'no key'
        raise ValueError(f'TF_CONFIG holds no {above}{key}, got {keys}{" in " + above.strip(".") if above else ""}; {_FORM}.')
    value = holder[key]
    if kind is int and isinstance(value, str) and value.isdigit():
        return int(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {dict: 'an object', str: 'a string', int: 'a whole number'}
        raise ValueError(f'TF_CONFIG: {above}{key} wants {names[kind]}, got {json.dumps(value)}.')
    return value


def _address(key: str, host: str) -> None:
    try:
        spec.checked('worker_hosts', host)
    except ValueError:
        raise ValueError(f'TF_CONFIG: {key} holds {host!r}; expected host:port with a port from 1 to 65535.') from None
