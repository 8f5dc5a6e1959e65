"""What only a real GPU shows; run with -m gpu."""

import os
import pathlib
import subprocess
import sys

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import physical

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parent.parent
STEP = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import harness
import tensorflow.compat.v1 as tf
import towers
from towers.jobs import program

def model(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))

settings = towers.Config(device='gpu', optimizer='sgd', learning_rate=1.0, global_batch_size=4, {options})
with harness.started(model, harness.numbers(1, 2, 3, 4), settings) as run:
    run.steps(1)
    print(len([d for d in run.session.list_devices() if d.device_type == 'GPU']), run.variables()['w'])
    print([d.memory_limit_bytes >> 20 for d in run.session.list_devices() if d.device_type == 'GPU'])
"""


def step(**options):
    """A training step in a process of its own, since a process has one set of GPU options; the lines that it prints."""
    text = STEP.format(root=str(ROOT), tests=str(ROOT / 'tests'), options=', '.join(f'{name}={value!r}' for name, value in options.items()))
    done = subprocess.run([sys.executable, '-c', text], capture_output=True, text=True, timeout=300, check=True, env=dict(os.environ))
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ('options', 'towers_', 'limits'),
    [
        ({'num_gpus': 1}, 1, None),
        ({'num_gpus': 1, 'gpu_memory_limit_mb': 1000}, 1, [1000]),
        ({'num_gpus': 2, 'towers_per_gpu': 2, 'gpu_memory_limit_mb': 1000}, 2, [1000, 1000]),
        ({'num_gpus': 2, 'towers_per_gpu': 2}, 2, None),
        ({'num_gpus': 1, 'gpu_thread_mode': 'gpu_private', 'gpu_thread_count': 2}, 1, None),
        ({'num_gpus': 1, 'gpu_allocator': 'cuda_malloc_async'}, 1, None),
        ({'num_gpus': 1, 'xla': True}, 1, None),
        ({'num_gpus': 2, 'towers_per_gpu': 2, 'strategy': 'collective'}, 2, None),
        ({'num_gpus': 2, 'towers_per_gpu': 2, 'input_pipeline': 'sharded', 'exact_resume': False, 'prefetch_to_device': True}, 2, None),
    ],
)
def test_options_take_effect_and_change_no_number(options, towers_, limits):
    counted, found = step(**options)
    assert counted == f'{towers_} -1.5'
    assert limits is None or found == str(limits)


def test_the_machine_says_its_gpus():
    assert len(physical.query()) >= len(tf.config.list_physical_devices('GPU')) > 0
    assert all(name.startswith('GPU-') and size > 0 for name, size in physical.query())


def strings(batch, *, training):
    tf.strings.join(['no kernel', 'on a GPU'])
    return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))


def test_what_has_no_kernel_is_listed():
    settings = towers.Config(device='gpu', placement='strict', global_batch_size=2)
    with pytest.raises(ValueError, match=r'StringJoin \(StringJoin\) from .*GPU:0'):
        towers.train(strings, harness.rows(np.float32([1, 2])), settings)
