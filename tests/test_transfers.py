"""Tensors that cross from one device to another together: what goes with what, and that it comes as it was."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import transfers

MIB = 1 << 20


@pytest.mark.parametrize(
    ('device', 'other', 'near', 'bundled'),
    [
        ('/cpu:0', '/cpu:1', True, True),
        ('/cpu:1', '/device:CPU:1', True, False),
        ('/cpu:0', '/gpu:0', True, False),
        ('/job:worker/task:1/cpu:0', '/job:worker/task:1/cpu:2', True, True),
        ('/job:worker/task:1/cpu:0', '/job:worker/task:2/cpu:0', False, False),
        ('/job:master/task:0/cpu:0', '/job:worker/task:0/cpu:0', False, False),
    ],
)
def test_only_cpu_devices_of_one_process_bundle(device, other, near, bundled):
    assert transfers.same_machine(device, other) == near and transfers.are_bundled(device, other) == bundled


@pytest.mark.parametrize(
    ('sizes', 'expected'),
    [
        ([], []),
        ([4, 8, 0], [[0, 1, 2]]),
        ([MIB, 4], [[0], [1]]),
        ([4, MIB + 4, 8, MIB, 4], [[1], [0, 2], [3], [4]]),
        ([MIB // 2, MIB // 2, MIB // 2], [[0, 1], [2]]),
        ([4, None, 8], [[1], [0, 2]]),
        ([4] * 65, [[*range(64)], [64]]),
    ],
)
def test_neighbours_go_together_up_to_a_mebibyte_and_64(sizes, expected):
    with tf.Graph().as_default():
        values = [tf.placeholder(tf.uint8, [size]) for size in sizes]
        assert list(transfers.groups(values)) == expected


def test_what_crosses_comes_as_it_was():
    given = [np.arange(6, dtype=np.float32).reshape(2, 3), np.int64(7), np.array([b'a', b'bc']), np.zeros([0, 2], np.float64)]
    with tf.Graph().as_default(), tf.device('/cpu:1'):
        values = [tf.constant(value) for value in given]
        found = transfers.brought(values, source='/cpu:1', target='/cpu:2')
        assert [(each.device, each.dtype, each.shape) for each in found] == [('/device:CPU:2', v.dtype, v.shape) for v in values]
        assert transfers.brought(values[:1], source='/cpu:1', target='/cpu:2') == values[:1]
        with tf.Session(config=tf.ConfigProto(device_count={'CPU': 3})) as session:
            for one, other in zip(session.run(found), given, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('count', [64, 65, 129])
def test_a_bundle_of_many_is_one_of_bundles(count):
    """What TensorFlow keeps of one optional from building the graph grows with the square of what it holds."""
    with tf.Graph().as_default() as graph:
        values = [tf.constant(place, tf.int32 if place % 2 else tf.float32) for place in range(count)]
        found = transfers.unbundled(transfers.bundle(values, '/cpu:0'), values, '/cpu:0')
        sizes = [max(len(op.inputs), len(op.outputs)) for op in graph.get_operations() if op.type.startswith('Optional')]
        assert max(sizes) == 64 and [each.dtype for each in found] == [each.dtype for each in values]
        with tf.Session() as session:
            assert session.run(found) == list(range(count))


@pytest.mark.parametrize('n', [2, 3])
def test_a_model_may_differentiate_its_own_loss(n):
    """A penalty on the gradient goes through the tower's values, those that came together too."""

    def model(batch, *, training):
        x, y = batch
        w, b, unused = (tf.get_variable(name, shape, initializer=tf.ones_initializer()) for name, shape in SHAPES.items())
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) + b - y))
        slopes = tf.gradients(loss, [w, b])
        return towers.ModelOutput(loss + tf.add_n([tf.nn.l2_loss(slope) for slope in slopes]) + 0.0 * tf.reduce_sum(unused))

    def trained(towers_):
        data = harness.rows(np.tile(np.arange(3, dtype=np.float32), (6, 1)) / 3, np.zeros(6, np.float32))
        with harness.started(model, data, harness.config('parameter_server', towers_, global_batch_size=6)) as run:
            for _ in range(3):
                run.session.run(run.program.step.ops)
            return run.session.run({variable.op.name: variable.read_value() for variable in tf.trainable_variables()})

    one, many = trained(1), trained(n)
    assert not np.allclose(one['w'], 1)
    for name in SHAPES:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5)


SHAPES = {'w': [3], 'b': [], 'unused': [2]}
