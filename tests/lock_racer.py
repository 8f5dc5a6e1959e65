"""A process that takes the lock of a run directory, without the seconds that loading TensorFlow takes.

`lock_racer.py FOLDER hold` says `held` or why not, and holds it for ever. `lock_racer.py FOLDER race SEED SECS` takes it again
and again, sometimes dying with it, and exits with 1 where it isn't alone; it says how often it took it.
"""

import contextlib
import os
import pathlib
import random
import signal
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
towers = types.ModuleType('towers')  # the package's own file would load TensorFlow
towers.__path__ = [str(ROOT / 'towers')]
sys.modules['towers'] = towers

from towers.directory import lock  # noqa: E402


def hold(folder):
    """Starts at the moment that the file `go` appears, if there is one to wait for."""
    while os.path.exists(os.path.join(folder, 'wait')) and not os.path.exists(os.path.join(folder, 'go')):
        pass
    try:
        with lock.WriterLock(folder) as held:
            print('held', held.generation, flush=True)
            signal.pause()
    except ValueError as error:
        print(error, flush=True)


def race(folder, seed, secs):
    """Takes the lock, is alone for a moment, and gives it back or dies."""
    moments, marker = random.Random(seed), os.path.join(folder, 'inside')
    taken, end = 0, time.monotonic() + float(secs)
    while time.monotonic() < end:
        with contextlib.suppress(ValueError), lock.WriterLock(folder) as held:
            taken += 1
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))  # fails where another one is inside
            held.check()
            time.sleep(moments.uniform(0.0, 0.003))
            held.check()
            os.unlink(marker)
            if moments.random() < 0.05:
                print(taken, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(moments.uniform(0.0, 0.002))
    print(taken, flush=True)


if __name__ == '__main__':
    {'hold': hold, 'race': race}[sys.argv[2]](sys.argv[1], *sys.argv[3:])
