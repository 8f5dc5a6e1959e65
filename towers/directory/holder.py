"""Who holds a run directory: the record in its lock file, and whether the process that it names lives."""

import dataclasses
import json
import os
import re
import socket
import time
import uuid

from towers import identity

LOCK = re.compile(r'writer-(\d+)\.json')
GONE = (FileNotFoundError, NotADirectoryError)
_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a run directory, as its lock file says.

    Attributes:
      generation: how often the directory has been taken, this time included.
      host: name of the machine.
      pid: process number there.
      started: when that process started, in its system's own unit; None where the system doesn't say.
      machine: identifies the running system whose process numbers `pid` is one of.
      since: seconds since 1970 at which the directory was taken.
      token: drawn anew at each taking.
      released: whether it was given back.
    """

    generation: int
    host: str = 'an unknown machine'
    pid: int = 0
    started: int | None = None
    machine: str = ''
    since: float = 0.0
    token: str = ''
    released: bool = False

    def __str__(self) -> str:
        return f'process {self.pid} on {self.host}'

    @property
    def is_here(self) -> bool:
        """Whether its process numbers are this system's."""
        return self.machine == identity.machine()

    @property
    def lives_here(self) -> bool:
        """Whether its process, not a later one of the same number, runs on this system."""
        return identity.lives(self.pid, self.started)

    def content(self) -> bytes:
        """The lock file that says all this."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode() + b'\n'


def this_process(generation: int) -> Holder:
    """This process as the holder of `generation`."""
    pid = os.getpid()
    return Holder(
        generation=generation,
        host=socket.gethostname(),
        pid=pid,
        started=identity.start_of(pid),
        machine=identity.machine(),
        since=time.time(),
        token=uuid.uuid4().hex,
    )


def path_of(folder: str, generation: int) -> str:
    """The lock file of `generation`."""
    return os.path.join(folder, f'writer-{generation}.json')


def generations(folder: str) -> list[int]:
    """The generations of which there is a lock file, rising."""
    return sorted(int(match[1]) for match in map(LOCK.fullmatch, os.listdir(folder)) if match)


def read(folder: str) -> Holder | None:
    """The holder of the highest generation; one without facts where its file can't be read, None where there is none.

    Raises:
      OSError: the storage failed.
    """
    found: list[int] = []
    for _ in range(_ATTEMPTS):
        try:
            found = generations(folder)
            if not found:
                return None
            with open(path_of(folder, found[-1]), 'rb') as file:
                return Holder(**{**json.loads(file.read()), 'generation': found[-1]})  # the name is what counts
        except GONE:
            if not os.path.isdir(folder):
                return None
            continue  # the file was removed since the folder was listed: there is a higher one
        except (ValueError, TypeError):
            break
    return Holder(generation=found[-1])


def changed(path: str) -> float:
    """When a file was last changed, 0.0 where it is gone; opening it is what brings NFS up to date."""
    try:
        with open(path, 'rb') as file:
            return os.fstat(file.fileno()).st_mtime
    except GONE:
        return 0.0
