"""Reads what a training serves as fast as it can, as a process: `live_reader.py FOLDER READS`; says in JSON what it saw."""

import json
import pathlib
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

from towers.live import reader  # noqa: E402

SHAPES = {'a': [50_000], 'b': [300, 200], 'c': []}
LIMIT_SECS = 60.0


def main(folder, reads):
    with tf.Graph().as_default():
        variables = {name: tf.get_variable(name, shape) for name, shape in SHAPES.items()}
        variables['global_step'] = tf.train.get_or_create_global_step()
    seen, torn, steps, end = 0, [], [], time.monotonic() + LIMIT_SECS
    with reader.Reader(folder, variables) as source:
        while seen < int(reads) and time.monotonic() < end:
            version = source.read()
            if version is not None:
                seen += 1
                steps.append(version.step)
                if any(not np.all(value == version.step) for value in version.values.values()):
                    torn.append(version.step)
    print(json.dumps({'reads': seen, 'torn': torn, 'steps': len(set(steps)), 'sorted': steps == sorted(steps)}))


if __name__ == '__main__':
    main(*sys.argv[1:])
