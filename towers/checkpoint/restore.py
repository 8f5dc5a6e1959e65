"""Restoring: a run's own checkpoint into its variables and input."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf
from absl import logging

from towers import errors, structs
from towers.checkpoint import manifest, position

T = TypeVar('T')
_MOST_BYTES = 2**30  # a message to a server, by which the master of a cluster gets its values, ends at twice as many
# What TensorFlow's reader raises on a file that is gone, cut or changed; some of it has no own class.
UNREADABLE = (tf.errors.OpError, ValueError, IndexError, OSError, manifest.CheckpointError)


class Restorer:
    """Sets variables and the input from a checkpoint; makes its operations at once, so none is added later.

    Args:
      variables: name in the checkpoint -> canonical variable.
      input: the training's input; None where there is none to set, as in an evaluator.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], input: structs.Input | None = None):
        self._variables = dict(variables)
        self._input = input
        self._setter = Setter(variables)
        self._position: tf.Tensor | None = None
        if input is not None and input.restore_position is not None:
            with tf.name_scope('restore/position'):
                self._position = tf.placeholder(tf.string, [])
                self._position_set = input.restore_position(self._position)

    def restore(self, session: tf.Session, found: manifest.Checkpoint) -> bool:
        """Sets every variable, and the input's position where it belongs to the same pipeline; the input must be initialised.

        Returns:
          Whether the input goes on at its saved position; otherwise the log says why its epoch restarts.

        Raises:
          ValueError: a variable is missing in the checkpoint or has another shape or type; nothing was set.
        """
        reader = tf.train.load_checkpoint(found.prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        _require_match(self._variables, shapes, dtypes, found.prefix)
        self._setter.run(session, {name: reader.get_tensor(name) for name in self._variables})
        if self._input is None:
            return False
        problem = self._move_input(session, reader, found)
        if problem is not None:
            session.run(self._input.initializer)
            logging.warning('The input starts at the beginning of an epoch, not where checkpoint %s left it: %s.', found.prefix, problem)
        return problem is None

    def set(self, session: tf.Session, values: Mapping[str, Any]) -> None:
        """Sets every variable to a value that is at hand; the input stays."""
        self._setter.run(session, values)

    def move_input(self, session: tf.Session, found: manifest.Checkpoint, wanted: Sequence[int]) -> str | None:
        """Brings the input to a place (pass, batch in it) behind the one where the checkpoint left it; returns why that can't be."""
        return self._move_input(session, tf.train.load_checkpoint(found.prefix), found, wanted)

    def _move_input(self, session: tf.Session, reader: Any, found: manifest.Checkpoint, wanted: Sequence[int] | None = None) -> str | None:
        """Brings the input to `wanted`, or to where the checkpoint left it; returns why that can't be."""
        assert self._input is not None
        if not reader.has_tensor(position.POSITION):
            return 'it holds no position of an input'
        if self._position is None:
            return "this input's position can't be set"
        fingerprint = found.manifest.input_fingerprint
        if fingerprint.split('/')[0] != self._input.fingerprint.split('/')[0]:
            return 'its position is of another input pipeline (dataset, batch size, seed or code)'
        place = reader.get_tensor(position.PLACE) if reader.has_tensor(position.PLACE) else None
        reason = 'its position is of another number of towers or --input_pipeline'
        if fingerprint == self._input.fingerprint:
            reason = self._set_position(session, reader.get_tensor(position.POSITION))
        if place is None or self._input.go_to is None:
            return reason or None
        if reason:
            logging.info('The pass of the input is read again up to where checkpoint %s left it: %s.', found.prefix, reason)
        wanted = place[0] if wanted is None else wanted
        try:
            self._input.go_to(session, wanted, None if reason or place[1][0] != wanted[0] else place[1])
        except errors.OF_TASKS:  # says nothing of the input
            raise
        except (tf.errors.OpError, ValueError) as error:
            return f'reading on to it failed ({str(error).splitlines()[0]})'
        return None

    def _set_position(self, session: tf.Session, state: bytes) -> str:
        """Sets the iterators; returns why it can't be done, or nothing."""
        if not state:
            return 'the input gave no position when it was saved'
        try:
            session.run(self._position_set, {self._position: state})
        except errors.OF_TASKS:
            raise
        except tf.errors.OpError as error:
            return f'setting its position failed ({error.message.splitlines()[0]})'
        return ''


def retrying(
    model_dir: str,
    load: Callable[[manifest.Checkpoint], T],
    *,
    reader: manifest.Reader | None = None,
    attempts: int = 10,
) -> tuple[manifest.Checkpoint, T] | None:
    """Loads the newest whole checkpoint while a trainer publishes and removes others.

    Args:
      model_dir: the run directory.
      load: what to do with the checkpoint; called again with a newer one where the first vanished under it.
      reader: remembers what it has verified, for those who call this often.
      attempts: how often a checkpoint may vanish.

    Returns:
      The checkpoint and what `load` returned for it; None where there is no checkpoint yet.

    Raises:
      CheckpointError: there are checkpoints and none is whole.
      Exception: whatever `load` raised on a checkpoint that is still whole, or at the last attempt.
    """
    reader = reader or manifest.Reader(model_dir)
    for attempt in range(attempts):
        found = None
        try:
            found = reader.newest()
            return None if found is None else (found, load(found))
        except UNREADABLE as error:
            still_whole = found is not None and manifest.check(found.prefix) is None
            if still_whole or attempt == attempts - 1:
                raise
            logging.info('Checkpoint %s vanished while it was read (%s); looking again.', found and found.prefix, type(error).__name__)
    raise AssertionError('at least one attempt')


class Setter:
    """Operations that give variables values from outside."""

    def __init__(self, variables: Mapping[str, tf.Variable]):
        with tf.name_scope('restore'):
            self._values = {name: tf.placeholder(v.dtype.base_dtype, v.shape) for name, v in variables.items()}
            self._assigns = [
                (names, tf.group(*[variables[name].assign(self._values[name], read_value=False) for name in names]))
                for names in _parts(variables)
            ]

    def run(self, session: tf.Session, values: Mapping[str, Any]) -> None:
        """Sets the variables to `values` by name."""
        for names, assign in self._assigns:
            session.run(assign, {self._values[name]: values[name] for name in names})


def _parts(variables: Mapping[str, tf.Variable]) -> list[list[str]]:
    """The names in parts that a message to a server can hold."""
    parts: dict[int, list[str]] = {}
    ends = itertools.accumulate((variable.shape.num_elements() or 0) * variable.dtype.size for variable in variables.values())
    for name, end in zip(variables, ends, strict=True):
        parts.setdefault(end // _MOST_BYTES, []).append(name)
    return list(parts.values())


def mismatch(variable: tf.Variable, source: str, shapes: Mapping[str, Any], dtypes: Mapping[str, Any]) -> str | None:
    """Why a variable can't have the value `source` of a checkpoint with these shapes and types; None where it can."""
    if source not in shapes:
        return f'{source} is missing in the checkpoint'
    if not variable.shape.is_compatible_with(shapes[source]):
        return f'shape {variable.shape.as_list()}, in the checkpoint {list(shapes[source])}'
    if variable.dtype.base_dtype != dtypes[source]:
        return f'type {variable.dtype.base_dtype.name}, in the checkpoint {dtypes[source].name}'
    return None


def _require_match(variables: Mapping[str, tf.Variable], shapes: Mapping[str, Any], dtypes: Mapping[str, Any], prefix: str) -> None:
    problems = {name: mismatch(variable, name, shapes, dtypes) for name, variable in variables.items()}
    bad = {name: problem for name, problem in problems.items() if problem}
    if bad:
        shown = '; '.join(f'{name}: {problem}' for name, problem in list(bad.items())[:5])
        raise ValueError(
            f'Checkpoint {prefix} does not fit {len(bad)} of {len(variables)} variables ({shown}); expected the same model and optimizer. '
            'Use --init_checkpoint to take what matches into a new --model_dir.'
        )
