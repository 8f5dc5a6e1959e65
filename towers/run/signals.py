"""Work in a thread of its own, so that the main thread handles signals at once though a step runs for long.

The first SIGTERM or SIGINT asks the work to stop, the second one or the end of a grace period ends the process. Between
two steps nothing is lost: the work sees the request after the step in flight and saves. A step that blocks (an input
that waits for ever) can't see it, so the process leaves without saving.
"""

import contextlib
import logging as standard_logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from absl import logging

T = TypeVar('T')

EXIT_UNSAVED = 76
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECS = 0.5
_CLOSE_SECS = 3.0  # for `close`, which may hang itself


def run_in_worker(body: Callable[[threading.Event], T], *, grace_secs: float = 60.0, close: Callable[[], None] | None = None) -> T:
    """Runs `body(stop)` in a worker thread and returns what it returns.

    The first SIGTERM or SIGINT sets `stop`; `body` should then end after the step in flight. At the second one, or after
    `grace_secs`, the process ends with exit code 76 within 5 seconds, whatever `body` does. The handlers that were there
    before are restored at the end. A graph context belongs to a thread, so `body` has to enter its own.

    Called from any other thread than the main one, or within `body`, it handles no signals (Python allows none there)
    and calls `body` directly.

    Args:
      body: gets the event to look at.
      grace_secs: time for `body` to end after the first signal.
      close: called before the process is ended, in a thread of its own and for 3 seconds at most; it may close what would
        be left behind, such as a session or child processes. Children of `multiprocessing` are ended in any case.

    Raises:
      BaseException: what `body` raised, with its own frames.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return body(stop)
    received: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the one channel that a handler may use at any moment
    watcher = threading.Thread(target=_watch, args=(received, stop, grace_secs, close), name='towers-signals', daemon=True)
    outcome: list[Any] = []
    worker = threading.Thread(target=_work, args=(body, stop, outcome), name='towers-worker', daemon=True)
    before: dict[int, Any] = {}
    try:
        for each in _SIGNALS:
            before[each] = signal.signal(each, lambda number, _: received.put(number))
        watcher.start()
        worker.start()
        while worker.is_alive():
            worker.join(_LOOK_SECS)  # a signal between Python's last look for one and the wait does not end the wait
        received.put(None)
        watcher.join()  # where it is about to end the process, no other exit may come first
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    value, error = outcome
    if error is not None:
        raise error
    return value


def _work(body: Callable[[threading.Event], Any], stop: threading.Event, outcome: list[Any]) -> None:
    try:
        outcome[:] = body(stop), None
    except BaseException as error:  # the main thread raises it again
        outcome[:] = None, error


def _watch(received: 'queue.SimpleQueue[int | None]', stop: threading.Event, grace_secs: float, close: Callable[[], None] | None) -> None:
    number = received.get()
    if number is None:
        return
    stop.set()
    name = signal.Signals(number).name
    within(
        1.0,
        lambda: logging.warning(
            '%s: stopping after the step in flight; a second signal or %g s more end the process unsaved.', name, grace_secs
        ),
    )
    try:
        number = received.get(timeout=grace_secs)
    except queue.Empty:
        reason = f'The step in flight did not end within {grace_secs:g} s'
    else:
        if number is None:
            return
        reason = f'Second signal ({signal.Signals(number).name})'
    within(1.0, lambda: logging.error('%s: ending the process without saving.', reason))
    leave(EXIT_UNSAVED, close)


def leave(code: int, close: Callable[[], None] | None = None) -> None:
    """Ends the process and its children within 5 seconds, though any other thread may be blocked for good.

    Args:
      code: exit code of the process.
      close: called before, in a thread of its own and for 3 seconds at most.
    """
    for child in multiprocessing.active_children():
        child.kill()
    if close is not None:
        within(_CLOSE_SECS, close)
    within(1.0, _flush)
    within(1.0, _remove_sources)
    os._exit(code)


def within(secs: float, work: Callable[[], object]) -> bool:
    """Does `work` in a thread of its own, which is left behind after `secs`; whether it ended in time, by an error or not.

    Even a line of a log needs this where the process has to go on: whoever reads it may have stopped reading. When Python is ending, as
    in what the garbage collector closes, no thread would start any more: then nothing is done.
    """
    if sys.is_finalizing():
        return False
    thread = threading.Thread(target=work, name='towers-within', daemon=True)
    thread.start()
    thread.join(secs)
    return not thread.is_alive()


def _remove_sources() -> None:
    """Removes what TensorFlow wrote of a user's functions that it converted; it does so itself at the end of the interpreter only."""
    for name, module in list(sys.modules.items()):
        if name.startswith('__autograph_generated_file') and module.__file__:
            with contextlib.suppress(OSError):
                os.unlink(module.__file__)


def _flush() -> None:
    for handler in standard_logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
