"""Evaluations of what a training on this machine serves from its memory (`--serve_snapshots`), in place of checkpoints."""

import os
import threading
import time
from typing import Any

from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import manifest
from towers.directory import holder
from towers.evaluators import evaluation, evaluator
from towers.evaluators import results as results_lib
from towers.live import reader
from towers.run import signals

POLL_SECS = 0.2


def evaluate(model: structs.Model, dataset: structs.Dataset, config: config_lib.Config, *, continuous: bool = False) -> dict[str, Any]:
    """Evaluates the newest variables that a training serves, or one version after another until it ends.

    Results are written as those of checkpoints, with the time (`evaluated`) in place of a checkpoint; a step that was evaluated
    is not evaluated again.

    Args:
      model: as in `towers.evaluate`.
      dataset: as in `towers.evaluate`.
      config: as in `towers.evaluate`; `eval_idle_secs` is how long the training is waited for with `continuous`.
      continuous: goes on with each newest version; those that come and go meanwhile are left out.

    Returns:
      As `towers.evaluate`; empty where no version came.

    Raises:
      ValueError: nothing is served, or the model is another one than the training's.
      KeyboardInterrupt: a signal came.
    """

    def work(stop: threading.Event) -> dict[str, Any]:
        found = follow(model, dataset, config, continuous=continuous, stop=stop)
        if stop.is_set() and (continuous or not found):
            raise KeyboardInterrupt('a signal, after which no evaluation was begun')
        return found

    return signals.run_in_worker(work, grace_secs=config.grace_secs)


def follow(
    model: structs.Model, dataset: structs.Dataset, config: config_lib.Config, *, continuous: bool, stop: threading.Event
) -> dict[str, Any]:
    """As `evaluate`, in this thread; ends when `stop` is set."""
    model_dir = evaluation.run_directory(config)
    found: dict[str, Any] = {}
    before: reader.Version | None = None
    with (
        evaluator.opened(model, dataset, config) as session,
        results_lib.Results(model_dir, config.eval_name) as results,
        reader.Reader(model_dir, session.variables) as source,
    ):
        wait = _Wait(model_dir, config.eval_idle_secs if continuous else None)
        while not stop.is_set():
            version = source.read(after=before)
            if version is not None:
                before = version
                found = _score(session, version, results, stop) or found
                wait.begin()
            if before is not None and (not continuous or not source.is_served()):
                break
            if version is None and not source.is_served() and wait.is_over():
                break
            stop.wait(0 if version else POLL_SECS)
    return found


def _score(
    session: evaluator.Evaluator, version: reader.Version, results: results_lib.Results, stop: threading.Event
) -> dict[str, Any] | None:
    if results.has_step(version.step):
        return results.last()
    made = session.evaluate(version.step, version.values, stop)
    if made is None:
        return None
    results.add(made)
    return dict(made.values)


class _Wait:
    """The time in which nothing is served; a limit of None says that something must be."""

    def __init__(self, model_dir: str, limit_secs: float | None):
        self._model_dir, self._limit_secs, self._is_told = model_dir, limit_secs, False
        self._since = time.monotonic()

    def begin(self) -> None:
        """Counts from now on."""
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Whether nothing will be served any more, or was for too long, which is logged; what is waited for is, too, once."""
        if self._limit_secs is None:
            raise ValueError(f'No training on this machine serves its variables in {self._model_dir}; start it with --serve_snapshots=100.')
        if _is_trained(self._model_dir):
            text = 'The training in %s is over, and serves nothing; without --live its checkpoints are evaluated.'
            logging.warning(text, self._model_dir)
            return True
        if time.monotonic() - self._since >= self._limit_secs:
            text = 'Nothing was served in %s for %g s (--eval_idle_secs); the evaluation ends.'
            logging.warning(text, self._model_dir, self._limit_secs)
            return True
        if not self._is_told:
            text = (
                'Waiting for a training on this machine to serve its variables in %s (--serve_snapshots), %g s at most (--eval_idle_secs).'
            )
            logging.info(text, self._model_dir, self._limit_secs)
        self._is_told = True
        return False


def _is_trained(model_dir: str) -> bool:
    """Whether the newest checkpoint is the run's final one and nobody trains there; of a trainer elsewhere nothing is known."""
    try:
        found = holder.read(os.path.join(model_dir, 'sessions'))
    except OSError:
        return False
    if found is not None and not found.released and (not found.is_here or found.lives_here):
        return False
    newest = manifest.all(model_dir)[-1:]
    return bool(newest) and newest[0].manifest.final
