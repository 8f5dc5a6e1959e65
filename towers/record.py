"""What a run was asked for and what it is trained under, as JSON: `config.json`, and a part of each manifest."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import config as config_lib

_FILE = 'config.json'


def semantics(config: config_lib.Config, *, towers: int, total_steps: int | None) -> dict[str, Any]:
    """The facts that decide what a step means and which numbers it gives.

    Args:
      config: what was asked.
      towers: how many there are; the numbers don't depend on it but for the order of sums.
      total_steps: where the run ends, which cosine and polynomial schedules depend on.
    """
    optimizer = {f.name: getattr(config, f.name) for f in dataclasses.fields(config_lib.OptimizerConfig)}
    return {
        'strategy': config.strategy,
        'towers': towers,
        'global_batch_size': config.examples_per_step(towers),
        'gradients': 'mean over the examples of the global batch',
        'batch_norm': config.batch_norm,
        'input_pipeline': config.input_pipeline,
        'seed': config.seed,
        'total_steps': total_steps,
        **optimizer,
    }


def write(model_dir: str, config: config_lib.Config, meaning: Mapping[str, Any]) -> None:
    """Writes `config.json` whole or not at all; the newest start of the run wins."""
    versions = {'tensorflow': tf.__version__, 'numpy': np.__version__}
    text = json.dumps({'config': dataclasses.asdict(config), 'semantics': meaning, 'versions': versions}, indent=2)
    path = os.path.join(model_dir, _FILE)
    with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
        file.write(text + '\n')
    os.replace(f'{path}.tmp', path)
