"""Makes a step that was not finite again: python scripts/replay.py runs/mine/bundles/step-6.

It names the first operation whose result was not finite, and the line that made it. Model, data and all else are those
of the run, as it recorded them, unless flags say otherwise.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

import towers
from scripts import _flags, _main, _zoo


def define() -> flags.FlagValues:
    """The flags of a training and which step to make again."""
    values = _flags.define()
    bundle = _flags.Option('bundle', None, 'folder that the training named; may stand without --bundle=')
    tower = _flags.Option('tower', None, 'whose inputs; those of the first tower that was bad if not given', kind=int | None)
    _flags.add(values, 'Step to make again: which bundle.', bundle, tower)
    return values


def main(values: flags.FlagValues) -> int:
    """Makes the step again and prints what was found."""
    if values.bundle is None:
        raise ValueError('No bundle was given; expected the folder that the training named, e.g. runs/mine/bundles/step-6.')
    values = _flags.recorded(define(), values, values.bundle, sys.argv)
    work = _zoo.load(values)
    found = towers.replay(work.model, work.dataset, values.bundle, tower=values.tower, device=values.device)
    _main.print_table({'step': found.step, 'tower': found.tower, 'loss': found.loss})
    if found.first is None:
        print(found.why_finite())
        return _main.FAILED
    for title, fault in {'first not finite': found.first, 'first nan': found.first_nan}.items():
        if fault is not None and (title == 'first not finite' or fault != found.first):
            print(f'{title}:')
            _main.print_table({f'  {name}': text for name, text in fault.rows().items()})
    return _main.DONE


if __name__ == '__main__':
    sys.argv[1:2] = [f'--bundle={argument}' if not argument.startswith('-') else argument for argument in sys.argv[1:2]]
    _main.run(main, define(), __doc__)
