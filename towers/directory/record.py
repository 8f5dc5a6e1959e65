"""What a run was asked for and is trained under (`config.json`), and how it ended."""

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import config as config_lib

_FILE = 'config.json'


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    Attributes:
      step: global_step at the end.
      examples: examples trained on, over the whole life of the run.
      loss: the last step's loss; NaN where no step was made.
      steps_run: steps made by this call.
      examples_per_sec: mean rate of this call, 0.0 where no step was made.
      checkpoint: prefix of the newest checkpoint; None where nothing was saved.
      evaluation: name -> value on the evaluation dataset, empty where there is none; of several evaluators the first one's.
      stopped_by: why it ended: 'steps', 'data', 'hook', 'time', 'early_stop' or 'signal'.
      model_dir: the run directory, absolute.
      evaluations: the same of each evaluator, by its name.
    """

    step: int
    examples: int
    loss: float
    steps_run: int
    examples_per_sec: float
    checkpoint: str | None
    evaluation: Mapping[str, float | np.ndarray]
    stopped_by: str
    model_dir: str
    evaluations: Mapping[str, Mapping[str, float | np.ndarray]] = dataclasses.field(default_factory=dict)


def write(model_dir: str, config: config_lib.Config, facts: Mapping[str, Any]) -> str:
    """Writes `config.json` whole or not at all; the newest start of the run wins.

    Returns:
      The run's name for itself, which it keeps from start to start.
    """
    path = os.path.join(model_dir, _FILE)
    run = _run(path)
    versions = {'tensorflow': tf.__version__, 'numpy': np.__version__}
    text = json.dumps({'run': run, 'config': dataclasses.asdict(config), 'semantics': facts, 'versions': versions}, indent=2)
    with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
        file.write(text + '\n')
    os.replace(f'{path}.tmp', path)
    return run


def _run(path: str) -> str:
    """The name that an earlier start gave the run; a new one where there was none."""
    try:
        with open(path, encoding='utf-8') as file:
            found = json.load(file)['run']
    except (OSError, ValueError, LookupError, TypeError):
        found = None
    return found if isinstance(found, str) else uuid.uuid4().hex
