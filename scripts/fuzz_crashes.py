"""Kills a small training at random, again and again, and damages its newest files: python scripts/fuzz_crashes.py --seconds=600.

Exit code 1, with what was wrong, where a training does not go on from its last published whole checkpoint, begins with
values that are not finite or with stray files, or ends with other examples or losses than one that was let alone.
"""

import os
import pathlib
import shutil
import sys
import tempfile

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
os.environ['CUDA_VISIBLE_DEVICES'] = '-1'  # a GPU's driver does not survive a fork
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _faults, _flags, _main


def define() -> flags.FlagValues:
    """How long, and which moments."""
    values = flags.FlagValues()
    seconds = _flags.Option('seconds', 600.0, 'no other trainer is started after so long', kind=float)
    seed = _flags.Option('seed', 1, 'of the moments and the damages', kind=int)
    _flags.add(values, 'Fuzzing: how long, and which moments.', seconds, seed)
    return values


def main(values: flags.FlagValues) -> int:
    """Kills and damages until the time is over, and prints what came of it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix='towers-fuzz-'))
    made, problems = _faults.fuzz(folder, values.seconds, values.seed, lambda text: print(text, flush=True))
    _main.print_table({**made, 'problems': len(problems)})
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f'The trainings are in {folder}.', file=sys.stderr)
        return _main.FAILED
    shutil.rmtree(folder)
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
