"""The ledger of this machine: a folder private to the user, and the lock under which a session is admitted."""

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO

from absl import logging

_LOCK_SECS = 10.0
_SLICE_SECS = 0.02


def folder(environment: Mapping[str, str] | None = None) -> str:
    """The ledger's folder, which is made: in the user's runtime folder where there is one, else in the temporary folder.

    Raises:
      ValueError: it is somebody else's, or a link.
    """
    runtime = (os.environ if environment is None else environment).get('XDG_RUNTIME_DIR', '')
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        path = os.path.join(runtime, 'towers')
    else:
        path = os.path.join(tempfile.gettempdir(), f'towers-{os.getuid()}')
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise ValueError(f'{path}, where sessions of this machine are registered, must be a folder of yours; set XDG_RUNTIME_DIR to one.')
    if about.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


@contextlib.contextmanager
def locked(path: str, *, limit_secs: float = _LOCK_SECS) -> Iterator[None]:
    """Holds the folder's lock for the `with` block, so that two sessions don't both take what is left.

    Args:
      path: the ledger's folder.
      limit_secs: after which the block runs without the lock, with a WARNING; its holder may be stopped.
    """
    with open(os.path.join(path, 'lock'), 'w') as file:
        end = time.monotonic() + limit_secs
        while not _taken(file) and time.monotonic() < end:
            time.sleep(_SLICE_SECS)
        if time.monotonic() >= end:
            logging.warning('The ledger in %s was locked for %g s, perhaps by a stopped process; going on without.', path, limit_secs)
        yield


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
