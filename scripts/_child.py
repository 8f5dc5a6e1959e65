"""A command as a child that ends when its parent does, however that ends: python -P scripts/_child.py COMMAND ARGUMENTS.

Its standard input is a pipe that only the parent holds.
"""

import os
import runpy
import signal
import sys
import threading
import time

_GRACE_SECS = 30.0


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECS)
    os._exit(1)


if __name__ == '__main__':
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[:] = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as for a command; its first lines replace it
    runpy.run_path(sys.argv[0], run_name='__main__')
