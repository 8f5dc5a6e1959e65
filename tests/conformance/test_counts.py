"""How much a step is made of, in exact numbers: operations, what crosses between devices, and fetch sets."""

import collections
import sys

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import writes
from towers.jobs import program, stepping, training

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


@pytest.mark.parametrize(('name', 'first', 'others'), [('dense', 35, 33), ('embedding', 50, 50)])
def test_a_towers_operations_in_a_step(name, first, others):
    for n in (1, 2, 4):
        scopes = by_scope(operations(made(name, n).step))
        assert [scopes[f'tower_{index}'] for index in range(n)] == [first, *[others] * (n - 1)]


@pytest.mark.parametrize('name', MODELS)
def test_penalty_and_update_do_not_grow_with_the_towers(name):
    found = []
    for n in (1, 2, 8):
        ops = operations(made(name, n, l2=0.1, optimizer='momentum').step)
        applied = [op for op in ops if op.name.split('/')[0] in ('apply', 'count', 'gate')]
        penalty = [op for op in ops if op.type == 'L2Loss']
        found.append((len(applied), len(penalty)))
    assert len(set(found)) == 1 and found[0][1] == (3 if name == 'dense' else 2)


def crossing(ops):
    """(from, to) -> transfers of a step from one device to another, each tensor once to each; constants are folded."""
    edges = {(tensor.ref(), op.device) for op in ops for tensor in op.inputs if op.device and tensor.dtype != tf.resource}
    moved = [(ref.deref(), device) for ref, device in edges]
    return collections.Counter(
        (tensor.device[-5:], device[-5:]) for tensor, device in moved if tensor.device not in ('', device) and tensor.op.type != 'Const'
    )


@pytest.mark.parametrize('n', [2, 4])
def test_a_dense_variable_is_read_once_and_a_step_has_few_transfers(n):
    """The first tower gets each weight by itself, the others all as one; from each come gradients and loss as one."""
    ops = operations(made('dense', n).step)
    for variable in ('w1', 'b1', 'w2'):
        assert len([op for op in ops if op.type == 'ReadVariableOp' and op.inputs[0].op.name == variable]) == 1
    batch = 1
    expected = {('CPU:0', f'CPU:{index + 1}'): batch + (1 if index else 3) for index in range(n)}
    assert crossing(ops) == {**expected, **{(f'CPU:{index + 1}', 'CPU:0'): 1 for index in range(n)}}


@pytest.mark.parametrize('n', [2, 4])
def test_nothing_else_crosses_when_the_runtime_has_cut_the_graph(n):
    """What is constant is known on each device: the runtime sends no number that the graph could hold."""
    metadata, options = tf.RunMetadata(), tf.RunOptions(output_partition_graphs=True)
    with harness.started(dense, harness.rows(EXAMPLES), harness.config(n=n, global_batch_size=16)) as run:
        run.session.run(stepping.bare(run.program.step), options=options, run_metadata=metadata)
    sent = [node.name for graph in metadata.partition_graphs for node in graph.node if node.op == '_Send']
    weights, batch, sums = 3 + (n - 1), n, n
    assert len(sent) == weights + batch + sums


@pytest.mark.parametrize('n', [2, 4])
def test_gradients_of_more_than_a_mebibyte_come_back_by_themselves(n):
    def model(batch, *, training):
        hidden = tf.matmul(batch, tf.get_variable('large', [3, 100_000])) + tf.get_variable('bias', [100_000])
        return loss_of(tf.reduce_sum(tf.matmul(hidden, tf.get_variable('thin', [100_000, 1])), 1))

    settings = harness.config(n=n, global_batch_size=24)
    ops = operations(program.make(model, lambda: tf.data.Dataset.from_tensor_slices(EXAMPLES).repeat(), settings).step)
    found = collections.Counter((tensor.device, tensor.dtype, tuple(tensor.shape)) for tensor in to_host(ops))
    kinds = ((tf.float32, (3, 100_000)), (tf.variant, ()))
    assert found == {(f'/device:CPU:{index + 1}', *kind): 1 for index in range(n) for kind in kinds}


def test_the_parts_of_a_batch_come_to_a_tower_as_one():
    data = {'x': EXAMPLES, 'y': IDS, 'z': IDS[:, 0]}

    def model(batch, *, training):
        return loss_of(tf.reduce_sum(batch['x'] * tf.get_variable('w', [3]), 1) + tf.cast(batch['y'][:, 0] + batch['z'], tf.float32))

    for n in (2, 3):
        settings = harness.config(n=n, global_batch_size=24)
        ops = operations(program.make(model, lambda: tf.data.Dataset.from_tensor_slices(data).repeat(), settings).step)
        assert {crossing(ops)['CPU:0', f'CPU:{index + 1}'] for index in range(n)} == {2}  # and the weight


@pytest.mark.parametrize('n', [2, 4])
def test_moving_statistics_come_and_go_together(n):
    def model(batch, *, training):
        hidden = batch * tf.get_variable('w', [3])
        for name in ('mean', 'power'):
            moving = tf.get_variable(name, [3], initializer=tf.zeros_initializer(), trainable=False)
            write = moving.assign_sub((moving - tf.reduce_mean(hidden, 0)) * 0.1)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)
        return loss_of(tf.reduce_sum(hidden, 1))

    settings = harness.config(n=n, global_batch_size=24)
    found = crossing(operations(program.make(model, lambda: tf.data.Dataset.from_tensor_slices(EXAMPLES).repeat(), settings).step))
    batch, statistics = 1, 1
    assert {found['CPU:0', f'CPU:{index + 1}'] - batch for index in range(n)} == {3, 1}  # by themselves to the first tower only
    assert {found[f'CPU:{index + 1}', 'CPU:0'] - statistics for index in range(n)} == {1}


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


def calls(work):
    """How many functions of Python are called."""
    found = 0

    def count(frame, event, argument):
        nonlocal found
        found += event in ('call', 'c_call')

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def test_each_further_tower_is_as_much_work_to_make():
    made('dense', 2)  # TensorFlow keeps what it learns about its operations
    found = {n: calls(lambda n=n: made('dense', n)) for n in (2, 8, 32)}
    assert (found[32] - found[8]) / 24 < 1.03 * (found[8] - found[2]) / 6
