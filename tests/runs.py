"""A run directory for tests of those who read it: checkpoints of known values, published as a training does."""

import os
import zlib

import harness
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest


def config(model_dir, **changes):
    """A Config for an evaluation on fake devices."""
    return towers.Config(model_dir=model_dir and str(model_dir), device='cpu', **harness.THREADS, **changes)


def publish(model_dir, step, *, final=False, **values):
    """Saves `values` (variable -> array) as the checkpoint of `step`, with a plain saver, and its manifest last."""
    os.makedirs(model_dir, exist_ok=True)
    prefix = manifest.prefix_of(str(model_dir), step)
    save(prefix, global_step=np.int64(step), examples_seen=np.int64(10 * step), **values)
    files = {os.path.basename(path): measure(path) for path in (prefix + '.index', prefix + '.data-00000-of-00001')}
    manifest.write(str(model_dir), manifest.Manifest(step=step, examples=10 * step, files=files, final=final))
    return prefix


def measure(path):
    with open(path, 'rb') as file:
        content = file.read()
    return {'size': len(content), 'crc32': zlib.crc32(content)}


def save(prefix, **values):
    """Writes `values` as TensorFlow's own saver does."""
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.Saver({name: tf.Variable(value, name=name) for name, value in values.items()})
        session.run(tf.global_variables_initializer())
        saver.save(session, prefix, write_meta_graph=False, write_state=False)
