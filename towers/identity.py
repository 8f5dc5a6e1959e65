"""Who a process is: its machine, its number there, and when it started, which together no other process ever is; its cores and code."""

import functools
import hashlib
import os
import pathlib
import socket

_DEAD = -1
_PROC = pathlib.Path('/proc')


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


@functools.cache
def code() -> str:
    """A digest of the source files of this package as they were when it was first asked for, the same wherever they lie."""
    folder, found = pathlib.Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob('*.py'), key=lambda path: path.relative_to(folder).as_posix()):
        text = path.read_bytes()
        found.update(f'{path.relative_to(folder).as_posix()} {len(text)}\n'.encode() + text)
    return found.hexdigest()[:16]


def machine() -> str:
    """The running system and its space of process numbers; two containers on one machine have two."""
    try:
        boot = (_PROC / 'sys/kernel/random/boot_id').read_text().strip()
        return f'{boot} {os.readlink(_PROC / "self/ns/pid")}'
    except OSError:
        return socket.gethostname()


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the system did; None where the system doesn't say, -1 for none or a dead one."""
    try:
        state, *fields = (_PROC / str(pid) / 'stat').read_text().rpartition(')')[2].split()
    except ProcessLookupError:
        return _DEAD
    except OSError:
        return None if _exists(pid) else _DEAD
    return _DEAD if state in 'ZX' else int(fields[18])


def lives(pid: int, started: int | None) -> bool:
    """Whether a process of this machine, not a later one of the same number, runs."""
    return start_of(pid) in (started, None)


def _exists(pid: int) -> bool:
    """For systems whose /proc is not there, or hides the processes of others."""
    if pid <= 0:  # a group of processes, to `kill`
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
