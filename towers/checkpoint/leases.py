"""Leases: what is being read of a run directory stays there until it has been read.

A reader makes `sessions/lease-<token>.json` and looks for its checkpoint only then; retention looks for leases after a newer
checkpoint is published, and once more after it has taken a manifest away, which it puts back where a lease has come
meanwhile. So whatever the order of the two, a checkpoint that a reader has found with a lease in hand keeps its files. A
lease whose reader is gone is void: at once where its process was one of this machine; elsewhere it expires, as its file's
time of change no longer moves. Both times are the file system's.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

from absl import logging

from towers import identity
from towers.checkpoint import files

LIMIT_SECS = 60.0
_FOLDER = 'sessions'
_FILE = re.compile(r'lease-[0-9a-f]+\.json')
_CLOCK = 'lease-clock.tmp'


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What a lease's file says; `step` None pins every checkpoint, while its reader looks for one."""

    holder: str
    host: str
    pid: int
    step: int | None = None
    limit_secs: float = LIMIT_SECS
    machine: str = ''
    started: int | None = None

    @property
    def is_dead(self) -> bool:
        """Whether its reader was a process of this machine that is gone."""
        return self.machine == identity.machine() and not identity.lives(self.pid, self.started)


class Lease(contextlib.AbstractContextManager):
    """Pins the checkpoints of a run directory for the `with` block: all of them, or after `narrow` one.

        with leases.Lease(model_dir, 'evaluator test') as lease:
            found = manifest.newest(model_dir)
            lease.narrow(found.step)
            ...read...

    Where the run directory can't be written there is no lease, which is logged once: checkpoints may vanish then.

    Args:
      model_dir: the run directory.
      holder: who reads, for those who look.
      limit_secs: after so many seconds without a sign of life the lease is void.
    """

    def __init__(self, model_dir: str, holder: str, *, limit_secs: float = LIMIT_SECS):
        self._folder = os.path.join(os.path.abspath(model_dir), _FOLDER)
        self._path = os.path.join(self._folder, f'lease-{uuid.uuid4().hex}.json')
        pid, machine = os.getpid(), identity.machine()
        self._facts = _Facts(holder, socket.gethostname(), pid, None, limit_secs, machine, identity.start_of(pid))
        self._over = threading.Event()

    @property
    def path(self) -> str:
        """The lease's file; it ends where somebody removes that."""
        return self._path

    def __enter__(self) -> 'Lease':
        if os.path.isdir(os.path.dirname(self._folder)):
            self._write(None)
            threading.Thread(target=self._beat, name='towers-lease', daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            files.unlink(self._path)

    def narrow(self, step: int) -> None:
        """Pins the checkpoint of `step` only."""
        if os.path.exists(self._path):
            self._write(step)

    def _write(self, step: int | None) -> None:
        try:
            os.makedirs(self._folder, exist_ok=True)
            with open(self._path + '.tmp', 'w', encoding='utf-8') as file:
                json.dump(dataclasses.asdict(dataclasses.replace(self._facts, step=step)), file)
            os.replace(self._path + '.tmp', self._path)
        except OSError as error:
            logging.log_first_n(logging.INFO, 'Checkpoints can not be pinned in %s (%s).', 1, self._folder, error.strerror)

    def _beat(self) -> None:
        while not self._over.wait(self._facts.limit_secs / 6):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def pinned(model_dir: str) -> Callable[[int], bool]:
    """Whether the checkpoint of a step is pinned just now; leases that are void are removed.

    Raises:
      OSError: it can't be said.
    """
    folder = os.path.join(model_dir, _FOLDER)
    names = [name for name in files.names(folder) if _FILE.fullmatch(name)]
    held = [facts for facts in (_read(folder, name) for name in names) if facts is not None]
    return lambda step: any(facts.step in (None, step) for facts in held)


def is_pinned(model_dir: str, step: int) -> bool:
    """Whether the checkpoint of `step` is pinned just now."""
    return pinned(model_dir)(step)


def sweep(model_dir: str) -> None:
    """Removes leases that are void, if it can."""
    with contextlib.suppress(OSError):
        pinned(model_dir)


def _read(folder: str, name: str) -> _Facts | None:
    """A lease that holds; None for one that is void, and is removed, or was given back meanwhile."""
    path = os.path.join(folder, name)
    try:
        with open(path, encoding='utf-8') as file:
            facts = _Facts(**json.load(file))
            beaten = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # another version's
        facts, beaten = _Facts('', '', 0), os.path.getmtime(path)
    if not facts.is_dead and _now(folder) - beaten < facts.limit_secs:
        return facts
    logging.info('The lease of %s (process %d on %s) is void.', facts.holder, facts.pid, facts.host)
    files.unlink(path)
    return None


def _now(folder: str) -> float:
    """The file system's time."""
    path = os.path.join(folder, _CLOCK)
    with open(path, 'wb') as file:
        file.write(b'.')
    try:
        return os.path.getmtime(path)
    finally:
        files.unlink(path)
