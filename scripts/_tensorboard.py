"""TensorBoard as a child process that ends with its parent, however the parent ends.

As a command it serves until its standard input, a pipe that only the parent holds, is closed.
"""

import contextlib
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

from absl import logging

_HOST = 'localhost'
_START_SECS = 60.0
_END_SECS = 10.0


@contextlib.contextmanager
def beside(logdir: str, *, wanted: bool = True, say: Callable[[str], None] = logging.info) -> Iterator[None]:
    """Serves `logdir` while the body runs, and says the address as soon as it answers; the body does not wait for that.

    Args:
      logdir: run directory.
      wanted: False = only the body.
      say: gets one line.
    """
    if not wanted:
        yield
        return
    port = _free_port()
    # -P: the scripts' folder is no place to import from; a file there may be named like a standard module.
    command = [sys.executable, '-P', os.path.abspath(__file__), '--logdir', os.path.abspath(logdir), '--port', str(port), '--host', _HOST]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = threading.Event()
    address = f'http://{_HOST}:{port}/'
    threading.Thread(target=_announce, args=(child, address, said, say), daemon=True).start()
    try:
        yield
    finally:
        child.kill()
        if not said.is_set():
            say(f'The run was over before TensorBoard answered at {address}; to look at it now: tensorboard --logdir={logdir}')
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_END_SECS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _announce(child: subprocess.Popen[bytes], address: str, said: threading.Event, say: Callable[[str], None]) -> None:
    end = time.monotonic() + _START_SECS
    while child.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            said.set()
            say(f'TensorBoard at {address}')
            return
        time.sleep(0.2)
    if child.returncode not in (None, -9):
        said.set()
        say(f'TensorBoard ended with {child.returncode} before it answered; see: {sys.executable} -m tensorboard.main --logdir=...')


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == '__main__':
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module('tensorboard.main', run_name='__main__', alter_sys=True)
