"""A logged training that ends as scripts/train.py does: 75 where a signal has stopped it. `stopped_training.py TOWERS STEPS [SETTINGS]`."""

import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / 'faults')]

import logged_training  # noqa: E402

STOPPED = 75

if __name__ == '__main__':
    result = logged_training.main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(STOPPED if result.stopped_by == 'signal' else 0)
