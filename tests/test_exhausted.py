"""Memory that ends, for real: a tensor of 4 TiB beside others that are there. TensorFlow waits 10 s for memory before it says so."""

import threading

import harness
import pytest
import runs
import tensorflow.compat.v1 as tf

import towers
from towers import errors
from towers.checkpoint import manifest
from towers.evaluators import evaluator
from towers.run import exhausted


def hungry(batch, *, training):
    weight = harness.variable('w', [1.0])
    held = tf.tile(batch[:, None] * weight, [1, 1000])  # 4000 bytes an example
    with tf.control_dependencies([held]):
        huge = tf.tile(weight[None], [1 << 20, 1 << 20])
    return towers.ModelOutput(tf.reduce_sum(held * tf.reduce_sum(tf.stop_gradient(huge))))


HELD = hungry.__code__.co_firstlineno + 2
HUGE = HELD + 2


def require(error, tower, device, lower):
    first, heading, *held, ways = error.screen.splitlines()
    assert first.startswith(f'Out of memory on {device} (tower {tower}) of the ')
    assert f'no room for float[1048576,1048576] of tower_{tower}/Tile_1, made at {__file__}:{HUGE}.' in first
    assert heading == f'The biggest of what {device} held then:'
    assert held[0].split() == ['7.8KiB', f'tower_{tower}/Tile', f'{__file__}:{HELD}']
    assert ways.startswith(f'What to lower: {lower}') and 'scripts/plan.py' in ways
    assert isinstance(error, tf.errors.ResourceExhaustedError) and '\n' not in str(error)


def test_a_training_without_memory_says_where_and_what_to_lower(tmp_path):
    settings = harness.config(n=2, global_batch_size=4, model_dir=str(tmp_path))
    with pytest.raises(errors.OutOfMemory) as caught:
        towers.train(hungry, harness.numbers(1, 2, 3, 4), settings)
    tower = 0 if '/cpu:1' in caught.value.screen.splitlines()[0] else 1
    require(caught.value, tower, f'/cpu:{tower + 1}', '--batch_size')
    assert manifest.all(str(tmp_path)) == []


def test_an_evaluator_too(tmp_path):
    runs.publish(tmp_path, 3, w=[1.0])
    settings = runs.config(tmp_path, eval_batch_size=2)
    with evaluator.Evaluator(hungry, harness.numbers(1, 2, 3, 4), settings) as session:
        [checkpoint] = manifest.all(str(tmp_path))
        session.load(checkpoint)
        with pytest.raises(errors.OutOfMemory) as caught:
            session.run(checkpoint, threading.Event())
    require(caught.value, 0, '/cpu:0', '--eval_batch_size')


def test_a_full_disk_is_another_matter():
    assert not exhausted.is_one(tf.errors.ResourceExhaustedError(None, None, '/runs/ckpt-1.data; No space left on device'))
    assert not exhausted.is_one(tf.errors.InternalError(None, None, 'OOM when allocating tensor with shape[2] and type float'))
