"""A training of a few numbers for the tests of checkpoints: what its variables hold follows from the step alone.

As a program it trains for ever and saves at every step, to be killed: `small_run.py FOLDER MEGABYTES KEEP`.
"""

import contextlib
import os
import pathlib
import sys

import numpy as np
import tensorflow.compat.v1 as tf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

from towers import config, structs  # noqa: E402
from towers.checkpoint import manifest, restore, saver  # noqa: E402
from towers.input import positions  # noqa: E402

EXAMPLES = 7  # for each step


class Run:
    """Graph, session, saver and restorer of the small training; `a` and `b` are the step's number everywhere."""

    def __init__(self, model_dir, *, size=3, fingerprint='shuffle-50', extra=None, **settings):
        self.model_dir = str(model_dir)
        with tf.Graph().as_default() as graph:
            zeros = {'initializer': tf.zeros_initializer(), 'use_resource': True}
            self.a = tf.get_variable('layer/a', [size], **zeros)
            self.b = tf.get_variable('layer/b', [size], **zeros)
            self.global_step = tf.get_variable('global_step', [], tf.int64, trainable=False, **zeros)
            seen = tf.get_variable('examples_seen', [], tf.int64, trainable=False, **zeros)
            self.variables = {'layer/a': self.a, 'layer/b': self.b, 'global_step': self.global_step, 'examples_seen': seen}
            extra = extra() if extra else {}
            self.variables.update({name: variable for name, variable in extra.items() if not isinstance(variable, list)})
            self.extra = extra
            iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(50).shuffle(50, seed=1).repeat().prefetch(2))
            self.example = iterator.get_next()
            with tf.control_dependencies([self.example]):
                updates = [variable.assign_add(tf.ones_like(variable)).op for variable in (self.a, self.b, self.global_step)]
                self.train = tf.group(*updates, seen.assign_add(EXAMPLES).op)
            self.input = _input(iterator, fingerprint)
            facts = saver.Facts({'towers': 2})
            self.saver = saver.Saver(
                self.variables, self.input, config=config.CheckpointConfig(**settings), model_dir=self.model_dir, facts=facts
            )
            self.restorer = restore.Restorer(self.variables, self.input)
            init = tf.group(tf.global_variables_initializer(), iterator.initializer)
            ends = {name: tf.concat([self.a[1:], [value]], 0) for name, value in (('nan', np.nan), ('inf', np.inf))}
            self.changes = {name: self.a.assign(value).op for name, value in {**ends, 'huge': tf.fill([size], 3e38)}.items()}
            graph.finalize()
        self.graph = graph
        self.session = tf.Session(graph=graph, config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2))
        self.session.run(init)
        self._step = self.session.make_callable([self.example, self.train])

    def steps(self, count=1):
        """Makes so many steps and returns the examples they took."""
        return [int(self._step()[0]) for _ in range(count)]

    def save(self, **how):
        self.saver.save(self.session, **how)
        assert self.saver.wait(60)

    def resume(self):
        found = manifest.newest(self.model_dir)
        self.restorer.restore(self.session, found)
        return found.step

    def values(self):
        return self.session.run({'a': self.a, 'b': self.b, 'step': self.global_step})


@contextlib.contextmanager
def started(model_dir, **settings):
    """A `Run` whose session is closed afterwards."""
    run = Run(model_dir, **settings)
    try:
        yield run
    finally:
        run.saver.close(60)
        run.session.close()


def steps_in(model_dir):
    return [found.step for found in manifest.all(str(model_dir))]


def names_in(model_dir):
    return sorted(os.listdir(model_dir))


def names_of(*steps):
    """The files of a run directory that holds the checkpoints of `steps` and nothing else."""
    endings = ('data-00000-of-00001', 'index', 'json')
    return sorted(['checkpoint', *[f'ckpt-{step}.{ending}' for step in steps for ending in endings]])


def contents(prefix):
    """The values in a checkpoint, as TensorFlow's own reader sees them."""
    reader = tf.train.load_checkpoint(prefix)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def _input(iterator, fingerprint):
    position, restore_position = positions.make([iterator])
    return structs.Input(
        batches=(),
        examples=tf.constant(EXAMPLES, tf.int64),
        initializer=iterator.initializer,
        ended=(),
        position=position,
        restore_position=restore_position,
        fingerprint=fingerprint,
    )


def main(model_dir, megabytes, keep):
    with started(model_dir, size=int(float(megabytes) * 2**17), keep_checkpoints=int(keep)) as run:
        if manifest.newest(model_dir):
            run.resume()
        run.saver.prepare(run.session)
        while True:
            run.steps()
            run.saver.save(run.session)
            print(run.saver.newest, flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
