"""The section of the configuration about several machines."""

import dataclasses

from towers.config import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig(options.Section):
    """Cluster: several machines, each with --num_gpus towers; give every task the same."""

    worker_hosts: tuple[str, ...] = options.option((), 'host:port of each machine with towers; none = this machine alone')
    ps_hosts: tuple[str, ...] = options.option((), 'host:port of tasks that hold the parameters, spread by bytes; the master if not given')
    master_host: str | None = options.option(
        None,
        'host:port of the training itself, which may be one of worker_hosts, whose towers then run in it; on the host of the first '
        'worker, one port below, if not given',
    )
    run_token: str | None = options.option(
        None, 'a word that all tasks of a run share and no other run has; made from the hosts if not given'
    )
    connect_timeout_secs: float = options.option(60.0, 'seconds in which every task must answer at the start')
    worker_grace_secs: float = options.option(300.0, 'seconds in which a lost task may come back; then the run goes on without, or fails')
    min_workers: int | None = options.option(None, 'go on with so many machines, though others do not come back; all if not given')
    max_recoveries: int = options.option(10, 'recoveries in a row, without a step further than before, after which the run fails')

    def __post_init__(self) -> None:
        options.at_least(self, 0, 'connect_timeout_secs', 'worker_grace_secs', 'max_recoveries')
        options.at_least(self, 1, 'min_workers')
        for name in ('ps_hosts', 'master_host'):
            options.require(
                bool(self.worker_hosts) or not getattr(self, name),
                f'--{name} needs --worker_hosts, got none; give the machines with towers too.',
            )
        options.require(
            self.min_workers is None or self.min_workers <= len(self.worker_hosts),
            f'--min_workers={self.min_workers} is more than the {len(self.worker_hosts)} of --worker_hosts; give fewer.',
        )
