"""Tries everything that only GPUs can show, in under 8 minutes, and prints a report to paste: python scripts/check_gpu.py.

One GPU is enough: it is split into virtual ones. `--device=cpu` rehearses the checks on fake GPUs. It exits with 0 where all hold,
with 1 where one does not, and with 2 where there is no GPU.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _checks, _flags, _main


def define() -> flags.FlagValues:
    """The few flags of this command."""
    values = flags.FlagValues()
    _flags.add(
        values,
        'Checks.',
        _flags.Option('device', 'gpu', 'cpu rehearses them on fake GPUs'),
        _flags.Option('towers', 2, 'number of towers; more than there are GPUs become virtual ones', kind=int),
        _flags.Option('limit_secs', 480, 'for all checks together', kind=int),
    )
    return values


def main(values: flags.FlagValues) -> int:
    """Runs the checks one after the other and says which hold."""
    results = _checks.run(values.device, values.towers, limit_secs=values.limit_secs)
    print('\n'.join(results.lines))
    return _main.DONE if results.good else _main.FAILED


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
