"""The checkouts of other frameworks that --peer names: which they are, and the sides that they bring."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import tensorflow.compat.v1 as tf

from scripts import _main
from scripts._bench import cnn_benchmarks, sides, tensorpacks

Side: TypeAlias = Callable[[sides.Case], contextlib.AbstractContextManager[sides.Step]]
_TRY, _LIMIT_SECS = ('w1', '2', 'constants'), 180  # what a side must be able to train, and how long its first step may take


@dataclasses.dataclass(frozen=True)
class Kind:
    """A framework.

    Attributes:
      name: of its repository's main part.
      mark: a file that its checkout has.
      path: the folder of the checkout that goes on the path.
      sides: by name.
    """

    name: str
    mark: str
    path: str
    sides: Mapping[str, Side]


_KINDS = (
    Kind(
        'tf_cnn_benchmarks', 'scripts/tf_cnn_benchmarks/variable_mgr.py', 'scripts/tf_cnn_benchmarks',
        {'tf_cnn_benchmarks ps': cnn_benchmarks.parameter_server, 'tf_cnn_benchmarks replicated': cnn_benchmarks.replicated},
    ),
    Kind(
        'tensorpack', 'tensorpack/train/trainers.py', '.',
        {'tensorpack ps': tensorpacks.parameter_server, 'tensorpack replicated': tensorpacks.replicated},
    ),
)  # fmt: skip


def named(folders: Iterable[str]) -> dict[str, str]:
    """The sides of some checkouts, each with its folder.

    Raises:
      ValueError: a folder is none of the checkouts that there are sides for, or two are of one kind.
    """
    found: dict[str, str] = {}
    for folder in map(os.path.abspath, folders):
        kind = _kind(folder)
        if not found.keys().isdisjoint(kind.sides):
            raise ValueError(f'--peer: expected one checkout of each kind, got a second of {kind.name}, {folder}; leave one out.')
        found.update(dict.fromkeys(kind.sides, folder))
    return found


def side(name: str, folder: str) -> Side:
    """One of those sides; the checkout goes on the path of this process."""
    kind = _kind(folder)
    sys.path.insert(0, os.path.join(folder, kind.path))
    return kind.sides[name]


def try_out(found: Mapping[str, str]) -> None:
    """Has each side make its first step, in a process of its own.

    Raises:
      ValueError: one can't, with the reason.
    """
    for name, folder in found.items():
        command = [sys.executable, '-m', 'scripts._bench.child', name, *_TRY, folder]
        try:
            done = subprocess.run(command, cwd=_main.ROOT, capture_output=True, text=True, input='', timeout=_LIMIT_SECS)
        except subprocess.TimeoutExpired:
            reason = f'no first step within {_LIMIT_SECS} s'
        else:
            reason = _reason(done.stderr) if done.returncode else ''
        if reason:
            raise ValueError(
                f'--peer={folder}: {name} does not run under TensorFlow {tf.__version__}: {reason}; '
                'install what it needs or take its newest version, or leave it out.'
            )


def _kind(folder: str) -> Kind:
    for kind in _KINDS:
        if os.path.exists(os.path.join(folder, kind.mark)):
            return kind
    wanted = ' or '.join(f'{kind.name} (with {kind.mark})' for kind in _KINDS)
    got = 'another' if os.path.isdir(folder) else 'no folder'
    raise ValueError(f'--peer={folder}: expected a checkout of {wanted}, got {got}; give the folder that git cloned it to.')


def _reason(printed: str) -> str:
    """The last error in what a process wrote, without its traceback."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r'[\w.]+(Error|Exception|Exit)\b', line)), lines[-1] if lines else 'it ended')
