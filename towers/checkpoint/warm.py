"""A warm start: another run's values into the variables of a new one that match them."""

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import leases, manifest, position, restore

_POWERS = re.compile(r'(.*/)?beta[12]_power(_\d+)?')
_NEVER = ('global_step', 'examples_seen', 'skipped_steps', position.POSITION, position.PLACE)


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
    directory it stays there until it is loaded. Step, examples, input position and what optimizers keep (slots, powers of beta) are
    never taken: a new run counts its updates from 0.

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
        for name in sorted(set(variables) - set(_NEVER)):
            source = name
            for pattern, replacement in rename:
                source = pattern.sub(replacement, source)
            problem = "an optimizer's" if is_slot(name, variables) else None
            problem = problem or ('excluded' if any(pattern.search(name) for pattern in exclude) else None)
            problem = problem or restore.mismatch(variables[name], source, shapes, dtypes)
            if problem:
                left[name] = problem
            else:
                loaded[name] = source
        unused = sorted(set(shapes) - set(loaded.values()) - set(_NEVER))
        self.report = WarmReport(prefix, loaded, left, unused)
        if not loaded:
            self._lease.close()
            raise ValueError(
                f'--init_checkpoint={config.init_checkpoint} sets none of {len(left)} variables (first: {list(left.items())[:3]}); '
                f'it holds {unused[:5]}. Give --init_rename=pattern:replacement from the names here to those, or another checkpoint.'
            )
        self._setter = restore.Setter({name: variables[name] for name in loaded})

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


def is_slot(name: str, names: Collection[str]) -> bool:
    """Whether a variable's name is that of an optimizer's slot of another one, or of its powers of beta.

    Args:
      name: of a variable in a checkpoint.
      names: of all variables.
    """
    return name.rpartition('/')[0] in names or _POWERS.fullmatch(name) is not None


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
    except restore.UNREADABLE as error:
        raise ValueError(f'--init_checkpoint={prefix} is not a readable checkpoint ({error}); give its path without endings.') from error
