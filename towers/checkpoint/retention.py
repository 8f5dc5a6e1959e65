"""Which checkpoints stay: the newest, one for each so many hours, and the best evaluated one.

All of it is computed from what is on disk, so a restart changes nothing.
"""

import functools
import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging
from google.protobuf import text_format

from towers import config as config_lib
from towers.checkpoint import files, leases, manifest


def tidy(model_dir: str, config: config_lib.CheckpointConfig, found: Sequence[manifest.Checkpoint]) -> None:
    """Names the checkpoints to keep in TensorFlow's own state file, by relative paths, and removes the others that nobody reads.

    Args:
      model_dir: the run directory.
      config: which to keep.
      found: the published checkpoints of this run by rising step, at least one.

    Raises:
      OSError: the storage failed.
    """
    steps = kept(found, config=config, best=best_step(model_dir, config.keep_best, found))
    names = [f'ckpt-{step}' for step in steps]
    state = tf.train.generate_checkpoint_state_proto(model_dir, names[-1], all_model_checkpoint_paths=names)
    files.write(os.path.join(model_dir, 'checkpoint'), text_format.MessageToString(state).encode())
    is_pinned = leases.pinned(model_dir)
    for each in found:
        if each.step not in steps and not is_pinned(each.step):
            manifest.remove(model_dir, each.step, unless=functools.partial(leases.is_pinned, model_dir, each.step))


def is_named(model_dir: str) -> bool:
    """Whether TensorFlow's own file names a checkpoint; other tools go by it, Towers goes by manifests."""
    try:
        state = tf.train.get_checkpoint_state(model_dir)
    except (OSError, ValueError, tf.errors.OpError):
        return False
    return state is not None and bool(state.model_checkpoint_path)


def settle(model_dir: str, config: config_lib.CheckpointConfig) -> None:
    """Removes what a reader still had when the run was done; nothing where it isn't."""
    published = manifest.all(model_dir)
    last = max((each.step for each in published if each.manifest.final), default=-1)
    found = [each for each in published if each.step <= last]
    try:
        if found:
            tidy(model_dir, config, found)
    except OSError as error:
        logging.warning('What an evaluator still read was not removed from %s (%s).', model_dir, error)


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


def best_step(model_dir: str, metric: str | None, found: Sequence[manifest.Checkpoint]) -> int | None:
    """The step of the checkpoint with the best `metric` in any evaluator's results.

    A result counts for the checkpoint that was evaluated, not for another one of the same step.

    Args:
      model_dir: the run directory.
      metric: name of the metric, of which `loss` is best where it is lowest and any other where it is highest;
        `name:min` and `name:max` say it.
      found: published checkpoints.

    Returns:
      A step; None where no metric is asked for or no evaluator has reported it yet.
    """
    if not metric:
        return None
    name, _, how = metric.partition(':')
    sign = -1.0 if (how or ('min' if name == 'loss' else 'max')) == 'min' else 1.0
    saved = {each.step: each.manifest.time for each in found}
    rows = list(_results(model_dir))
    if rows and not any(name in row for row in rows):
        logging.log_first_n(logging.WARNING, '--keep_best=%s: no evaluator reports %s, got %s.', 1, metric, name, ', '.join(rows[-1]))
    mine = [row for row in rows if row.get('step') in saved and row.get('saved', saved[row['step']]) == saved[row['step']]]
    scored = [(sign * row[name], row['step']) for row in mine if isinstance(row.get(name), float | int)]
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
