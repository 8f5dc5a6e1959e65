"""How much a step is made of, in exact numbers: operations, what crosses between devices, and fetch sets."""

import collections

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import writes
from towers.jobs import program, training

EXAMPLES = np.arange(48, dtype=np.float32).reshape(16, 3)
IDS = np.arange(32, dtype=np.int64).reshape(16, 2)


def loss_of(values):
    return towers.ModelOutput(tf.reduce_mean(tf.square(values)))


def dense(batch, *, training):
    hidden = tf.nn.relu(tf.matmul(batch, tf.get_variable('w1', [3, 4])) + tf.get_variable('b1', [4]))
    return loss_of(tf.reduce_sum(tf.matmul(hidden, tf.get_variable('w2', [4, 1])), 1))


def embedding(batch, *, training):
    rows = tf.nn.embedding_lookup(tf.get_variable('table', [40, 2]), batch)
    return loss_of(tf.reduce_sum(tf.reduce_mean(rows, 1) * tf.get_variable('w', [2]), 1))


MODELS = {'dense': (dense, EXAMPLES), 'embedding': (embedding, IDS)}


def made(name, n, strategy='parameter_server', **changes):
    model, data = MODELS[name]
    settings = harness.config(strategy, n, global_batch_size=96, **changes)  # all numbers of towers below split it evenly
    return program.make(model, lambda: tf.data.Dataset.from_tensor_slices(data).repeat(), settings)


def operations(step):
    """The operations that a step without summaries runs, before TensorFlow makes fewer of them."""
    sums = [tensor for metric in step.metrics.values() for tensor in metric.sums]
    return writes.ancestors([*step.ops, *[mark.advance for mark in step.marks], *[t.op for t in (*step.report.values(), *sums)]])


def by_scope(ops):
    return collections.Counter(op.name.split('/')[0] for op in ops)


def to_host(ops):
    """The tensors that the parameter device takes from others, each once."""
    host = [op for op in ops if op.device.upper().endswith('CPU:0')]
    return {tensor for op in host for tensor in op.inputs if tensor.op.device not in ('', op.device) and tensor.dtype != tf.resource}


@pytest.mark.parametrize('strategy', harness.STRATEGIES)
@pytest.mark.parametrize('name', MODELS)
def test_each_further_tower_adds_the_same_number_of_operations(name, strategy):
    counts = {n: len(made(name, n, strategy).graph.get_operations()) for n in (2, 3, 4, 8, 16, 32)}
    assert counts[4] - counts[3] == counts[3] - counts[2] and counts[8] - counts[4] == 4 * (counts[4] - counts[3])
    assert counts[32] - counts[16] == 16 * (counts[4] - counts[3])
    assert counts[4] <= 2.2 * counts[2]


@pytest.mark.parametrize(('name', 'tower'), [('dense', 37), ('embedding', 52)])
def test_a_towers_operations_in_a_step(name, tower):
    for n in (1, 2, 4):
        scopes = by_scope(operations(made(name, n).step))
        assert {scopes[f'tower_{index}'] for index in range(n)} == {tower}


@pytest.mark.parametrize('name', MODELS)
def test_penalty_and_update_do_not_grow_with_the_towers(name):
    found = []
    for n in (1, 2, 8):
        ops = operations(made(name, n, l2=0.1, optimizer='momentum').step)
        applied = [op for op in ops if op.name.split('/')[0] in ('apply', 'count', 'gate')]
        penalty = [op for op in ops if op.type == 'L2Loss']
        found.append((len(applied), len(penalty)))
    assert len(set(found)) == 1 and found[0][1] == (3 if name == 'dense' else 2)


def test_a_dense_variable_is_read_once_and_brought_once_to_each_tower_and_its_gradient_comes_back_once():
    ops = operations(made('dense', 4).step)
    for variable in ('w1', 'b1', 'w2'):
        [read] = [op for op in ops if op.type == 'ReadVariableOp' and op.inputs[0].op.name == variable]
        assert sorted(op.name.split('/')[0] for op in read.outputs[0].consumers() if op in ops) == [f'tower_{index}' for index in range(4)]
    assert collections.Counter(tensor.device for tensor in to_host(ops)) == {f'/device:CPU:{index}': 1 for index in range(1, 5)}


@pytest.mark.parametrize('n', [2, 4])
def test_large_gradients_come_back_by_themselves_and_small_ones_with_the_loss_as_one(n):
    def model(batch, *, training):
        hidden = tf.matmul(batch, tf.get_variable('large', [3, 2000])) + tf.get_variable('bias', [2000])
        return loss_of(tf.reduce_sum(tf.matmul(hidden, tf.get_variable('thin', [2000, 1])), 1))

    settings = harness.config(n=n, global_batch_size=24)
    ops = operations(program.make(model, lambda: tf.data.Dataset.from_tensor_slices(EXAMPLES).repeat(), settings).step)
    found = collections.Counter((tensor.device, tuple(tensor.shape)) for tensor in to_host(ops))
    assert found == {(f'/device:CPU:{index + 1}', shape): 1 for index in range(n) for shape in ((3, 2000), (4001,))}


def test_a_table_is_never_read_whole_and_only_its_rows_cross():
    ops = operations(made('embedding', 4).step)
    read = [op for op in ops if op.type == 'ReadVariableOp' and op.inputs[0].op.name == 'table']
    assert read == []
    assert len([op for op in ops if op.type == 'ResourceGather' and op.inputs[0].op.name == 'table']) == 4


def test_nothing_measures_a_step_that_nobody_looks_at():
    step = made('dense', 4).step
    assert {op.type for op in writes.ancestors([step.waited.op])} >= {'Timestamp'}
    assert 'Timestamp' not in {op.type for op in operations(step)}


@pytest.mark.parametrize('n', [1, 4])
def test_a_training_prepares_two_fetch_sets(n, tmp_path):
    settings = harness.config(
        'parameter_server', n, global_batch_size=8, model_dir=str(tmp_path), log_steps=2, summary_steps=5, save_steps=3
    )
    program_ = program.make(dense, lambda: tf.data.Dataset.from_tensor_slices(EXAMPLES).repeat(), settings)
    with training.opened(program_, settings) as master:
        fetches = (*program_.step.ops, program_.step.step)
        for _ in range(11):
            master.run(fetches)
        assert len(master._ready) == 2
