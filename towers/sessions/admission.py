"""Whether a session fits beside the others: shares of GPUs up to the whole, main memory up to the machine's limit."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from towers.sessions import ledger, memory

_EXACT = 1e-6
_LEAST_SHARE = 0.01


class Refused(ValueError):
    """A session does not fit beside the others; scripts show `screen`, which has lines, and exit with 2."""

    def __init__(self, message: str, screen: str) -> None:
        super().__init__(message)
        self.screen = screen


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is to share.

    Attributes:
      memory_mb: main memory in MiB; 0 = unknown, any.
      gpus: physical numbers of all real GPUs that this process may see.
      reserved: sessions of the asking one's own, to be started after it, whose shares it must leave.
      planned: likewise, those that get the share that is planned for it.
    """

    memory_mb: int
    gpus: tuple[int, ...] = ()
    reserved: tuple[ledger.Entry, ...] = ()
    planned: tuple[ledger.Entry, ...] = ()

    def coming(self, admitted: ledger.Entry) -> list[ledger.Entry]:
        """The sessions that hold a share from now on, though they are started later."""
        planned = [dataclasses.replace(each, share=admitted.share) for each in self.planned]
        return [each for each in (*self.reserved, *planned) if each.share is not None and each.gpus]


def admit(asked: ledger.Entry, others: Sequence[ledger.Entry], machine: Machine, *, plan: bool = False) -> ledger.Entry:
    """The session as it is admitted.

    Args:
      asked: the session; what it has of a GPU is its share of it.
      others: the living sessions on this machine, without those of this process.
      machine: what there is.
      plan: whatever it asked for it gets an equal part, beside those that are planned, of what the others, and what is reserved, leave on
        its fullest GPU.

    Raises:
      Refused: it does not fit; the message holds who has what, and flags that would fit.
    """
    for place, coming in enumerate(machine.reserved):
        _check_shares(coming, [*others, *machine.reserved[:place]], machine)
    before = [*others, *machine.reserved]
    if plan and asked.gpus:
        free = min(_free(asked, before).values())
        asked = dataclasses.replace(asked, share=math.floor(free / (1 + len(machine.planned)) * 100 + _EXACT) / 100)
    _check_shares(asked, before, machine)
    _check_memory(asked, others, machine)
    return asked


def _free(asked: ledger.Entry, others: Sequence[ledger.Entry]) -> dict[tuple[bool, int], float]:
    return {device: 1.0 - sum(shares) for device, shares in _held(asked.devices(), others).items()}


def _check_shares(asked: ledger.Entry, others: Sequence[ledger.Entry], machine: Machine) -> None:
    share, free = asked.share, _free(asked, others)
    full = [] if share is None else [device for device in asked.devices() if free[device] + _EXACT < share or share < _LEAST_SHARE]
    if full and share is not None:
        device = min(full, key=lambda each: free[each])
        who = f'The {asked.role} {asked.name}' if asked.is_coming else 'This session'
        problem = f'{who} wants {share:.2f} of {_name(device)}, of which {1 - free[device]:.2f} is held and {_left(free[device])} free'
        raise _refused(f'{problem}.', asked, others, _ways(asked, free, others, machine), on_gpus=True)


def table(entries: Sequence[ledger.Entry]) -> list[str]:
    """Who holds what, in columns under a heading."""
    rows = [('role', 'process', 'host', 'GPUs', 'share', 'memory', 'run directory')]
    for entry in entries:
        role = f'{entry.role} {entry.name}'.strip()
        process, taken = ('to come', '-') if entry.is_coming else (str(entry.pid), f'{_memory_of(entry)} MiB')
        rows.append((role, process, entry.host, devices(entry), share(entry), taken, entry.model_dir))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which the cells of a column stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def devices(entry: ledger.Entry) -> str:
    """Its GPUs by physical numbers."""
    return ('fake ' if entry.fake and entry.gpus else '') + (','.join(map(str, entry.gpus)) or '-')


def share(entry: ledger.Entry) -> str:
    """Its share of each GPU."""
    return '-' if entry.share is None else f'{entry.share:.2f}'


def _held(wanted: Sequence[tuple[bool, int]], others: Sequence[ledger.Entry]) -> dict[tuple[bool, int], list[float]]:
    """The shares of each device that are held; a process has one, however many sessions it has."""
    found = {}
    for device in wanted:
        shares: dict[object, float] = {}
        for entry in others:
            if entry.share is not None and device in entry.devices():
                process = entry.token if entry.is_coming else (entry.machine, entry.pid)
                shares[process] = max(entry.share, shares.get(process, 0.0))
        found[device] = list(shares.values())
    return found


def _ways(asked: ledger.Entry, free: Mapping[tuple[bool, int], float], others: Sequence[ledger.Entry], machine: Machine) -> list[str]:
    """The flags with which it would fit."""
    share, least = asked.share or 0.0, math.floor(min(free.values()) * 100 + _EXACT) / 100
    ways = [f'--gpu_memory_fraction={least:g}'] if least >= _LEAST_SHARE else []
    if asked.is_coming:
        return [f'its gpu_memory_fraction={least:g}'] if ways else []
    if any(entry.is_coming and entry.is_own for entry in others):  # they are where it is
        return [*ways, 'smaller shares of its evaluators']
    needed = len(asked.gpus)
    numbers = list(range(needed + sum(len(entry.gpus) for entry in others))) if asked.fake else list(machine.gpus)
    held = _held([(asked.fake, number) for number in numbers], others)
    fitting = [number for (_, number), shares in held.items() if 1.0 - sum(shares) + _EXACT >= share]
    if len(fitting) >= needed and share >= _LEAST_SHARE:
        ways.append(f'--visible_gpus={",".join(map(str, fitting[:needed]))}')
    if not asked.fake:
        ways.append('--device=cpu')
    return ways


def _check_memory(asked: ledger.Entry, others: Sequence[ledger.Entry], machine: Machine) -> None:
    wanted, held = asked.memory_mb, sum(_memory_of(entry) for entry in others)
    if wanted is None or not machine.memory_mb or held + wanted <= machine.memory_mb:
        return
    left = machine.memory_mb - held
    problem = f'This session wants {wanted} MiB of main memory, of which {held} MiB of {machine.memory_mb} MiB are held.'
    raise _refused(problem, asked, others, [f'--host_memory_mb={left}'] if left > 0 else [])


def _memory_of(entry: ledger.Entry) -> int:
    """What it was given, or has taken where that is more."""
    return max(entry.memory_mb or 0, memory.used_mb(entry.pid) if entry.is_here and not entry.is_coming else 0)


def _refused(problem: str, asked: ledger.Entry, others: Sequence[ledger.Entry], ways: Sequence[str], *, on_gpus: bool = False) -> Refused:
    sharing = [entry for entry in others if entry.share is not None and set(entry.devices()) & set(asked.devices())]
    others = sharing if on_gpus else others
    waited = {entry.pid: None for entry in others if not entry.is_own and not _serves(entry, asked)}
    ways = [*ways, *(['a smaller share of the training'] if any(_serves(entry, asked) for entry in others) else [])]
    if waited or not ways:
        ways.append(f'wait for the end of {", ".join(map(str, waited)) or "another session"}')
    fits = f'What would fit: {", or ".join(ways)}.'
    return Refused(f'{problem} {fits}', '\n'.join([problem, *(f'  {line}' for line in table(others)), fits]))


def _serves(entry: ledger.Entry, asked: ledger.Entry) -> bool:
    """Whether a session is of the training whose checkpoints an evaluator takes: it has nothing to do after its end."""
    own = entry.role == 'master' or (entry.is_coming and not asked.is_coming)
    return asked.role == 'evaluator' and own and entry.model_dir == asked.model_dir


def _name(device: tuple[bool, int]) -> str:
    fake, number = device
    return f'fake GPU {number}' if fake else f'GPU {number}'


def _left(free: float) -> str:
    return f'{max(free, 0.0):.2f}'
