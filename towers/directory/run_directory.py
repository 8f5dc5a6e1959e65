"""The run directory of a training: taken by one trainer, gone on from or set aside, and what it is trained under agreed."""

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from towers import config as config_lib
from towers.checkpoint import files, manifest, retention
from towers.directory import lock, meaning, record
from towers.jobs import program

_OURS = re.compile(r'ckpt-\d+\..+|checkpoint|config\.json|flags\.txt|metrics\.jsonl|events\.out\.tfevents\..+|eval|bundles|stacks-.+')
_ASIDE = re.compile(r'old-(\d+)')
_UNFINISHED = re.compile(r'old-\d+\.tmp')


@dataclasses.dataclass(frozen=True)
class Claim:
    """A run directory that may be written.

    Attributes:
      found: the checkpoint to go on from; None = a new run.
      newest: looks for it again.
      check: raises LockError where the directory isn't this trainer's any more; `every_secs` makes it cheap.
      facts: what the run is trained under, once it is agreed.
      run: the run's name for itself, once it is agreed.
    """

    found: manifest.Checkpoint | None = None
    newest: Callable[[], manifest.Checkpoint | None] = lambda: None
    check: Callable[..., None] = lambda every_secs=0.0: None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: str = ''


@contextlib.contextmanager
def claimed(config: config_lib.Config, stop: threading.Event) -> Iterator[Claim]:
    """Holds the run directory for the `with` block.

    Args:
      config: `model_dir`, and `from_scratch`, which sets aside what an old run wrote.
      stop: ends a wait for another trainer's sign of life when set.

    Raises:
      ValueError: another trainer holds it.
      CheckpointError: there are checkpoints and none is whole.
    """
    model_dir = str(config.model_dir)
    with lock.WriterLock(model_dir, stop=stop) as held:
        if config.from_scratch:
            set_aside(model_dir)
        else:
            _bring_back(model_dir)
        newest = manifest.Reader(model_dir).newest
        found = newest()
        if found is not None and not retention.is_named(model_dir):
            logging.warning(
                'The file checkpoint in %s is gone or damaged; the manifests tell the checkpoints, and it is made anew.', model_dir
            )
        yield Claim(found, newest, held.check)


def agreed(claim: Claim, made: program.Program, config: config_lib.Config, *, functions: Mapping[str, Callable[..., Any] | None]) -> Claim:
    """The claim with what the run is trained under, which `config.json` then says.

    Args:
      claim: what may be written, and the checkpoint to go on from.
      made: the program that will run.
      config: what was asked, `allow_changed` included.
      functions: 'model', 'dataset', and 'optimizer' or None for the one that `config` names.

    Raises:
      ValueError: the run would go on under other facts than before, and `config.allow_changed` doesn't accept it.
    """
    given = {name: function for name, function in functions.items() if function is not None}
    facts = meaning.of(config, made.step, towers=len(made.placement.towers), total_steps=made.total_steps, functions=given)
    before = claim.found.manifest.semantics if claim.found else {}
    meaning.require_same(facts, before, config, place=claim.found.prefix if claim.found else '')
    return dataclasses.replace(claim, facts=facts, run=record.write(str(config.model_dir), config, facts))


def set_aside(model_dir: str) -> str | None:
    """Moves what a run wrote to `old-<n>/`, itself a run directory then; nothing is deleted, and what others wrote stays.

    One that was killed while it moved is gone on with.

    Returns:
      The folder; None where there was nothing to move.
    """
    unfinished = _unfinished(model_dir)
    names = [name for name in files.names(model_dir) if _OURS.fullmatch(name)]
    if not names and not unfinished:
        return None
    number = 1 + max((int(match[1]) for match in map(_ASIDE.fullmatch, files.names(model_dir)) if match), default=0)
    folder = os.path.join(model_dir, f'old-{number}')
    moving = unfinished[0] if unfinished else f'{folder}.tmp'
    os.makedirs(moving, exist_ok=True)
    _move(names, model_dir, moving)
    os.replace(moving, folder)
    files.sync_folder(model_dir)
    logging.warning('--from_scratch: what was in %s is in %s now. To go on with the new run, leave --from_scratch out.', model_dir, folder)
    return folder


def _bring_back(model_dir: str) -> None:
    """Undoes a move that was killed before its end, so that no good checkpoint is lost from sight."""
    for moving in _unfinished(model_dir):
        logging.warning('Setting aside was not finished in %s, and --from_scratch is not given now: undone.', moving)
        _move([name for name in files.names(moving) if not os.path.exists(os.path.join(model_dir, name))], moving, model_dir)
        with contextlib.suppress(OSError):  # something of that name had been made since
            os.rmdir(moving)


def _unfinished(model_dir: str) -> list[str]:
    return sorted(os.path.join(model_dir, name) for name in files.names(model_dir) if _UNFINISHED.fullmatch(name))


def _move(names: Sequence[str], source: str, target: str) -> None:
    for name in sorted(names):
        os.rename(os.path.join(source, name), os.path.join(target, name))
    files.sync_folder(target)
    files.sync_folder(source)
