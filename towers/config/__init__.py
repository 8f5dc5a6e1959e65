"""The configuration: one frozen dataclass for each section, and `Config`, which is all of them."""

from towers.config.devices import GPUS_ALONE
from towers.config.whole import (
    ONLY_FOR,
    SECTIONS,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DeviceConfig,
    EvalConfig,
    InputConfig,
    OptimizerConfig,
    ReportConfig,
    RunConfig,
    Section,
    StrategyConfig,
    evaluation_devices,
    require,
    shown,
)

__all__ = [
    'GPUS_ALONE',
    'ONLY_FOR',
    'SECTIONS',
    'CheckpointConfig',
    'ClusterConfig',
    'Config',
    'DeviceConfig',
    'EvalConfig',
    'InputConfig',
    'OptimizerConfig',
    'ReportConfig',
    'RunConfig',
    'Section',
    'StrategyConfig',
    'evaluation_devices',
    'require',
    'shown',
]
