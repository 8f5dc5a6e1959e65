"""Saving: a snapshot between two steps, written by one background thread and published when it is whole.

The snapshot is the variables' own buffers, fetched and not copied: a later update sees that they are held and writes
to a new buffer. So the training stands still for the fetch alone, and the next step pays for one copy of what it changes.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import bundle, manifest

POSITION = 'input_position'
_WRITE_LIMIT_SECS = 3600.0  # a write that takes longer is stuck


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a manifest says beside the values.

    Attributes:
      input_fingerprint: `structs.Input.fingerprint` of the pipeline whose position is saved.
      semantics: what the run is trained under, as JSON values.
    """

    input_fingerprint: str = ''
    semantics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    step: int
    examples: int
    values: Mapping[str, Any]


class Saver:
    """Writes checkpoints of one run directory; makes its operations at once, so none is added later.

    Args:
      variables: name in the checkpoint -> variable; `global_step` is one of them, `examples_seen` may be.
      position: string scalar, the input's position, read between steps; None = not saved.
      config: how many to keep, and whether the caller waits for the disk.
      model_dir: the run directory.
      facts: what the manifests say beside the values.
    """

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        position: tf.Tensor | None,
        *,
        config: config_lib.CheckpointConfig,
        model_dir: str,
        facts: Facts = Facts(),
    ):
        if 'global_step' not in variables or POSITION in variables:
            raise ValueError(
                f"The variables to save must hold 'global_step' and not {POSITION!r}, got {sorted(variables)}; "
                'name them as in TrainStep.saved.'
            )
        self._config = config
        self._model_dir = os.path.abspath(model_dir)
        self._facts = facts
        self._shared = {name: variable.op.type == 'VarHandleOp' for name, variable in variables.items()}
        self._fetches = {name: _read(name, variable) for name, variable in variables.items()}
        if position is not None:
            self._fetches[POSITION] = position
        self._writer = bundle.Writer({name: tensor.dtype for name, tensor in self._fetches.items()})
        self._session: tf.Session | None = None
        self._call: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._published: int | None = None
        self._distrusted: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether a write is under way, which the next `save` would wait for."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def newest(self) -> str | None:
        """Prefix of the newest checkpoint that this saver published; None before the first."""
        return None if self._published is None else manifest.prefix_of(self._model_dir, self._published)

    def prepare(self, session: tf.Session) -> None:
        """Makes the run directory ready and the first save as quick as the others; variables and input must be set.

        Sweeps what a killed writer left, and takes a snapshot that it drops, so an input that can't be saved fails here.
        """
        if self._session is session:
            return
        os.makedirs(self._model_dir, exist_ok=True)
        swept = manifest.sweep(self._model_dir)
        if swept:
            logging.info('Removed what a stopped writer left in %s: %s.', self._model_dir, ', '.join(swept))
        self._call = session.make_callable([self._fetches[name] for name in sorted(self._fetches)])
        self._session = session
        step = self._take().step
        # Checkpoints of later steps are not of this run's past: it started from this one because those were bad.
        self._distrusted = {found.step for found in manifest.all(self._model_dir) if found.step > step}

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
        if not self.wait(_WRITE_LIMIT_SECS):
            raise manifest.CheckpointError(
                f'A checkpoint has been in writing for {_WRITE_LIMIT_SECS:.0f} s in {self._model_dir}; expected it to end. Check the disk.'
            )
        self.prepare(session)
        snapshot = self._take()
        last = last or final
        if self._is_saved(snapshot.step):
            if final:
                self._finish(snapshot.step)
        elif last or self._config.sync_checkpoint:
            self._write(snapshot, final, last)
        else:
            self._thread = threading.Thread(target=self._run, args=(snapshot,), name='checkpoint-writer', daemon=True)
            self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the writer is idle and returns True, or for `timeout` seconds and returns False."""
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
        """Waits for the writer as `wait`, and frees what it holds."""
        idle = self.wait(timeout)
        if idle:
            self._writer.close()
        return idle

    def _take(self) -> _Snapshot:
        values = dict(zip(sorted(self._fetches), self._call(), strict=True))
        for name, shared in self._shared.items():
            if not shared:  # a reference variable is changed in place, whoever holds its buffer
                values[name] = np.array(values[name])
        return _Snapshot(int(values['global_step']), int(values.get('examples_seen', 0)), values)

    def _is_saved(self, step: int) -> bool:
        if step == self._published:
            return True
        return step not in self._distrusted and manifest.check(manifest.prefix_of(self._model_dir, step)) is None

    def _finish(self, step: int) -> None:
        found = manifest.read(manifest.prefix_of(self._model_dir, step))
        if not found.final:
            try:
                manifest.write(self._model_dir, dataclasses.replace(found, final=True))
            except OSError as error:
                raise manifest.CheckpointError(f'The manifest of ckpt-{step} could not be marked as final: {_reason(error)}.') from error

    def _run(self, snapshot: _Snapshot) -> None:
        try:
            self._write(snapshot, False, False)
        except BaseException as error:  # raised again where the training waits for the writer
            self._error = error

    def _write(self, snapshot: _Snapshot, final: bool, last: bool) -> None:
        start = time.monotonic()
        problem = None
        bad = bundle.first_not_finite(snapshot.values)
        if bad is not None:
            problem = f'{bad} is not finite'
        else:
            try:
                self._publish(snapshot, final)
            except (OSError, tf.errors.OpError) as error:
                problem = _reason(error)
                self._discard(snapshot.step)
        if problem is None:
            self._published = snapshot.step
            self._distrusted.discard(snapshot.step)
            logging.info('Saved checkpoint ckpt-%d in %.2f s.', snapshot.step, time.monotonic() - start)
            self._tidy()
        elif last:
            raise manifest.CheckpointError(
                f'The last checkpoint, of step {snapshot.step}, could not be saved in {self._model_dir}: {problem}.'
            )
        else:
            logging.warning('Checkpoint of step %d was not saved: %s. Training goes on; the next save tries again.', snapshot.step, problem)

    def _publish(self, snapshot: _Snapshot, final: bool) -> None:
        manifest.remove(self._model_dir, snapshot.step)
        prefix = manifest.prefix_of(self._model_dir, snapshot.step)
        self._writer.write(prefix + '.tmp', snapshot.values)
        files = {}
        for ending in ('.data-00000-of-00001', '.index'):
            _sync_file(prefix + '.tmp' + ending)
            files[os.path.basename(prefix) + ending] = manifest.measure(prefix + '.tmp' + ending)
        facts = manifest.Manifest(
            step=snapshot.step,
            examples=snapshot.examples,
            files=files,
            final=final,
            input_fingerprint=self._facts.input_fingerprint if POSITION in snapshot.values else '',
            semantics=self._facts.semantics,
        )
        manifest.stage(self._model_dir, facts)
        for ending in ('.data-00000-of-00001', '.index'):
            os.replace(prefix + '.tmp' + ending, prefix + ending)
        manifest.sync_folder(self._model_dir)
        manifest.commit(self._model_dir, snapshot.step)

    def _tidy(self) -> None:
        """Names the kept checkpoints in TensorFlow's state file and removes the others."""
        try:
            found = [each.step for each in manifest.all(self._model_dir) if each.step not in self._distrusted]
            keep = found[-self._config.keep_checkpoints :]
            bundle.write_state_file(self._model_dir, keep)
            for step in found[: -self._config.keep_checkpoints]:
                manifest.remove(self._model_dir, step)
        except OSError as error:
            logging.warning('Old checkpoints in %s were not tidied up: %s.', self._model_dir, _reason(error))

    def _discard(self, step: int) -> None:
        try:
            manifest.remove(self._model_dir, step)
        except OSError as error:
            logging.warning('The parts of checkpoint %d were not removed: %s.', step, _reason(error))


def _read(name: str, variable: tf.Variable) -> tf.Tensor:
    with tf.device(variable.device), tf.name_scope('snapshot/' + name + '/'):
        return variable.read_value()


def _sync_file(path: str) -> None:
    with open(path, 'rb') as file:
        os.fsync(file.fileno())


def _reason(error: OSError | tf.errors.OpError) -> str:
    """The one line of an error that says what happened; TensorFlow's messages also hold stack traces."""
    if isinstance(error, OSError):
        return f'{error.strerror or error} ({error.filename})' if error.filename else str(error)
    lines = [line.strip() for line in error.message.splitlines() if '; ' in line and 'File "' not in line]
    return lines[0] if lines else error.message.splitlines()[0]
