"""Which physical GPU a number means: the machine's own order, what CUDA shows of it, and what TensorFlow counts."""

import os
import subprocess
from collections.abc import Mapping, Sequence

_QUERY_SECS = 10.0


def gpus(wanted: Sequence[int], needed: int, *, shown: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The GPUs of the towers, in their order, as pairs (number as CUDA counts, physical number).

    Args:
      wanted: physical numbers, none = the first ones.
      needed: how many.
      shown: physical numbers of the GPUs that CUDA shows, in its order.

    Raises:
      ValueError: a GPU is wanted that isn't shown.
    """
    numbers = list(wanted) or list(shown[:needed])
    missing = [number for number in numbers if number not in shown]
    if missing:
        raise ValueError(
            f'--visible_gpus={",".join(map(str, numbers))}: no GPU {", ".join(map(str, missing))} is visible, only '
            f'{", ".join(map(str, shown)) or "none"}; give physical numbers of these, or change CUDA_VISIBLE_DEVICES.'
        )
    return tuple((list(shown).index(number), number) for number in numbers)


def shown(found: int, environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
    """Physical numbers of the GPUs that CUDA shows this process, in its order.

    Args:
      found: how many there are.
      environment: as os.environ, whose CUDA_VISIBLE_DEVICES may hold numbers or the beginnings of the GPUs' own names.
    """
    text = (os.environ if environment is None else environment).get('CUDA_VISIBLE_DEVICES', '')
    entries = [entry.strip() for entry in text.split(',') if entry.strip()]
    if not entries:
        return tuple(range(found))
    if all(entry.isdecimal() for entry in entries):
        return tuple(int(entry) for entry in entries[:found])
    names = [name for name, _ in query()]
    numbers = [next((number for number, name in enumerate(names) if name.startswith(entry)), None) for entry in entries[:found]]
    return tuple(place if number is None else number for place, number in enumerate(numbers))


def query() -> list[tuple[str, int]]:
    """Name and memory in MiB of each GPU of this machine, in the order of the PCI bus; empty where there is no driver."""
    command = ['nvidia-smi', '--query-gpu=uuid,memory.total', '--format=csv,noheader,nounits']
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(',') for line in said.splitlines() if line.count(',') == 1]
    return [(name.strip(), int(size) if size.strip().isdecimal() else 0) for name, size in rows]
