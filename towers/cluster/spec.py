"""The tasks of a cluster, from the configuration: the same in every process of the run."""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Sequence

from towers import config as config_lib

_ADDRESS = re.compile(r'(\[[0-9A-Fa-f:.]+\]|[^\s:/,]+):(\d{1,5})')
_LARGEST_PORT = 65535


class ClusterError(RuntimeError):
    """A task of the cluster is not there, or is lost for good; scripts exit with 1."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Attributes:
      job: 'worker', 'ps' or 'master'.
      index: its number within the job.
      address: host:port.
    """

    job: str
    index: int
    address: str

    @property
    def device(self) -> str:
        """The part that its devices' names begin with."""
        return f'/job:{self.job}/task:{self.index}'

    @property
    def host(self) -> str:
        """Its host's name or address, without brackets."""
        return self.address.rpartition(':')[0].strip('[]')

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.address.rpartition(':')[2])

    def __str__(self) -> str:
        name = self.job if self.job == 'master' else f'{self.job} {self.index}'
        return f'{name} at {self.address}'


@dataclasses.dataclass(frozen=True)
class Cluster:
    """All tasks of a run.

    Attributes:
      workers: the machines with towers.
      ps: those that hold the parameters; none = the master does.
      master: whose process makes the steps; one of `workers` where it has towers itself.
      token: what tells this run from others.
    """

    workers: tuple[Task, ...]
    ps: tuple[Task, ...]
    master: Task
    token: str

    @property
    def others(self) -> tuple[Task, ...]:
        """All tasks but the master."""
        return tuple(task for task in (*self.workers, *self.ps) if task != self.master)

    def jobs(self) -> dict[str, list[str]]:
        """The addresses by job, as `tf.train.ClusterSpec` takes them."""
        named = collections.defaultdict(list)
        for task in dict.fromkeys((self.master, *self.workers, *self.ps)):
            named[task.job].append(task.address)
        return dict(named)

    def task(self, job: str, index: int) -> Task:
        """A worker or ps by its number.

        Raises:
          ValueError: there is none with this number.
        """
        tasks = {'worker': self.workers, 'ps': self.ps}[job]
        if not 0 <= index < len(tasks):
            hosts = ','.join(task.address for task in tasks) or 'none'
            wanted = f'0 to {len(tasks) - 1}' if tasks else 'another job'
            raise ValueError(f'--task_index={index} is no {job} of --{job}_hosts={hosts}; expected {wanted}.')
        return tasks[index]


def of(config: config_lib.ClusterConfig) -> Cluster | None:
    """The cluster that the configuration names; None = this machine alone.

    Raises:
      ValueError: an address can't be right, or stands twice.
    """
    if not config.worker_hosts:
        return None
    workers = _tasks('worker', config.worker_hosts)
    ps = _tasks('ps', config.ps_hosts)
    master = _master(config.master_host, workers)
    if config.master_host is None and master.port < 1:
        raise ValueError(f'The master has the port below that of {workers[0]}, which is {master.port}; give --master_host=host:port.')
    counted = collections.Counter(task.address for task in dict.fromkeys((master, *workers, *ps)))
    twice = [address for address, count in counted.items() if count > 1]
    if twice:
        where = f'(here {master.address}' + ('' if config.master_host else ', the port below that of worker 0, as it is not given') + ')'
        raise ValueError(
            f'Each task needs an address of its own, got {", ".join(twice)} twice in --worker_hosts, --ps_hosts and --master_host '
            f'{where}; change one.'
        )
    facts = repr([str(task) for task in (master, *workers, *ps)])
    token = hashlib.sha256((config.run_token or facts).encode()).hexdigest()[:16]
    return Cluster(workers, ps, master, token)


def _tasks(job: str, hosts: Sequence[str]) -> tuple[Task, ...]:
    return tuple(Task(job, index, checked(f'{job}_hosts', host)) for index, host in enumerate(hosts))


def _master(host: str | None, workers: Sequence[Task]) -> Task:
    if host is None:
        first = workers[0]
        return Task('master', 0, f'{first.address.rpartition(":")[0]}:{first.port - 1}')
    address = checked('master_host', host)
    return next((task for task in workers if task.address == address), Task('master', 0, address))


def checked(flag: str, address: str) -> str:
    """The address itself.

    Raises:
      ValueError: it is not host:port.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) <= _LARGEST_PORT:
        raise ValueError(f'--{flag} wants host:port with a port from 1 to {_LARGEST_PORT}, got {address!r}; give e.g. --{flag}=node1:2222.')
    return address
