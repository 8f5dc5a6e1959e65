import harness
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import config
from towers.graph import devices, moved
from towers.jobs import program
from towers.run import session_config


def graph_on(*names):
    graph = tf.Graph()
    with graph.as_default():
        for name in names:
            with tf.device(name), tf.name_scope(name.strip('/').replace(':', '_')):
                tf.get_variable(f'v{len(tf.global_variables())}', [3], use_resource=True)
                tf.strings.join(['a', 'b'])
    return graph


def options(**settings):
    asked = config.DeviceConfig(num_gpus=2, device='cpu', **settings)
    return session_config.make(asked, devices.place(asked))


@pytest.mark.parametrize(
    ('used', 'bad'),
    [
        (['/cpu:0', '/cpu:2'], []),
        (['/cpu:1', '/cpu:3'], ['/device:CPU:3']),
        (['/gpu:0', '/cpu:7'], ['/device:GPU:0', '/device:CPU:7']),
    ],
)
@pytest.mark.parametrize('soft', ['soft', 'strict'])
def test_what_a_session_would_move_is_known_from_the_graph(used, bad, soft):
    graph = graph_on(*used)
    found = moved.find(graph, options(placement=soft))
    assert [each.name for each in found] == [op.name for op in graph.get_operations() if op.device in bad]
    assert all(each.line.startswith(__file__) for each in found)


def test_what_a_strict_session_refuses_is_what_is_found():
    """Devices that aren't there stand for kernels that aren't: TensorFlow refuses both in the same way."""
    graph = graph_on('/gpu:0', '/gpu:3')
    proto = options(placement='strict')
    expected = {each.name for each in moved.find(graph, proto)}
    assert len(expected) > 8
    assert moved._without_kernel(graph.as_graph_def(), proto, set()) == expected


def model(batch, *, training):
    with tf.device('/cpu:7'):
        far = batch * 2.0
    return towers.ModelOutput(tf.reduce_mean(far * harness.variable('w', 1.0)))


def test_strict_is_an_error_that_lists_all_and_soft_a_warning(caplog):
    with pytest.raises(
        ValueError, match=r'(?s)\d operations can not run .*tower_0/mul \(Mul\) from /device:CPU:7, made at .*test_moved.*soft'
    ):
        program.make(model, harness.numbers(1, 2), harness.config(n=2, placement='strict', global_batch_size=2))
    with caplog.at_level('WARNING'):
        _, variables = harness.train(model, harness.numbers(1, 2), harness.config(n=2, placement='soft', global_batch_size=2))
    assert 'tower_1/mul (Mul) from /device:CPU:7' in caplog.text
    assert variables['w'] == -2.0  # 1 - mean(2, 4)


def test_without_the_question_nothing_moves_and_the_users_line_is_told():
    with pytest.raises(ValueError, match=r'can not run where they were put: .*tower_0/mul .*made at .*moved.*=soft'):
        program.make(model, harness.numbers(1, 2), harness.config(n=2, global_batch_size=2))


def test_one_operation_is_spoken_of_as_one():
    with tf.Graph().as_default() as graph, tf.device('/gpu:3'):
        tf.no_op(name='alone')
    asked = config.DeviceConfig(device='cpu')
    with pytest.raises(ValueError, match=r'^1 operation can not run where it was put: alone \(NoOp\) from /device:GPU:3, made at'):
        moved.check(graph, session_config.make(asked, devices.place(asked)), asked)
