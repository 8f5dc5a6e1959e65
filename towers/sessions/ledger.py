"""The entries of sessions, a small file for each, in a run directory's `sessions/` and in a folder of this machine.

A file is replaced as a whole at each heartbeat and removed at the end. What a killed process leaves is recognised by its
number and start, and on another machine by the age of its last heartbeat.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Sequence
from typing import Any

from towers import identity

SILENT_SECS = 60.0
_FILE = re.compile(r'session-(\d+)-[0-9a-f]+\.json')
_DRAFT = re.compile(_FILE.pattern + r'\.tmp')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One session, as its file says.

    Attributes:
      role: 'master', 'evaluator', 'exporter', 'predictor' or 'worker'.
      name: of the evaluator, or empty.
      model_dir: the run directory, absolute.
      gpus: physical numbers of its GPUs.
      fake: they are CPU devices in the place of GPUs.
      share: part of each GPU's memory that it may take; None for fake ones of which none was named.
      memory_mb: main memory in MiB that it was given; None = it did not say.
      intra_op_threads: as configured, 0 = TensorFlow's own choice.
      inter_op_threads: likewise.
      step: the last one made, loaded or evaluated; None before the first.
      host: name of the machine.
      machine: identifies the running system and its process numbers.
      pid: process number there.
      started: when that process started.
      parent: number of the process that started it.
      is_coming: process `pid` will start it, in a process of its own, and holds its share until then.
      since: seconds since 1970 at which the session was registered.
      token: drawn anew for each.
    """

    role: str
    name: str = ''
    model_dir: str = ''
    gpus: tuple[int, ...] = ()
    fake: bool = True
    share: float | None = None
    memory_mb: int | None = None
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    step: int | None = None
    host: str = dataclasses.field(default_factory=socket.gethostname)
    machine: str = dataclasses.field(default_factory=identity.machine)
    pid: int = dataclasses.field(default_factory=os.getpid)
    started: int | None = dataclasses.field(default_factory=lambda: identity.start_of(os.getpid()))
    parent: int = dataclasses.field(default_factory=os.getppid)
    is_coming: bool = False
    since: float = dataclasses.field(default_factory=time.time)
    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_here(self) -> bool:
        """Whether its process numbers are this system's."""
        return self.machine == identity.machine()

    @property
    def is_own(self) -> bool:
        """Whether it is of this very process."""
        return self.is_here and self.pid == os.getpid()

    def devices(self) -> list[tuple[bool, int]]:
        """Its GPUs as (fake, physical number)."""
        return [(self.fake, number) for number in self.gpus]


@dataclasses.dataclass(frozen=True)
class Seen:
    """An entry, and what is known of its session.

    Attributes:
      entry: as its file says.
      path: of the file.
      silent_secs: since its last heartbeat.
    """

    entry: Entry
    path: str
    silent_secs: float

    @property
    def lives(self) -> bool:
        """Whether the session is there: by its process on this machine, by its heartbeat elsewhere."""
        if self.entry.is_here:
            return identity.lives(self.entry.pid, self.entry.started)
        return self.silent_secs < SILENT_SECS


def path_of(folder: str, entry: Entry) -> str:
    """The file of an entry in a ledger's folder."""
    return os.path.join(folder, f'session-{entry.pid}-{entry.token[:12]}.json')


def write(folder: str, entry: Entry) -> None:
    """Writes an entry's file, whole or not at all; also its heartbeat."""
    path = path_of(folder, entry)
    try:
        with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
            file.write(json.dumps(dataclasses.asdict(entry), indent=1) + '\n')
        os.replace(f'{path}.tmp', path)
    except OSError:
        _unlink(f'{path}.tmp')
        raise


def remove(folder: str, entry: Entry) -> None:
    """Removes an entry's file, if it is there."""
    _unlink(path_of(folder, entry))


def read(folder: str, *, now: float | None = None) -> list[Seen]:
    """The entries of a ledger, dead ones included, the oldest first; files that can't be read are left out.

    Args:
      folder: of the ledger; one that isn't there is empty.
      now: seconds since 1970 by the clock of the folder's file system; None = this machine's clock.
    """
    found = []
    for name in _names(folder):
        if _FILE.fullmatch(name):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError, ValueError, TypeError), open(path, 'rb') as file:
                entry = _entry(json.loads(file.read()))
                beat = os.fstat(file.fileno()).st_mtime
                found.append(Seen(entry, path, max((time.time() if now is None else now) - beat, 0.0)))
    return sorted(found, key=lambda seen: (seen.entry.since, seen.path))


def pending(entries: Sequence[Entry]) -> list[Entry]:
    """Without those of sessions to come that are there by now."""
    begun = {(entry.machine, entry.parent, *_work(entry)) for entry in entries if not entry.is_coming}
    return [entry for entry in entries if not entry.is_coming or (entry.machine, entry.pid, *_work(entry)) not in begun]


def _work(entry: Entry) -> tuple[str, str, str]:
    return entry.role, entry.name, entry.model_dir


def sweep(folder: str) -> list[Seen]:
    """Removes what dead sessions left, and returns the living ones."""
    seen = read(folder)
    for dead in [each for each in seen if not each.lives]:
        _unlink(dead.path)
    for name in _names(folder):
        path = os.path.join(folder, name)
        draft = _DRAFT.fullmatch(name)
        if draft and identity.start_of(int(draft[1])) == -1 and _age(path) > SILENT_SECS:
            _unlink(path)
    return [each for each in seen if each.lives]


def sweep_here(folder: str) -> None:
    """Removes what dead sessions of this machine left, if it can; of others a look says little."""
    for dead in [each for each in read(folder) if each.entry.is_here and not each.lives]:
        with contextlib.suppress(OSError):
            _unlink(dead.path)


def _entry(fields: Any) -> Entry:
    """Raises ValueError or TypeError where `fields` are not those of an entry."""
    if not isinstance(fields, dict):
        raise TypeError
    names = {field.name for field in dataclasses.fields(Entry)}
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items() if name in names}
    entry = Entry(**known)
    numbers = (*entry.gpus, entry.pid, entry.since, entry.share or 0.0, entry.memory_mb or 0, entry.step or 0)
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError
    return entry


def _names(folder: str) -> Sequence[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _age(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
