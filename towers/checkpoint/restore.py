"""Restoring: a run's own checkpoint into its variables and input, or another model's values into what matches."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import leases, manifest, position

T = TypeVar('T')
_MOST_BYTES = 2**30  # a message to a server, by which the master of a cluster gets its values, ends at twice as many
_NEVER_WARM = ('global_step', 'examples_seen', 'skipped_steps', position.POSITION, position.PLACE)
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
        self._setter = _Setter(variables)
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

    def _move_input(self, session: tf.Session, reader: Any, found: manifest.Checkpoint) -> str | None:
        """Brings the input to where the checkpoint left it; returns why that can't be."""
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
        try:
            self._input.go_to(session, place[0], None if reason else place[1])
        except (tf.errors.OpError, ValueError) as error:
            return f'reading on to it failed ({str(error).splitlines()[0]})'
        return None

    def _set_position(self, session: tf.Session, state: bytes) -> str:
        """Sets the iterators; returns why it can't be done, or nothing."""
        if not state:
            return 'the input gave no position when it was saved'
        try:
            session.run(self._position_set, {self._position: state})
        except tf.errors.OpError as error:
            return f'setting its position failed ({error.message.splitlines()[0]})'
        return ''


class WarmReport(NamedTuple):
    """What a warm start did.

    Attributes:
      prefix: the checkpoint read.
      loaded: variable -> its name in the checkpoint.
      left: variable -> why it keeps its initial value.
      unused: names in the checkpoint that no variable took.
    """

    prefix: str
    loaded: Mapping[str, str]
    left: Mapping[str, str]
    unused: Sequence[str]


class WarmStart:
    """Sets the variables that match a checkpoint of another run by name and shape, as `--init_checkpoint` asks.

    The checkpoint is looked at when this is made, so that only what will be set gets an operation; where it is one of a run
    directory it stays there until it is loaded. Step, examples and input position are never taken.

    Args:
      variables: name in a checkpoint of this run -> variable.
      config: `init_checkpoint` (prefix or folder), `init_exclude`, `init_rename`.

    Raises:
      ValueError: there is no such checkpoint, a pattern is wrong, or no variable matches.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], *, config: config_lib.CheckpointConfig):
        exclude = [_pattern('init_exclude', text) for text in config.init_exclude]
        rename = [_rename(text) for text in config.init_rename]
        with contextlib.ExitStack() as pinned:
            prefix = _pin(config.init_checkpoint or '', pinned)
            self._reader = _open(prefix)
            self._lease = pinned.pop_all()
        shapes, dtypes = self._reader.get_variable_to_shape_map(), self._reader.get_variable_to_dtype_map()
        loaded, left = {}, {}
        for name in sorted(set(variables) - set(_NEVER_WARM)):
            source = name
            for pattern, replacement in rename:
                source = pattern.sub(replacement, source)
            problem = 'excluded' if any(pattern.search(name) for pattern in exclude) else None
            problem = problem or _mismatch(variables[name], source, shapes, dtypes)
            if problem:
                left[name] = problem
            else:
                loaded[name] = source
        unused = sorted(set(shapes) - set(loaded.values()) - set(_NEVER_WARM))
        self.report = WarmReport(prefix, loaded, left, unused)
        if not loaded:
            self._lease.close()
            raise ValueError(
                f'--init_checkpoint={config.init_checkpoint} sets none of {len(left)} variables (first: {list(left.items())[:3]}); '
                f'it holds {unused[:5]}. Give --init_rename=pattern:replacement from the names here to those, or another checkpoint.'
            )
        self._setter = _Setter({name: variables[name] for name in loaded})

    def load(self, session: tf.Session) -> WarmReport:
        """Sets the matching variables, logs what was and wasn't set, and returns it."""
        report = self.report
        self._setter.run(session, {name: self._reader.get_tensor(source) for name, source in report.loaded.items()})
        self._lease.close()
        logging.info(
            'Initial values from %s: %d variables set (%s), %d left (%s), %d of the checkpoint unused (%s).',
            report.prefix,
            len(report.loaded),
            ', '.join(name if name == source else f'{name} from {source}' for name, source in report.loaded.items()),
            len(report.left),
            ', '.join(f'{name}: {why}' for name, why in report.left.items()) or 'none',
            len(report.unused),
            ', '.join(report.unused) or 'none',
        )
        return report


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


class _Setter:
    """Operations that give variables values from outside."""

    def __init__(self, variables: Mapping[str, tf.Variable]):
        with tf.name_scope('restore'):
            self._values = {name: tf.placeholder(v.dtype.base_dtype, v.shape) for name, v in variables.items()}
            self._assigns = [
                (names, tf.group(*[variables[name].assign(self._values[name], read_value=False) for name in names]))
                for names in _parts(variables)
            ]

    def run(self, session: tf.Session, values: Mapping[str, Any]) -> None:
        for names, assign in self._assigns:
            session.run(assign, {self._values[name]: values[name] for name in names})


def _parts(variables: Mapping[str, tf.Variable]) -> list[list[str]]:
    """The names in parts that a message to a server can hold."""
    parts: dict[int, list[str]] = {}
    ends = itertools.accumulate((variable.shape.num_elements() or 0) * variable.dtype.size for variable in variables.values())
    for name, end in zip(variables, ends, strict=True):
        parts.setdefault(end // _MOST_BYTES, []).append(name)
    return list(parts.values())


def _mismatch(variable: tf.Variable, source: str, shapes: Mapping[str, Any], dtypes: Mapping[str, Any]) -> str | None:
    if source not in shapes:
        return f'{source} is missing in the checkpoint'
    if not variable.shape.is_compatible_with(shapes[source]):
        return f'shape {variable.shape.as_list()}, in the checkpoint {list(shapes[source])}'
    if variable.dtype.base_dtype != dtypes[source]:
        return f'type {variable.dtype.base_dtype.name}, in the checkpoint {dtypes[source].name}'
    return None


def _require_match(variables: Mapping[str, tf.Variable], shapes: Mapping[str, Any], dtypes: Mapping[str, Any], prefix: str) -> None:
    problems = {name: _mismatch(variable, name, shapes, dtypes) for name, variable in variables.items()}
    bad = {name: problem for name, problem in problems.items() if problem}
    if bad:
        shown = '; '.join(f'{name}: {problem}' for name, problem in list(bad.items())[:5])
        raise ValueError(
            f'Checkpoint {prefix} does not fit {len(bad)} of {len(variables)} variables ({shown}); expected the same model and optimizer. '
            'Use --init_checkpoint to take what matches into a new --model_dir.'
        )


def _pattern(flag: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f'--{flag} needs regular expressions, got {text!r} ({error}); correct it.') from None


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    pattern, colon, replacement = text.rpartition(':')
    if not colon or not pattern:
        raise ValueError(f'--init_rename needs pattern:replacement, got {text!r}; give e.g. --init_rename=^old/:new/.')
    return _pattern('init_rename', pattern), replacement


def _pin(path: str, pinned: contextlib.ExitStack) -> str:
    """The prefix of the checkpoint that `path` names; one of a run directory stays there until `pinned` is closed."""
    folder = path if tf.io.gfile.isdir(path) else os.path.dirname(path)
    lease = pinned.enter_context(leases.Lease(folder, 'warm start')) if manifest.all(folder) else None
    prefix = _locate(path)
    found = re.fullmatch(r'ckpt-(\d+)', os.path.basename(prefix))
    if lease is not None and found:
        lease.narrow(int(found[1]))
    return prefix


def _locate(path: str | None) -> str:
    if not path:
        raise ValueError('A warm start needs --init_checkpoint, got none; give the prefix of a checkpoint or its folder.')
    if not tf.io.gfile.isdir(path):
        return re.sub(r'\.(index|json|data-\d+-of-\d+)$', '', path)
    found = manifest.newest(path) if manifest.all(path) else None
    prefix = found.prefix if found else tf.train.latest_checkpoint(path)
    if prefix is None:
        raise ValueError(f'--init_checkpoint={path} is a folder without a checkpoint; give a prefix, or a folder with a `checkpoint` file.')
    return prefix


def _open(prefix: str) -> Any:
    try:
        return tf.train.load_checkpoint(prefix)
    except UNREADABLE as error:
        raise ValueError(f'--init_checkpoint={prefix} is not a readable checkpoint ({error}); give its path without endings.') from error
