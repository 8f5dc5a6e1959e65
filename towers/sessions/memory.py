"""How much main memory this machine, or the group of processes that this one is in, may take."""

import pathlib

_MIB = 1 << 20
_UNLIMITED = 1 << 60
_CGROUPS = pathlib.Path('/sys/fs/cgroup')
_PROC = pathlib.Path('/proc')


def limit_mb(*, proc: pathlib.Path = _PROC, groups: pathlib.Path = _CGROUPS) -> int:
    """The machine's memory in MiB, or the least limit of the control groups that hold this process; 0 where nobody says."""
    limits = [_number(groups / 'memory/memory.limit_in_bytes')]  # version 1, as a container sees it
    for folder in _own_groups(proc, groups):
        limits += [_number(folder / 'memory.max'), _number(folder / 'memory.limit_in_bytes')]
    limits.append(_row(proc / 'meminfo', 'MemTotal') * 1024)
    known = [limit for limit in limits if 0 < limit < _UNLIMITED]
    return min(known, default=0) // _MIB


def used_mb(pid: int, *, proc: pathlib.Path = _PROC) -> int:
    """MiB of main memory that a process of this machine holds now; 0 where it can't be read."""
    return _row(proc / str(pid) / 'status', 'VmRSS') // 1024


def threads(pid: int, *, proc: pathlib.Path = _PROC) -> int:
    """How many threads a process of this machine has now; 0 where it can't be read."""
    return _row(proc / str(pid) / 'status', 'Threads')


def _own_groups(proc: pathlib.Path, groups: pathlib.Path) -> list[pathlib.Path]:
    """The folders of the control groups of this process, from the innermost one to the root."""
    try:
        lines = (proc / 'self/cgroup').read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controllers in ('', 'memory') or 'memory' in controllers.split(','):
            root = groups / 'memory' if controllers else groups
            inner = root / path.lstrip('/')
            found += [inner, *[folder for folder in inner.parents if folder.is_relative_to(root)]]
    return found


def _number(path: pathlib.Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0  # 'max' is no limit


def _row(path: pathlib.Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f'{name}:')), 0)
