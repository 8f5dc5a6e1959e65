"""Losses of sides of the benchmark that begin with the same weights: side_losses.py WORKLOADS TOWERS SOURCE CHECKOUT.

Prints for each workload, the classic loop and each side of the checkout the losses of ten steps, as JSON. A process of its own, since the
checkout goes on the path and changes how TensorFlow behaves.
"""

import dataclasses
import json
import pathlib
import re
import sys
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from scripts import _start

_start.load_tensorflow([])
import tensorflow.compat.v1 as tf  # noqa: E402

from scripts._bench import checkouts, sides, workloads  # noqa: E402

STEPS, L2 = 10, 0.01


def with_fixed_weights(work):
    """The workload with a penalty, and weights that depend on their names alone, but for the first tower's prefix.

    So the copies that other towers have begin otherwise, unless the side gives them the values of the first.
    """

    def seeded(getter, name, *args, initializer=None, **options):
        initializer = initializer or tf.glorot_uniform_initializer()
        settings = initializer.get_config()
        if 'seed' in settings:
            settings['seed'] = zlib.crc32(re.sub(r'^v0?/', '', name).encode())
        return getter(name, *args, initializer=type(initializer).from_config(settings), **options)

    def model(batch, *, training):
        tf.set_random_seed(1)
        with tf.variable_scope(tf.get_variable_scope(), custom_getter=seeded):
            return work.model(batch, training=training)

    return dataclasses.replace(work, model=model, l2=L2)


def losses(side, case):
    with side(case) as step:
        return [float(step()[-1]) for _ in range(STEPS)]


def main(chosen, towers, source, checkout):
    found = {'classic': sides.classic, **{name: checkouts.side(name, checkout) for name in checkouts.named([checkout])}}
    cases = {name: sides.Case(with_fixed_weights(workloads.WORKLOADS[name]), int(towers), source) for name in chosen.split(',')}
    print(json.dumps({name: {side: losses(found[side], case) for side in found} for name, case in cases.items()}))


if __name__ == '__main__':
    main(*sys.argv[1:])
