"""What evaluators found: `eval/<name>/results.jsonl` and event files, TensorBoard's second run."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import manifest
from towers.config import evaluation as eval_config
from towers.config import stopping as early_stop
from towers.evaluators import picture, scoring
from towers.run import writers

_BESIDE = tuple(name for name in eval_config.NO_METRICS if name not in ('step', 'examples'))  # no part of the result
_SUMMED_OTHERWISE = 1e-5  # relative


class Results(contextlib.AbstractContextManager):
    """What one evaluator has found: `results.jsonl` and the event files of `eval/<name>/`, made at the first result.

    Args:
      model_dir: the run directory.
      name: of the evaluator.
    """

    def __init__(self, model_dir: str, name: str):
        self._name, self.holder = name, f'evaluator {name}'
        self.folder = folder = os.path.join(model_dir, 'eval', name)
        path = os.path.join(folder, 'results.jsonl')
        self._path, self._seen = path, (-1, -1)
        self._known: list[dict[str, Any]] = []
        self._added: list[dict[str, Any]] = []  # here, though the file could not be written
        self._lines = writers.JsonLines(path)
        self._events = writers.EventWriter(folder)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; a later result opens them again."""
        self._events.close()
        self._lines.close()

    def has(self, checkpoint: manifest.Checkpoint) -> bool:
        """Whether this very checkpoint, not an older one of the same step, was evaluated."""
        return self.has_key(checkpoint.step, checkpoint.manifest.time)

    def has_key(self, step: int, saved: float) -> bool:
        """Whether the checkpoint of `step` that was saved at `saved` was evaluated."""
        return any(_key(row) == (step, saved) for row in self._rows())

    def row(self, checkpoint: manifest.Checkpoint) -> dict[str, Any]:
        """The result of a checkpoint; empty where it was not evaluated."""
        found = [row for row in self._rows() if _key(row) == (checkpoint.step, checkpoint.manifest.time)]
        return _shown(found[-1]) if found else {}

    def latest(self) -> dict[str, Any]:
        """The row of the values that are newest; empty where there is none."""
        return max(self._rows(), key=lambda row: row.get('saved', row.get('evaluated', 0.0)), default={})

    def has_step(self, step: int) -> bool:
        """Whether the values of `step` were evaluated, be they saved or not."""
        return any(row.get('step') == step for row in self._rows())

    def go_back(self, step: int) -> None:
        """Says that the training goes on from `step`: what was found of later steps is void."""
        if os.path.exists(self._path):
            self._lines.cut(step)
            self._events.start(step)
        self._added = [row for row in self._added if row['step'] <= step]

    def add(self, found: scoring.Evaluation, *, parts: int = 1) -> None:
        """Logs and writes a result, made in so many parts; one that the file has already, value for value, is not written again."""
        scores = {name: value for name, value in found.values.items() if name not in ('step', 'examples')}
        shown = ', '.join(f'{name} {value:.4f}' for name, value in scores.items() if isinstance(value, float))
        step, where = found.values['step'], {} if found.checkpoint is None else _place(found.checkpoint)
        text = 'Evaluated %s (%s) on %d examples in %.2f s%s: %s.'
        together = f' of the processes that made its {parts} parts, added up' if parts > 1 else ''
        what = where.get('checkpoint', f'step {step}')
        logging.info(text, what, self._name, found.values['examples'], found.seconds, together, shown)
        row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.values.items()}
        row.update(seconds=round(found.seconds, 3), **where or {'evaluated': time.time()})
        if any(_same(row, other) for other in self._rows()):
            logging.info('%s has this result of %s already, so it is not written again.', self._path, what)
            return
        self._added.append(row)
        self._lines.append(row)
        self._events.scalars(step, scores)
        matrices = {name: value for name, value in scores.items() if np.ndim(value) == 2}
        for name, value in matrices.items():
            image = tf.Summary.Value(tag=name, image=picture.of(np.asarray(value)))
            self._events.summary(step, tf.Summary(value=[image]))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the file has these values, as `towers.evaluate` returns them: a full disk may have kept them out."""
        return any(all(name in row and _near(value, row[name]) for name, value in values.items()) for row in _read_rows(self._path))

    def last(self) -> dict[str, Any]:
        """The result of the checkpoint that was saved last; empty where there is none."""
        return _shown(self.latest())

    def _rows(self) -> list[dict[str, Any]]:
        """What the file says now; other processes may add to it."""
        try:
            state = os.stat(self._path)
            seen = state.st_size, state.st_mtime_ns
        except OSError:
            seen = -1, -1
        if seen != self._seen:
            self._known, self._seen = _read_rows(self._path), seen
        return [*self._known, *self._added]


def _place(checkpoint: manifest.Checkpoint) -> dict[str, Any]:
    return {'checkpoint': os.path.basename(checkpoint.prefix), 'saved': checkpoint.manifest.time}


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _BESIDE}


def _read_rows(path: str) -> list[dict[str, Any]]:
    """The whole lines of results.jsonl; what a killed process left of its last line is passed over."""
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            parsed = [_parse(line) for line in file]
    except FileNotFoundError:
        return []
    return [row for row in parsed if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {name: float('nan') if value is None else value for name, value in row.items()} if isinstance(row, dict) else None


def _key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get('step'), row.get('saved')


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows say the same of the same checkpoint, however long it took; other threads may add in another order."""
    if row.keys() != other.keys() or _key(row) != _key(other):
        return False
    return all(_near(value, other[name]) for name, value in row.items() if name != 'seconds')


def _near(value: Any, other: Any) -> bool:
    if isinstance(value, str) or isinstance(other, str):
        return value == other
    return np.shape(value) == np.shape(other) and np.allclose(value, other, rtol=_SUMMED_OTHERWISE, atol=0, equal_nan=True)


def enough(config: config_lib.Config) -> str:
    """Why the run's first evaluator finds that `early_stop` holds, in words; empty where it doesn't."""
    own = eval_config.specs(config.evaluator)
    name = next(iter(own)) if own and not config.evaluate else config.eval_name
    results = Results(str(config.model_dir), name)
    return early_stop.parse(config.early_stop).holds(results._rows()) if config.early_stop else ''
