"""Who works in a run directory, or on this machine: python scripts/sessions.py --model_dir=runs/lenet-digits.

Without --model_dir: all sessions of yours on this machine.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
import time

from absl import flags

from scripts import _flags, _main
from towers.checkpoint import leases
from towers.sessions import admission, host, ledger, membership, report

_CLEAR = '\x1b[H\x1b[2J'


def define() -> flags.FlagValues:
    """Which sessions, and how they are shown."""
    values = flags.FlagValues()
    where = _flags.Option('model_dir', None, 'run directory; all of this machine if not given', kind=str | None)
    as_json = _flags.Option('json', False, 'a JSON object for each session, a line each', kind=bool)
    watch = _flags.Option('watch', False, 'again and again, until a signal', kind=bool)
    every = _flags.Option('every_secs', 2.0, 'seconds between two looks', kind=float)
    _flags.add(values, 'Sessions: which, and how they are shown.', where, as_json, watch, every)
    return values


def main(values: flags.FlagValues) -> int:
    """Shows the sessions once, or until a signal."""
    folder = os.path.join(values.model_dir, membership.FOLDER) if values.model_dir else host.folder()
    if values.model_dir and not os.path.isdir(values.model_dir):
        raise ValueError(f'--model_dir={values.model_dir} is no folder; give that of a run, or none for this machine.')
    if values.every_secs <= 0:
        raise ValueError(f'--every_secs must be above 0, got {values.every_secs:g}; give e.g. 2.')
    with _main.shown_to_the_end(until_signal=values.watch):
        while True:
            rows = report.rows(folder)
            lines = report.json_lines(rows) if values.json else admission.columns(report.cells(rows))
            clear = _CLEAR if values.watch and not values.json and sys.stdout.isatty() else ''
            print(clear + '\n'.join(lines), flush=True)
            ledger.sweep_here(folder)  # what was shown once
            if values.model_dir:
                leases.sweep(values.model_dir)
            if not values.watch:
                break
            time.sleep(values.every_secs)
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
