"""How much memory a training needs, before it runs: python scripts/plan.py --model=resnet20 --dataset=synthetic --num_gpus=4.

Takes the flags of scripts/train.py. With --measure a few steps are made, and stand beside what was predicted.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

from scripts import _flags, _main, _output, _zoo
from towers.jobs import program
from towers.planner import plan, shown


def define() -> flags.FlagValues:
    """The flags of a training and how the plan is made and shown."""
    values = _flags.define()
    measure = _flags.Option('measure', False, 'make some steps and show what they took, too', kind=bool)
    as_json = _flags.Option('json', False, 'one JSON object', kind=bool)
    _flags.add(values, 'Plan: how it is made and shown.', measure, as_json)
    return values


def main(values: flags.FlagValues) -> int:
    """Prints the plan."""
    work = _zoo.load(values)
    config = _flags.to_config(values, work.recipe)
    made = program.make(work.model, work.dataset, config)
    examples = config.examples_per_step(len(made.placement.towers))
    predicted = plan.predict(made, examples=examples)
    real = plan.measure(made, examples=examples) if values.measure else None
    with _main.shown_to_the_end(until_signal=False), _output.lines(None) as write:
        write(shown.as_json(predicted, real) if values.json else '\n'.join(shown.lines(predicted, real)))
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
