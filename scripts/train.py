"""Trains a model on N GPUs, or on N CPU devices in their place: python scripts/train.py --num_gpus=4.

The model and the data are the zoo's or yours: --model=my_package.my_module:model --dataset=my_package.my_data:train.
"""

import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

import towers
from scripts import _cluster, _flags, _main, _recipe, _tensorboard, _zoo


def main(values: flags.FlagValues) -> int:
    """Trains and says how it ended."""
    work = _zoo.load(values)
    config, task = _cluster.found(values, _flags.to_config(values, work.recipe))
    if task is not None and task.job != 'master':
        return _cluster.serve(_cluster.offering(values, config), task.job, task.index)
    model_dir = str(config.model_dir)
    record = _flags.Record(values, model_dir, {**work.record, **_recipe.recorded(config, work.recipe)})
    with _tensorboard.beside(model_dir, wanted=config.tensorboard):
        result = towers.train(work.model, work.dataset, config, eval_dataset=work.evaluators or work.eval_dataset, hooks=(record,))
    single = [(name, *score) for name, scores in result.evaluations.items() for score in scores.items()]
    scores = {f'{name} {metric}': value for name, metric, value in single if metric not in ('step', 'examples')}
    if result.stopped_by != 'signal':
        scores |= {f'{name} evaluation': 'none (WARNING)' for name, found in result.evaluations.items() if not found}
    made = {'training loss': result.loss, 'examples/s': round(result.examples_per_sec)} if result.steps_run else {}
    bad = {'records left out': len(work.left_out)} if work.left_out else {}
    done = {'steps': f'{result.step} ({result.steps_run} in this run)', **made, **bad}
    look = {'run directory': model_dir, 'TensorBoard': _main.tensorboard_command(model_dir)}
    _main.print_table(scores | done | look)
    if result.stopped_by == 'signal':
        return _main.stopped(result.step, result.steps_run, from_scratch=config.from_scratch)
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, _flags.define(), __doc__)
