"""Evaluates a run's checkpoints: python scripts/evaluate.py --model_dir=runs/lenet-digits.

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
from towers import config as config_lib
from towers.evaluators import evaluation, results, supervisor, unsaved


def define() -> flags.FlagValues:
    """The flags of a training and which checkpoints to evaluate."""
    values = _flags.define()
    newest = _flags.Option('checkpoint', None, 'prefix of the one to evaluate; the newest whole one if not given')
    each = _flags.Option('continuous', False, "each new one until the job's last, or --eval_idle_secs without any", kind=bool)
    live = _flags.Option('live', False, 'what a training on this machine serves by --serve_snapshots, in place of checkpoints', kind=bool)
    _flags.add(values, 'Checkpoints to evaluate: which are read.', newest, each, live)
    return values


def main(values: flags.FlagValues) -> int:
    """Evaluates and prints the metrics."""
    if values.continuous:
        _flags.await_record(values, values.eval_idle_secs)
    values = _flags.with_record(define(), values, sys.argv)
    config = _flags.to_config(values)
    work = _zoo.load(values)
    declared = {each.name: each for each in supervisor.of(config, work.evaluators or work.eval_dataset)}
    chosen = declared.get(config.eval_name) or supervisor.Evaluator(config, work.eval_dataset)
    if chosen.dataset is None:
        raise ValueError('Nothing to evaluate on, got no --eval_dataset; give one, of the zoo or as package.module:function.')
    if values.live:
        config_lib.require(values.checkpoint is None, f'--live takes no --checkpoint, got {values.checkpoint}; give one of the two.')
        found = unsaved.evaluate(work.model, chosen.dataset, chosen.config, continuous=values.continuous)
    else:
        found = towers.evaluate(work.model, chosen.dataset, chosen.config, checkpoint=values.checkpoint, continuous=values.continuous)
    _main.print_table(found)
    written = results.Results(evaluation.run_directory(config), chosen.name).holds(found)
    return _main.DONE if found and (written or values.continuous) else _main.FAILED  # no checkpoint ever came, or the disk is full


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
