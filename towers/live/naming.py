"""What a training that serves its variables and those who read them agree on: the file that says where, and names on the server."""

import contextlib
import dataclasses
import json
import os
import re
from typing import Any

import tensorflow.compat.v1 as tf

from towers import identity

BUFFERS = 2
FOLDER = 'sessions'
_FILE = re.compile(r'live-(\d+)\.json')


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a training serves its variables.

    Attributes:
      port: of TensorFlow's server, on this machine.
      token: what all names on the server begin with; who does not know it does not find them.
      pid: process number.
      started: when that process started.
      machine: identifies the running system.
    """

    port: int
    token: str
    pid: int
    started: int | None
    machine: str

    @property
    def lives(self) -> bool:
        """Whether it is of this machine and its process there."""
        return self.machine == identity.machine() and identity.lives(self.pid, self.started)


def path_of(model_dir: str, pid: int) -> str:
    """The file of a process's place."""
    return os.path.join(model_dir, FOLDER, f'live-{pid}.json')


def write(model_dir: str, place: Place) -> None:
    """Writes the file, which its owner alone can read, whole or not at all; those of dead processes of this machine go."""
    path = path_of(model_dir, place.pid)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for other in _places(os.path.dirname(path)):
        if other.machine == place.machine and not other.lives:
            remove(model_dir, other.pid)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f'{path}.tmp')
    with os.fdopen(os.open(f'{path}.tmp', os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'w') as file:
        json.dump(dataclasses.asdict(place), file)
    os.replace(f'{path}.tmp', path)


def remove(model_dir: str, pid: int) -> None:
    """Removes the file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path_of(model_dir, pid))


def find(model_dir: str) -> Place | None:
    """Where a training of this machine serves the variables of a run; None where none does."""
    with contextlib.suppress(FileNotFoundError):
        return next((place for place in _places(os.path.join(model_dir, FOLDER)) if place.lives), None)
    return None


def _places(folder: str) -> list[Place]:
    found = [_read(os.path.join(folder, name)) for name in sorted(filter(_FILE.fullmatch, os.listdir(folder)))]
    return [place for place in found if place is not None]


def _read(path: str) -> Place | None:
    """What a file says; None where it is gone, another user's or damaged."""
    try:
        with open(path, 'rb') as file:
            return Place(**json.loads(file.read()))
    except (OSError, ValueError, TypeError):
        return None


def variable(token: str, name: str, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """The handle of a variable on the server, in the current graph."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=f'{token}/{name}')


def buffered(number: int, name: str) -> str:
    """The name of a variable of the training in a buffer."""
    return f'buffer_{number}/{name}'
