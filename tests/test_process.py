import contextlib
import gc
import json
import pathlib
import subprocess
import sys

import harness
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import config
from towers.graph import devices
from towers.jobs import program
from towers.run import process

ROOT = pathlib.Path(__file__).resolve().parent.parent


def claim(owner, device='cpu', **options):
    asked = config.DeviceConfig(device=device, **options)
    return owner.claim(asked, devices.place(asked, gpus=4))


def threads(proto):
    return proto.intra_op_parallelism_threads, proto.inter_op_parallelism_threads


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """All GPUs are there, and nothing has run eagerly."""
    monkeypatch.setattr(tf.config.threading, 'set_intra_op_parallelism_threads', lambda count: None)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setenv('TF_GPU_THREAD_MODE', 'global')


@pytest.mark.parametrize(
    ('first', 'second', 'told'),
    [
        ({'intra_op_threads': 3}, {'intra_op_threads': 2}, ('--intra_op_threads=3', '--intra_op_threads=2')),
        ({'device': 'gpu'}, {'device': 'gpu', 'gpu_memory_fraction': 0.5}, ('--gpu_memory_fraction=None', '--gpu_memory_fraction=0.5')),
        ({'device': 'gpu', 'visible_gpus': (2,)}, {'device': 'gpu', 'visible_gpus': (1,)}, ('--visible_gpus=2', '--visible_gpus=1')),
        ({'device': 'gpu', 'gpu_allow_growth': False}, {'device': 'gpu'}, ('--gpu_allow_growth=False', '--gpu_allow_growth=True')),
    ],
)
def test_a_second_set_of_options_is_an_error_that_names_both_places(first, second, told):
    owner = process.Owner()
    lines = [claim.__code__.co_firstlineno + 2] * 2  # where the options are asked for
    claim(owner, **first)
    claim(owner, **first)
    with pytest.raises(ValueError) as error:
        claim(owner, **second)
    places = [f'{__file__}:{line}' for line in lines]
    message = str(error.value)
    assert message.startswith(f'This process had its options set at {places[0]}: {told[0]}; {places[1]} asks for {told[1]}.')


def test_fewer_gpus_in_the_same_order_and_sessions_on_the_cpu_go_together():
    owner = process.Owner()
    claim(owner, 'gpu', num_gpus=4, gpu_memory_fraction=0.5)
    claim(owner, 'gpu', num_gpus=1, gpu_memory_fraction=0.5)
    claim(owner, 'cpu', num_gpus=2, gpu_memory_fraction=0.1)


def test_threads_that_nobody_gave_are_those_the_process_has():
    owner = process.Owner()
    assert threads(claim(owner, intra_op_threads=3, inter_op_threads=5)) == (3, 5)
    assert threads(claim(owner, num_gpus=2)) == (3, 5)
    assert threads(claim(owner, per_session_threads=True, inter_op_threads=1)) == (3, 1)


def test_threads_given_too_late_are_said_to_have_no_effect(caplog):
    owner = process.Owner()
    claim(owner, num_gpus=1)
    with caplog.at_level('WARNING'):
        assert threads(claim(owner, intra_op_threads=2)) == (0, 0)
    assert '--intra_op_threads=2' in caplog.text and caplog.text.count(__file__) == 2


COUNT = f"""
import collections, json, pathlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
import harness
import tensorflow.compat.v1 as tf
import towers

how = sys.argv[2]
if how == 'eager':
    with tf.init_scope():
        tf.zeros([])

def dataset():
    made = harness.numbers(*range(64))()
    return made if how == 'plain' else made.flat_map(lambda x: tf.data.Dataset.from_tensors(x).map(lambda y: y + 1))

def model(batch):
    weights = harness.variable('w', 512 * [512 * [0.01]])
    return towers.ModelOutput(tf.reduce_mean(tf.matmul(tf.tile(batch[:, None], [1, 512]), weights)))

settings = towers.Config(num_gpus=2, device='cpu', optimizer='sgd', **json.loads(sys.argv[1]))
with harness.started(lambda batch, training: model(batch), dataset, settings) as run:
    run.steps(3)
    names = [(task / 'comm').read_text().strip() for task in pathlib.Path('/proc/self/task').iterdir()]
    print(json.dumps(collections.Counter(names)))
"""


def threads_of(intra, inter, how):
    """The threads of a process by the names that TensorFlow gives its pools, those inside operations bear the program's; and its stderr."""
    asked = json.dumps({'intra_op_threads': intra, 'inter_op_threads': inter})
    done = subprocess.run([sys.executable, '-c', COUNT, asked, how], capture_output=True, text=True, timeout=120, check=True)
    counts = json.loads(done.stdout)
    return counts.pop('tf_Compute'), sum(count for name, count in counts.items() if not name.startswith('tf_')), done.stderr


@pytest.mark.parametrize('how', ['plain', 'mapped'])
def test_a_process_has_the_threads_it_was_given(how):
    """A dataset that maps a function inside of one has TensorFlow make its devices, before there is a session for the training."""
    few, more = threads_of(1, 1, how), threads_of(3, 6, how)
    assert more[0] - few[0] == 5
    assert more[1] - few[1] == 2
    assert 'eagerly' not in few[2] + more[2]


def test_who_ran_tensorflow_before_is_told_that_its_threads_stay():
    assert 'TensorFlow has run something eagerly before' in threads_of(7, 1, 'eager')[2]


@pytest.mark.parametrize('is_on', [True, False])
@pytest.mark.parametrize('is_wrong', [False, True])
def test_nobody_looks_for_garbage_while_a_graph_is_built(is_on, is_wrong):
    seen, was_on = [], gc.isenabled()

    def model(batch, *, training):
        seen.append(gc.isenabled())
        return None if is_wrong else towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))

    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(ValueError, match='must return a towers.ModelOutput') if is_wrong else contextlib.nullcontext():
            program.make(model, harness.numbers(1, 2), harness.config())
        assert gc.isenabled() == is_on and seen == [False]
    finally:
        (gc.enable if was_on else gc.disable)()
