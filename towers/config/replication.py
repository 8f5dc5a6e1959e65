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
