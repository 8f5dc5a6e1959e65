"""Manifests: which checkpoints of a run directory are whole, and what each was saved under.

A checkpoint `ckpt-<step>` is published by its manifest `ckpt-<step>.json`, which is written last and removed first. The
same manifest under the name `ckpt-<step>.json.tmp` says that a writer was still publishing the files of that step, or
already removing them: what a killed writer left is known by it, and everything else in the folder is left alone.
"""

import dataclasses
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from towers.checkpoint import files

_FORMAT = 1
_RESCANS = 100
_LISTED = re.compile(r'ckpt-(\d+)\.(?:json|index|data-\d{5}-of-\d{5})')
_PUBLISHED = re.compile(r'ckpt-(\d+)\.json')
_UNFINISHED = re.compile(r'ckpt-(\d+)\.json\.tmp')
_TEMPORARY = re.compile(r'ckpt-\d+\.tmp\..+|checkpoint\.tmp')


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that exist is whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
      step: global_step of its variables.
      examples: examples trained on up to this step.
      files: basename -> {'size': bytes, 'crc32': checksum of the whole file}.
      final: whether the run was done with it.
      finite: whether every float in it is finite; others are not published.
      input_fingerprint: the input pipeline that its position belongs to; empty where it has no position.
      semantics: what the run was trained under, as JSON values.
      time: seconds since 1970 at which it was written.
    """

    step: int
    examples: int
    files: Mapping[str, Mapping[str, int]]
    final: bool = False
    finite: bool = True
    input_fingerprint: str = ''
    semantics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    time: float = dataclasses.field(default_factory=time.time)


class Checkpoint(NamedTuple):
    """A published checkpoint: its step, its path without endings, and its manifest."""

    step: int
    prefix: str
    manifest: Manifest


def prefix_of(model_dir: str, step: int) -> str:
    """The path, without endings, of the checkpoint of `step`."""
    return os.path.join(os.path.abspath(model_dir), f'ckpt-{step}')


def write(model_dir: str, manifest: Manifest) -> None:
    """Writes `manifest` beside its files, or replaces the one of the same step, in one atomic and durable step."""
    _stage(model_dir, manifest)
    _commit(model_dir, manifest.step)


def publish(model_dir: str, manifest: Manifest) -> None:
    """Gives the finished files `ckpt-<step>.tmp.*` of a manifest their real names, and publishes them with it."""
    _stage(model_dir, manifest)
    prefix = prefix_of(model_dir, manifest.step)
    for name in manifest.files:
        os.replace(prefix + '.tmp' + name.removeprefix(os.path.basename(prefix)), os.path.join(os.path.dirname(prefix), name))
    files.sync_folder(model_dir)
    _commit(model_dir, manifest.step)


def remove(model_dir: str, step: int, *, unless: Callable[[], bool] = lambda: False) -> None:
    """Removes the checkpoint of `step`, or what is there of it: the manifest goes first, so no reader finds half of one.

    Args:
      model_dir: the run directory.
      step: of the checkpoint.
      unless: asked when no other reader can find it any more; if it says so the checkpoint is published again.
    """
    path = prefix_of(model_dir, step) + '.json'
    if os.path.exists(path):
        os.replace(path, path + '.tmp')
        if unless():
            os.replace(path + '.tmp', path)
            return
    _remove_files(model_dir, step)


def sweep(model_dir: str) -> Sequence[str]:
    """Removes what a killed writer left: its temporary files, and the files of a step that it had not published.

    Returns:
      Basenames of the removed files.
    """
    before = set(files.names(model_dir))
    for name in before:
        unfinished = _UNFINISHED.fullmatch(name)
        if unfinished and name.removesuffix('.tmp') not in before:
            _remove_files(model_dir, int(unfinished[1]))
        elif unfinished or _TEMPORARY.fullmatch(name):
            files.unlink(os.path.join(model_dir, name))
    return sorted(before - set(files.names(model_dir)))


def read(prefix: str) -> Manifest:
    """The manifest of the checkpoint at `prefix`.

    Raises:
      ValueError: it is missing, can't be read, or is not as it was written; the message says which.
    """
    name = os.path.basename(prefix) + '.json'
    try:
        with open(prefix + '.json', 'rb') as file:
            fields = json.loads(file.read())
        if not isinstance(fields, dict) or 'crc32' not in fields:
            raise ValueError('it has no checksum')
        if fields.pop('crc32') != zlib.crc32(_canonical(fields)):
            raise ValueError('its own checksum is another')
        # Another version may know more or fewer fields.
        found = Manifest(**{field.name: fields[field.name] for field in dataclasses.fields(Manifest) if field.name in fields})
    except FileNotFoundError:
        raise ValueError(f'its manifest {name} is missing') from None
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f'its manifest {name} is not as it was written ({error})') from None
    if f'ckpt-{found.step}' != os.path.basename(prefix):
        raise ValueError(f'its manifest {name} is that of step {found.step}')
    return found


def steps(model_dir: str) -> list[int]:
    """The steps of the published checkpoints of a run directory, rising, by their names alone."""
    return sorted(int(match[1]) for match in map(_PUBLISHED.fullmatch, files.names(model_dir)) if match)


def all(model_dir: str) -> list[Checkpoint]:
    """The published checkpoints of a run directory by rising step, from readable manifests alone; their files are not looked at."""
    found = []
    for step in steps(model_dir):
        prefix = prefix_of(model_dir, step)
        try:
            found.append(Checkpoint(step, prefix, read(prefix)))
        except ValueError:
            continue
    return found


def check(prefix: str) -> str | None:
    """Why the checkpoint at `prefix` is not whole, in one line, or None if it is; each file is read once."""
    try:
        manifest = read(prefix)
        if not manifest.finite:
            return 'it holds values that are not finite'
        for name, facts in manifest.files.items():
            path = os.path.join(os.path.dirname(prefix), name)
            size = os.path.getsize(path)
            if size != facts['size']:
                return f'{name} has {size} bytes, its manifest says {facts["size"]}'
            if files.measure(path) != dict(facts):
                return f'{name} has another checksum than its manifest says'
    except ValueError as error:
        return str(error)
    except FileNotFoundError as error:
        return f'{os.path.basename(error.filename)} is missing'
    except OSError as error:
        return f'{os.path.basename(error.filename or prefix)} is not readable ({error.strerror})'
    return None


def newest(model_dir: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run directory; None where there is none at all.

    Raises:
      CheckpointError: there are some and none is whole.
    """
    return Reader(model_dir).newest()


class Reader:
    """Finds the newest whole checkpoint again and again: what it has verified it doesn't read twice, and it warns once."""

    def __init__(self, model_dir: str):
        self._model_dir = os.path.abspath(model_dir)
        self._checked: dict[str, tuple[Any, str | None]] = {}
        self._warned: set[tuple[str, str]] = set()

    def newest(self) -> Checkpoint | None:
        """As `manifest.newest`, also while a trainer publishes and removes others."""
        for _ in range(_RESCANS):
            listed, problems = _listed(self._model_dir), {}
            for step in sorted(listed, reverse=True):
                prefix = prefix_of(self._model_dir, step)
                found, problem = self._check(prefix)
                if found:
                    return Checkpoint(step, prefix, found)
                if _listed(self._model_dir).get(step) != listed[step]:
                    break  # a writer removed or published it since the folder was listed
                problems[prefix] = problem
                self._warn(prefix, problem)
            else:
                self._refuse(problems)
                return None
        raise CheckpointError(f'The checkpoints in {self._model_dir} vanish faster than they can be read; keep more than one.')

    def is_whole(self, listed: Checkpoint) -> bool:
        """Whether a published checkpoint is whole; where it is damaged, and not removed or saved anew, it warns once."""
        found, problem = self._check(listed.prefix)
        if found is None and os.path.exists(listed.prefix + '.json'):
            self._warn(listed.prefix, problem)
        return found is not None and found.time == listed.manifest.time

    def _check(self, prefix: str) -> tuple[Manifest | None, str]:
        signature = _signature(prefix)
        known = self._checked.get(prefix)
        if known is None or known[0] != signature:
            known = self._checked[prefix] = (signature, check(prefix))
        try:
            return (read(prefix), '') if known[1] is None else (None, known[1])
        except ValueError as error:
            return None, str(error)

    def _warn(self, prefix: str, problem: str) -> None:
        if (prefix, problem) not in self._warned:
            self._warned.add((prefix, problem))
            logging.warning('Checkpoint %s is not whole and is passed over: %s.', prefix, problem)

    def _refuse(self, problems: Mapping[str, str]) -> None:
        if problems:
            shown = '; '.join(f'{os.path.basename(prefix)}: {problem}' for prefix, problem in list(problems.items())[:5])
            raise CheckpointError(
                f'None of {len(problems)} checkpoints in {self._model_dir} is whole ({shown}); nothing was deleted. '
                'Bring back a good copy, or start anew with another --model_dir, or with --from_scratch, which moves them to old-1/.'
            )


def _stage(model_dir: str, manifest: Manifest) -> None:
    """Writes `manifest` under its temporary name, which marks the files of its step as a writer's unfinished work."""
    fields = {'format': _FORMAT, **dataclasses.asdict(manifest)}
    content = json.dumps({**fields, 'crc32': zlib.crc32(_canonical(fields))}, indent=1, sort_keys=True)
    with open(prefix_of(model_dir, manifest.step) + '.json.tmp', 'wb') as file:
        files.write_through(file, content.encode())
    files.sync_folder(model_dir)


def _commit(model_dir: str, step: int) -> None:
    path = prefix_of(model_dir, step) + '.json'
    os.replace(path + '.tmp', path)
    files.sync_folder(model_dir)


def _signature(prefix: str) -> Any:
    folder, base = os.path.split(prefix)
    names = sorted(name for name in files.names(folder) if name.startswith(base + '.'))
    found = []
    for name in names:
        try:
            state = os.stat(os.path.join(folder, name))
        except OSError:
            continue
        found.append((name, state.st_ino, state.st_size, state.st_mtime_ns))
    return found


def _listed(model_dir: str) -> dict[int, bool]:
    """Step -> whether it has a manifest, of those that have any file, but for what a writer is publishing or removing."""
    names = set(files.names(model_dir))
    steps = {int(match[1]) for match in map(_LISTED.fullmatch, names) if match}
    published = {step: f'ckpt-{step}.json' in names for step in steps}
    return {step: whole for step, whole in published.items() if whole or f'ckpt-{step}.json.tmp' not in names}


def _remove_files(model_dir: str, step: int) -> None:
    ours = re.compile(rf'ckpt-{step}\.(?:index|data-\d{{5}}-of-\d{{5}}|tmp\..+)')
    for name in files.names(model_dir):
        if ours.fullmatch(name):
            files.unlink(os.path.join(model_dir, name))
    files.unlink(prefix_of(model_dir, step) + '.json.tmp')


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(',', ':')).encode()
