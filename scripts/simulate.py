"""How a model would scale over machines, on paper: python scripts/simulate.py --model=resnet50 --machines=16 --num_gpus=8.

Takes the flags of scripts/train.py for the model and its data. One tower is measured here; give --tower_ms for another device's.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _curve, _flags, _main, _zoo


def define() -> flags.FlagValues:
    """The flags of a training, and the machines."""
    values = _flags.define()
    _flags.add(
        values,
        'Machines: what a step is simulated on.',
        _flags.Option('machines', 1, 'largest number of machines; powers of two up to it are shown', kind=int),
        _flags.Option('ps', 0, 'machines that hold the parameters, beside them', kind=int),
        _flags.Option('bandwidth', '100Gb', "of each machine's network, in each direction: 10Gb, 400Gb, 1GB (bits and bytes a second)"),
        _flags.Option('bus', '12GB', "between a machine's memory and its GPUs"),
        _flags.Option('memory', '20GB', "of a machine's memory"),
        _flags.Option('message_us', 50.0, 'what a tensor costs beside its bytes, in microseconds', kind=float),
        _flags.Option('tower_ms', None, 'milliseconds in which one tower computes a step, as measured elsewhere', kind=float),
    )
    return values


def main(values: flags.FlagValues) -> int:
    """Prints the curve."""
    work = _zoo.load(values)
    config = _flags.to_config(values, work.recipe)
    for line in _curve.lines(work.model, work.dataset, config, values):
        print(line)
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
