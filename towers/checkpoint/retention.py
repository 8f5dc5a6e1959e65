"""Which checkpoints stay: the newest, one for each so many hours, and the best evaluated one.

All of it is computed from what is on disk, so a restart changes nothing.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from towers import config as config_lib
from towers.checkpoint import manifest


def kept(found: Sequence[manifest.Checkpoint], *, config: config_lib.CheckpointConfig, best: int | None = None) -> list[int]:
    """The steps, rising, of the checkpoints to keep.

    Args:
      found: published checkpoints by rising step.
      config: `keep_checkpoints` newest, and the first of every `keep_hours` hours by the clock on the wall.
      best: a step to keep whatever its age.
    """
    steps = {each.step for each in found[-config.keep_checkpoints :]}
    if config.keep_hours:
        first_of: dict[int, int] = {}
        for each in found:
            first_of.setdefault(int(each.manifest.time // (3600 * config.keep_hours)), each.step)
        steps.update(first_of.values())
    return sorted(each.step for each in found if each.step in steps or each.step == best)


def best_step(model_dir: str, metric: str | None, steps: Sequence[int]) -> int | None:
    """The one of `steps` with the highest `metric` in any evaluator's results, or the lowest where it is written `-metric`.

    Returns:
      A step; None where no metric is asked for or no evaluator has reported it yet.
    """
    if not metric:
        return None
    sign = -1.0 if metric.startswith('-') else 1.0
    rows = [row for row in _results(model_dir) if row.get('step') in steps and isinstance(row.get(metric.lstrip('-')), float | int)]
    scored = [(sign * row[metric.lstrip('-')], row['step']) for row in rows]
    return max((pair for pair in scored if pair[0] == pair[0]), default=(0.0, None))[1]


def _results(model_dir: str) -> Iterator[dict]:
    for path in sorted(glob.glob(os.path.join(glob.escape(model_dir), 'eval', '*', 'results.jsonl'))):
        with open(path, encoding='utf-8', errors='replace') as file:
            rows = [_row(line) for line in file]
        yield from (row for row in rows if isinstance(row, dict))


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # a line that is still being written
        return None
