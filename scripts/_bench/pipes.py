"""What a process that measures says to the one that leads it."""

import select
import subprocess


def line(process: subprocess.Popen[str], secs: float) -> str | None:
    """The next line that a process writes; '' where it has ended, None where it wrote none in so many seconds, and is killed.

    Args:
      process: answers a line for each that it reads, so that no second one is on its way.
      secs: most seconds to wait.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], secs)[0]:
        process.kill()
        return None
    return process.stdout.readline()
