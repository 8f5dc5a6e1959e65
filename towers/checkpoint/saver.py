"""Saving: a snapshot between two steps, written by one background thread and published when it is whole."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import files, manifest, position, retention, snapshot

_ENDINGS = ('.data-00000-of-00001', '.index')
_WRITE_LIMIT_SECS = 3600.0  # a write that takes longer hangs


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a saver is told of its run.

    Attributes:
      semantics: what the run is trained under, as JSON values; manifests say it.
      guard: raises where the run directory may not be written any more; called before each change.
    """

    semantics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guard: Callable[[], None] = lambda: None


class _Moment(NamedTuple):
    step: int
    examples: int
    given: Mapping[str, Any]  # values for the snapshot's placeholders by name


class Saver:
    """Writes the checkpoints of one run directory; makes its operations at once, so none is added later.

    Args:
      variables: name in the checkpoint -> variable; `global_step` is one of them, `examples_seen` may be.
      source: the training's input, whose position is saved where it has one.
      config: which checkpoints to keep, and whether the caller waits for the disk.
      model_dir: the run directory.
      facts: what the manifests say beside the values.

    Raises:
      ValueError: there is no `global_step`, or a variable has the position's name.
    """

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        source: structs.Input | None,
        *,
        config: config_lib.CheckpointConfig,
        model_dir: str,
        facts: Facts | None = None,
    ):
        if 'global_step' not in variables or position.POSITION in variables:
            raise ValueError(
                f"The variables to save must hold 'global_step' and not {position.POSITION!r}, got {sorted(variables)}; "
                'name them as in TrainStep.saved.'
            )
        self._config = config
        self._model_dir = os.path.abspath(model_dir)
        self._facts = facts or Facts()
        self._position = position.Asker(source, self._model_dir)
        self._snapshot = snapshot.make(variables, self._position.given)
        with tf.name_scope('checkpoint/'):
            self._now = {name: variables[name].read_value() + 0 for name in ('global_step', 'examples_seen') if name in variables}
        self._now.update(self._position.now)
        self._session: tf.Session | None = None
        self._take: Any = None
        self._write_files: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._published: int | None = None
        self._distrusted: set[int] = set()
        self._spent = 0.0
        self._saving = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a write is under way, which the next `save` would wait for."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def spent(self) -> float:
        """Processor seconds that the last write took, in its own thread."""
        return self._spent

    @property
    def newest(self) -> str | None:
        """Prefix of the newest checkpoint that this saver published; None before the first."""
        return None if self._published is None else manifest.prefix_of(self._model_dir, self._published)

    def prepare(self, session: tf.Session) -> None:
        """Makes the run directory ready, and sweeps what a killed writer left; the variables must be set."""
        if self._session is session:
            return
        self._facts.guard()
        os.makedirs(self._model_dir, exist_ok=True)
        swept = manifest.sweep(self._model_dir)
        if swept:
            logging.info('Removed what a stopped writer left in %s: %s.', self._model_dir, ', '.join(swept))
        step = int(session.run(self._now['global_step']))
        # Checkpoints of later steps are not this run's past: it started from this one because those were bad.
        self._distrusted = {found.step for found in manifest.all(self._model_dir) if found.step > step}
        self._tidy()
        self._take = session.make_callable([self._snapshot.take, self._now], accept_options=True)
        self._position.prepare(session)
        self._write_files = None
        self._session = session

    def save(self, session: tf.Session, *, final: bool = False, last: bool = False) -> None:
        """Takes a snapshot of this moment and hands it to the writer, once for each step.

        A write under way is waited for. Where the storage fails, or a value is not finite, a WARNING says so and the
        next save tries again; the last save raises instead.

        Args:
          session: the training's session, between two runs.
          final: whether the run is done with this step; implies `last`.
          last: whether this is the call's last save, which returns when the checkpoint is published.

        Raises:
          CheckpointError: the last save failed, or a write hangs.
        """
        with self._saving:
            self._save(session, final, last)

    def rescue(self, blocked: Callable[[], bool]) -> bool:
        """Saves the last finished step while the next one waits for its input; for another thread than the training's.

        `blocked` says whether the step still waits, so that it can't have changed anything. Returns whether it is saved: not
        where the step has gone on, or the training saves by itself. Raises as the last `save` does.
        """
        if not self._saving.acquire(blocking=False):
            return False
        try:
            moment = self._moment(blocked=blocked) if self.wait(_WRITE_LIMIT_SECS) else None
            if moment is not None and not self._is_saved(moment.step, False):
                self._write(moment, False, True)
            return moment is not None
        finally:
            self._saving.release()

    def retire(self) -> bool:
        """Ends this saver for good where no save is under way, which it says; a later one waits for ever. For another thread."""
        if not self._saving.acquire(blocking=False):
            return False
        if self.busy:
            self._saving.release()
            return False
        return True

    def _save(self, session: tf.Session, final: bool, last: bool) -> None:
        if not self.wait(_WRITE_LIMIT_SECS):
            raise manifest.CheckpointError(
                f'A checkpoint has been in writing for {_WRITE_LIMIT_SECS:.0f} s in {self._model_dir}; expected it to end. Check the disk.'
            )
        self.prepare(session)
        moment = self._moment()
        assert moment is not None
        if self._is_saved(moment.step, final):
            self._published = moment.step
            if final:
                self._finish(moment.step)
        elif last or final or self._config.sync_checkpoint:
            self._write(moment, final, last or final)
        else:
            self._thread = threading.Thread(target=self._run, args=(moment,), name='checkpoint-writer', daemon=True)
            self._thread.start()

    def _moment(self, blocked: Callable[[], bool] | None = None) -> _Moment | None:
        """Takes a snapshot; None where a step that was to be `blocked` isn't."""
        options = None if blocked is None else tf.RunOptions(inter_op_thread_pool=-1)  # the session's threads may all be blocked
        _, now = self._take(options=options)
        if blocked is not None and not blocked():
            return None
        step = int(now['global_step'])
        given = self._position.values(now, step, blocked=blocked is not None, but=tuple(self._distrusted))
        return _Moment(step, int(now.get('examples_seen', 0)), given)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the writer is idle and returns True, or for `timeout` seconds and returns False.

        Raises:
          Exception: what stopped the writer, other than the storage.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Waits as `wait`, before the session is closed; what stopped the writer is logged and not raised."""
        try:
            return self.wait(timeout)
        except Exception as error:
            logging.warning('The last checkpoint in %s was not written: %r.', self._model_dir, error)
            return True

    def _is_saved(self, step: int, final: bool) -> bool:
        if step == self._published and not final:
            return True
        return step not in self._distrusted and manifest.check(manifest.prefix_of(self._model_dir, step)) is None

    def _finish(self, step: int) -> None:
        """Marks the published checkpoint of `step` as the run's final one."""
        self._facts.guard()
        try:
            found = manifest.read(manifest.prefix_of(self._model_dir, step))
            if not found.final:
                manifest.write(self._model_dir, dataclasses.replace(found, final=True))
        except (OSError, ValueError) as error:
            raise manifest.CheckpointError(f'Checkpoint {step} in {self._model_dir} could not be marked as final: {error}.') from error

    def _run(self, moment: _Moment) -> None:
        try:
            self._write(moment, False, False)
        except BaseException as error:  # raised again where the training waits for the writer
            self._error = error

    def _write(self, moment: _Moment, final: bool, last: bool) -> None:
        start, spent = time.monotonic(), time.thread_time()
        try:
            self._publish(moment, final)
        except (OSError, tf.errors.OpError, snapshot.NotFinite) as error:
            self._facts.guard()
            self._discard(moment.step)
            problem = snapshot.reason(error)
            if last:
                raise manifest.CheckpointError(
                    f'The last checkpoint, of step {moment.step}, was not saved in {self._model_dir}: {problem}.'
                ) from error
            logging.warning(
                'Checkpoint of step %d was not saved: %s. The training goes on and the next save tries again.', moment.step, problem
            )
            return
        self._published = moment.step
        self._distrusted.discard(moment.step)
        logging.info('Saved checkpoint %s in %.2f s.', self.newest, time.monotonic() - start)
        self._tidy()
        self._spent = time.thread_time() - spent

    def _publish(self, moment: _Moment, final: bool) -> None:
        assert self._session is not None
        self._facts.guard()
        manifest.remove(self._model_dir, moment.step)
        prefix = manifest.prefix_of(self._model_dir, moment.step)
        if self._write_files is None:
            self._write_files = self._snapshot.writer(self._session, [*self._position.given.values()])
        self._write_files(prefix + '.tmp', *[moment.given[name] for name in self._position.given])
        written = {}
        for ending in _ENDINGS:
            files.sync_file(prefix + '.tmp' + ending)
            written[os.path.basename(prefix) + ending] = files.measure(prefix + '.tmp' + ending)
        facts = manifest.Manifest(
            step=moment.step,
            examples=moment.examples,
            files=written,
            final=final,
            input_fingerprint=self._position.fingerprint,
            semantics=self._facts.semantics,
        )
        self._facts.guard()
        manifest.publish(self._model_dir, facts)

    def _tidy(self) -> None:
        """Names the checkpoints to keep in TensorFlow's own state file, by relative paths, and removes the others."""
        self._facts.guard()
        found = [each for each in manifest.all(self._model_dir) if each.step not in self._distrusted]
        if not found:
            return
        try:
            retention.tidy(self._model_dir, self._config, found)
        except OSError as error:
            logging.warning('The list of checkpoints in %s was not brought up to date: %s.', self._model_dir, snapshot.reason(error))

    def _discard(self, step: int) -> None:
        try:
            manifest.remove(self._model_dir, step)
        except OSError as error:
            logging.warning('The parts of checkpoint %d in %s were not removed: %s.', step, self._model_dir, snapshot.reason(error))
