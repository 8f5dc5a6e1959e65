"""Predictions for examples in files, a JSON object a line: python scripts/predict.py --model_dir=runs/lenet-digits --files=new.npz.

Files: .npz (an array for each feature, first axis the example), .npy (of --feature alone), .jsonl (an object with the features
a line), and images (.png, .jpg, .bmp, .gif), which become --feature with values from 0 to 1.
"""

import contextlib
import json
import os
import sys

sys.path[0:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getcwd()]
from scripts import _start

_start.load_tensorflow(sys.argv)
from absl import flags

import towers
from scripts import _examples, _flags, _main, _output, _zoo


def define() -> flags.FlagValues:
    """The flags of a training, and what is predicted."""
    values = _flags.define()
    files = _flags.Option('files', (), 'with the examples, in this order', kind=tuple[str, ...])
    feature = _flags.Option('feature', 'image', 'what an array of .npy or an image is to the model')
    output = _flags.Option('output', None, 'file for the predictions; the standard output if not given', kind=str | None)
    which = _flags.Option('checkpoint', 'final', 'final: the newest whole one; best: by --keep_best; a step; or a prefix')
    _flags.add(values, 'Predictions: of what, and where to.', files, feature, output, which)
    return values


def main(values: flags.FlagValues) -> int:
    """Reads, predicts and writes, a batch at a time."""
    if not values.files:
        raise ValueError('No files were given; expected examples, e.g. --files=new.npz.')
    values = _flags.with_record(define(), values, sys.argv)
    work = _zoo.load(values)
    examples = _examples.read(values.files, values.feature)
    made = towers.predict(work.model, work.dataset, _flags.to_config(values), examples=examples, checkpoint=values.checkpoint)
    with _main.shown_to_the_end(until_signal=False), contextlib.closing(made), _output.lines(values.output) as write:
        for number, prediction in enumerate(made):
            row = {name: value.item() if not value.ndim else value.tolist() for name, value in prediction.items()}
            write(json.dumps({'example': number, **row}))
    return _main.DONE


if __name__ == '__main__':
    _main.run(main, define(), __doc__)
