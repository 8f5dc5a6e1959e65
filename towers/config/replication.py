"""The section of the configuration about what the towers share."""

import dataclasses
from typing import Literal

from towers.config import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig(options.Section):
    """Replication: how the towers share variables, gradients and statistics."""

    strategy: Literal['parameter_server', 'balanced', 'mirrored', 'collective'] = options.option(
        'parameter_server',
        'parameter_server: variables on the CPU, read by all towers; balanced: each on one of the towers, by bytes; mirrored: a '
        'copy on each tower; collective: copies whose gradients the towers add among themselves (NCCL between GPUs)',
    )
    batch_norm: Literal['mean', 'first'] = options.option('mean', "moving statistics: mean of the towers' by examples, or tower 0's")


def check_cluster(strategy: str, *, machines: int, ps: int) -> None:
    """Makes sure that a strategy fits the cluster.

    Raises:
      ValueError: it does not.
    """
    options.require(
        strategy != 'collective' or not machines,
        f'--strategy=collective is for the towers of one machine, got a cluster of {machines} machines; '
        'use parameter_server, balanced or mirrored.',
    )
    options.require(
        strategy == 'parameter_server' or not ps,
        f'--ps_hosts hold the variables of --strategy=parameter_server, got --strategy={strategy}; leave one of the two out.',
    )
