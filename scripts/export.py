"""Writes a checkpoint as a SavedModel: python scripts/export.py --model_dir=runs/lenet-digits --checkpoint=best --keep_best=accuracy.

Model, data and all else are those of the run, as it recorded them, unless flags say otherwise.
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
    """The flags of a training, and what is exported."""
    values = _flags.define()
    which = _flags.Option('checkpoint', 'final', 'final: the newest whole one; best: by --keep_best; a step; or a prefix')
    frozen = _flags.Option('frozen', False, 'also a graph whose variables are constants, frozen_graph.pb', kind=bool)
    _flags.add(values, 'Export: what is written.', which, frozen)
    return values


def main(values: flags.FlagValues) -> int:
    """Exports and says where."""
    values = _flags.with_record(define(), values, sys.argv)
    work = _zoo.load(values)
    folder = towers.export(work.model, work.dataset, _flags.to_config(values), checkpoint=values.checkpoint, frozen=values.frozen)
    _main.print_table({'exported': folder})
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
