"""Lines of a command's results, in a file or on the standard output."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from towers import errors


@contextlib.contextmanager
def lines(path: str | None) -> Iterator[Callable[[str], None]]:
    """Yields the function that writes a line; at the end of the `with` block all of them are written.

    Args:
      path: the file, as --output names it; None = the standard output.

    Raises:
      ValueError: there can be no such file.
      BrokenPipeError: nobody reads the standard output any more.
      NotWritten: the disk is full, or the like; what is there ends in the middle.
    """
    try:
        file = open(path, 'w', encoding='utf-8') if path else sys.stdout
    except OSError as error:
        raise ValueError(f'--output={path} can not be made ({error.strerror}); give a file in a folder that you may write to.') from error

    def write(line: str) -> None:
        with _told(path):
            print(line, file=file)

    try:
        yield write
        with _told(path):
            file.flush()
    finally:
        if path:
            with contextlib.suppress(OSError):  # it is flushed, or was told of
                file.close()


@contextlib.contextmanager
def _told(path: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not path and isinstance(error, BrokenPipeError):
            raise
        if not path:
            let_go()
        place = f'--output={path}' if path else 'The standard output'
        remedy = 'make room there or give another place, and run the command again.'
        raise errors.NotWritten(f'{place} could not be written to its end ({error.strerror}), so it is cut off; {remedy}') from error


def let_go() -> None:
    """Sends what Python still holds of the standard output nowhere, since it would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
