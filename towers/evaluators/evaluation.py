"""`towers.evaluate`: evaluators that follow the checkpoints a training shares.

They read the run directory and write only under `eval/<name>/`: event files, and `results.jsonl` with one flat object for
each evaluated checkpoint. Every example counts exactly once, whatever the batch size and the number of towers.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import leases, manifest, restore
from towers.directory import holder
from towers.evaluators import evaluator, parts, queue
from towers.evaluators import results as results_lib
from towers.run import signals
from towers.sessions import ledger, membership

POLL_SECS = 0.5


def evaluate(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    checkpoint: str | int | None = None,
    continuous: bool = False,
) -> dict[str, Any]:
    """Evaluates a checkpoint of `config.model_dir`, or each new one.

    Args:
      model: `model(batch, *, training) -> ModelOutput`, as it was trained.
      dataset: zero-argument function that returns a tf.data.Dataset of single examples, which ends.
      config: `model_dir`, `eval_*` and threads are used.
      checkpoint: step or prefix of the one to evaluate; None = the newest whole one.
      continuous: goes on with each new checkpoint until the run's final one is done, or none came for `eval_idle_secs`.

    Returns:
      Of the last evaluated checkpoint: step, examples, loss where the model has one, and each metric by its name; empty
      where `continuous` found no checkpoint at all.

    Raises:
      ValueError: there is no such checkpoint, or model, dataset and configuration don't fit together.
      CheckpointError: there are checkpoints and none is whole.
      RuntimeError: the examples evaluated are not those of the dataset.
      Stalled: a batch took longer than it may; where it can't be ended the process ends, with exit code 1.
      KeyboardInterrupt: a signal came; what was evaluated before it is in `results.jsonl`.
    """
    if continuous and checkpoint is not None:
        raise ValueError(f'--continuous takes each new checkpoint, got --checkpoint={checkpoint} too; give one of the two.')

    def work(stop: threading.Event) -> tuple[dict[str, Any], bool]:
        if continuous:
            found = follow(model, dataset, config, stop=stop)
        else:
            found = once(model, dataset, config, checkpoint=checkpoint, stop=stop)
        return found, stop.is_set()

    found, stopped = signals.run_in_worker(work, grace_secs=config.grace_secs)
    if stopped and (continuous or not found):
        raise KeyboardInterrupt('a signal, after which no evaluation was begun')
    return found


def once(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    checkpoint: str | int | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """As `evaluate` of one checkpoint, in this thread; ends early with an empty result when `stop` is set."""
    stop = stop or threading.Event()
    if stop.is_set():
        return {}
    model_dir = run_directory(config)
    results = results_lib.Results(model_dir, config.eval_name)
    reader = manifest.Reader(model_dir)
    given = _newest(model_dir, reader) if checkpoint is None else find(model_dir, checkpoint)
    with evaluator.opened(model, dataset, config) as session, results, leases.Lease(model_dir, results.holder) as lease:
        if checkpoint is None:
            given = _load_newest(session, model_dir, reader) or given
        else:
            session.load(given)
        lease.narrow(given.step)
        return _score(session, given, results, stop)


def follow(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    stop: threading.Event | None = None,
    done: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Evaluates new checkpoints as `config.eval_cadence` says, with one graph and session for all; the final one always.

    A checkpoint that `results.jsonl` already has is not evaluated again; one that was removed meanwhile is logged.

    Args:
      model: as in `evaluate`.
      dataset: as in `evaluate`.
      config: as in `evaluate`.
      stop: ends the evaluation after the batch in flight when set.
      done: says that no other checkpoint will follow, so that it ends with the newest one; None = it ends with the run's
        final one, or when no new one came for `config.eval_idle_secs`.

    Returns:
      As `evaluate`.
    """
    stop = stop or threading.Event()
    model_dir = run_directory(config)
    results = results_lib.Results(model_dir, config.eval_name)
    waiting = queue.Queue(model_dir, results, config.eval_cadence)
    with evaluator.opened(model, dataset, config) as session, results, waiting:
        idle = _Idle(model_dir, config.eval_idle_secs)
        while not stop.is_set():
            over = done is not None and done()  # asked before looking, so that nothing comes in between
            is_new = not waiting.is_empty(over=over)
            if is_new and not (session.parts == 1 and _is_second(model_dir, config.eval_name)):
                _evaluate_next(session, waiting, over, results, stop)
                idle.begin()
            elif (over and not is_new) or (done is None and (waiting.is_done() or idle.is_over())):
                break
            else:
                stop.wait(POLL_SECS)
    return results.last()


def _is_second(model_dir: str, name: str) -> bool:
    """Whether another evaluator of this name is at work that began before this one, which would do its work again."""
    seen = ledger.read(os.path.join(model_dir, membership.FOLDER))
    working = [each for each in seen if each.lives and each.silent_secs < ledger.SILENT_SECS and not each.entry.is_coming]
    same = [each.entry for each in working if (each.entry.role, each.entry.name) == ('evaluator', name)]
    mine = [(each.since, each.token) for each in same if each.is_own]
    first = min((each for each in same if not each.is_own), key=lambda each: (each.since, each.token), default=None)
    if first is None or not mine or (first.since, first.token) > mine[0]:
        return False
    logging.log_first_n(
        logging.WARNING,
        'An evaluator %s is at work already (process %d on %s); this one waits, in case it ends. Give this one another --eval_name, or '
        'both --eval_parts=2, so that they share the work.',
        1, name, first.pid, first.host,
    )  # fmt: skip
    return True


def run_directory(config: config_lib.Config) -> str:
    """The absolute path of `config.model_dir`; a ValueError where none is given."""
    if not config.model_dir:
        raise ValueError('An evaluation reads the checkpoints of a run directory, got none; give --model_dir.')
    return os.path.abspath(config.model_dir)


def find(model_dir: str, checkpoint: str | int) -> manifest.Checkpoint:
    """The checkpoint that a user names: by step, by its name in `model_dir`, or by a path with or without an ending.

    One without a manifest, as other programs write them, is taken too.

    Raises:
      ValueError: there is none, or it is not whole.
    """
    text = re.sub(r'\.(index|json|data-\d+-of-\d+)$', '', str(checkpoint))
    if text.isdecimal():
        prefix = manifest.prefix_of(model_dir, int(text))
    else:
        prefix = os.path.abspath(text if os.sep in text else os.path.join(model_dir, text))
    problem = manifest.check(prefix)
    if problem is None:
        about = manifest.read(prefix)
        return manifest.Checkpoint(about.step, prefix, about)
    if os.path.exists(prefix + '.index') and not os.path.exists(prefix + '.json'):
        return _foreign(prefix)
    others = ', '.join(str(each.step) for each in manifest.all(model_dir)) or 'none'
    raise ValueError(f'--checkpoint={checkpoint} is not whole: {problem}. Give one of those in {model_dir}, of steps {others}.')


def _newest(model_dir: str, reader: manifest.Reader) -> manifest.Checkpoint:
    found = reader.newest()
    if found is None:
        raise ValueError(f'There is no checkpoint in {model_dir}; train first, or give the --model_dir of a run.')
    return found


def _load_newest(session: evaluator.Evaluator, model_dir: str, reader: manifest.Reader) -> manifest.Checkpoint | None:
    loaded = restore.retrying(model_dir, session.load, reader=reader)
    return loaded and loaded[0]


def _evaluate_next(
    session: evaluator.Evaluator, waiting: queue.Queue, over: bool, results: results_lib.Results, stop: threading.Event
) -> None:
    """Evaluates the next checkpoint, which stays until that is written; without a lease it may be removed before it is loaded."""
    with waiting.taken(over=over) as new:
        if new is None:
            return
        try:
            session.load(new)
        except restore.UNREADABLE as error:
            if manifest.check(new.prefix) is None:
                raise
            logging.warning('Passed over the checkpoint of step %d: removed while it was read (%s).', new.step, type(error).__name__)
            return
        _score(session, new, results, stop)


def _score(
    session: evaluator.Evaluator, loaded: manifest.Checkpoint, results: results_lib.Results, stop: threading.Event
) -> dict[str, Any]:
    if session.parts > 1:
        return parts.Parts(session, loaded, results).score(stop)
    found = session.run(loaded, stop)
    if found is None:
        return {}
    results.add(found)
    return dict(found.values)


class _Idle:
    """The time without a new checkpoint in which no trainer is at work."""

    def __init__(self, model_dir: str, limit_secs: float):
        self._model_dir, self._limit_secs = model_dir, limit_secs
        self._beat = 0.0
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Whether the limit is reached, which is logged then."""
        if self._is_trained():
            self.begin()
        over = time.monotonic() - self._since >= self._limit_secs
        if over:
            text = 'No new checkpoint came in %s for %g s (--eval_idle_secs), and nobody trains there; the evaluation ends.'
            logging.warning(text, self._model_dir, self._limit_secs)
        return over

    def _is_trained(self) -> bool:
        """Whether a trainer is at work here, or one on another machine has given a sign of life since the last look."""
        folder = os.path.join(self._model_dir, 'sessions')
        try:
            found = holder.read(folder)
            if found is None or found.released:
                return False
            before, self._beat = self._beat, holder.changed(holder.path_of(folder, found.generation))
        except OSError:
            return False
        return found.lives_here if found.is_here else self._beat != before


def _foreign(prefix: str) -> manifest.Checkpoint:
    """A checkpoint without a manifest; its own step, where it has one."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        step = int(reader.get_tensor('global_step')) if reader.has_tensor('global_step') else 0
    except (tf.errors.OpError, ValueError, IndexError, OSError) as error:
        raise ValueError(f'--checkpoint={prefix} is not readable ({error}); give another one.') from error
    about = manifest.Manifest(step=step, examples=0, files={}, time=os.path.getmtime(prefix + '.index'))
    return manifest.Checkpoint(step, prefix, about)
