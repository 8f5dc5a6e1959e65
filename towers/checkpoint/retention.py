"""Which checkpoints stay: the newest, one for each so many hours, and the best evaluated one.

All of it is computed from what is on disk, so a restart changes nothing.
"""

import functools
import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from absl import logging
from google.protobuf import text_format

from towers import config as config_lib
from towers.checkpoint import files, leases, manifest
from towers.config import evaluation


def tidy(model_dir: str, config: config_lib.CheckpointConfig, found: Sequence[manifest.Checkpoint]) -> None:
    """Names the checkpoints to keep in TensorFlow's own state file, by relative paths, and removes the others that nobody reads.

    Args:
      model_dir: the run directory.
      config: which to keep.
      found: the published checkpoints of this run by rising step, at least one.

    Raises:
      OSError: the storage failed.
    """
    is_pinned = leases.pinned(model_dir)  # before the results: an evaluator gives its lease back after it has written its own
    steps = kept(found, config=config, best=best_step(model_dir, config.keep_best, found))
    names = [f'ckpt-{step}' for step in steps]
    state = tf.train.generate_checkpoint_state_proto(model_dir, names[-1], all_model_checkpoint_paths=names)
    files.write(os.path.join(model_dir, 'checkpoint'), text_format.MessageToString(state).encode())
    for each in found:
        if each.step not in steps and not is_pinned(each.step):
            manifest.remove(model_dir, each.step, unless=functools.partial(_is_wanted, model_dir, config, found, each.step))


def _is_wanted(model_dir: str, config: config_lib.CheckpointConfig, found: Sequence[manifest.Checkpoint], step: int) -> bool:
    """Whether a checkpoint that was to go is being read, or has become the best; asked in the order in which one follows the other."""
    return leases.is_pinned(model_dir, step) or best_step(model_dir, config.keep_best, found) == step


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


class Score(NamedTuple):
    """What a checkpoint scored, by the metric that says which is best.

    Attributes:
      rank: higher is better.
      step: of the checkpoint.
      value: of the metric.
    """

    rank: float
    step: int
    value: float


def best_step(model_dir: str, metric: str | None, found: Sequence[manifest.Checkpoint]) -> int | None:
    """The step of the checkpoint in `found` with the best `metric`, see `best`; None where none is asked for or reported."""
    score = best(model_dir, metric, found)
    return None if score is None else score.step


def best(model_dir: str, metric: str | None, found: Sequence[manifest.Checkpoint] | None = None) -> Score | None:
    """The best `metric` in any evaluator's results.

    A result counts for the checkpoint that was evaluated, not for another one of the same step.

    Args:
      model_dir: the run directory.
      metric: name of the metric, of which `loss` is best where it is lowest and any other where it is highest;
        `name:min` and `name:max` say it.
      found: the published checkpoints that count; None = all that were ever evaluated, be they there or not.

    Returns:
      None where no metric is asked for or no evaluator has reported it yet.
    """
    if not metric:
        return None
    name, _, how = metric.partition(':')
    sign = -1.0 if (how or ('min' if name == 'loss' else 'max')) == 'min' else 1.0
    rows = list(_results(model_dir))
    if rows and not any(name in row for row in rows):
        reported = ', '.join(each for each in rows[-1] if each not in evaluation.NO_METRICS) or 'no metric'
        logging.log_first_n(logging.WARNING, '--keep_best=%s: no evaluator reports %s, got %s.', 1, metric, name, reported)
    if found is not None:
        saved = {each.step: each.manifest.time for each in found}
        rows = [row for row in rows if row.get('step') in saved and row.get('saved', saved[row['step']]) == saved[row['step']]]
    scored = [Score(sign * row[name], row['step'], row[name]) for row in rows if isinstance(row.get(name), float | int) and 'step' in row]
    return max((score for score in scored if score.rank == score.rank), default=None)


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
