import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config, structs
from towers.graph import devices
from towers.run import session_config


def make(device, gpus, **options):
    asked = config.DeviceConfig(device=device, **options)
    return session_config.make(asked, devices.place(asked, gpus=gpus))


@pytest.mark.parametrize(('towers', 'cpus'), [(1, 1), (2, 3), (4, 5)])
def test_fake_devices_leave_the_first_cpu_to_the_variables(towers, cpus):
    proto = make('cpu', 0, num_gpus=towers)
    assert dict(proto.device_count) == {'CPU': cpus, 'GPU': 0}
    assert not proto.allow_soft_placement


def test_gpus_are_as_many_as_towers_and_grow():
    proto = make('auto', 8, num_gpus=4)
    assert dict(proto.device_count) == {'CPU': 1, 'GPU': 4}
    assert proto.allow_soft_placement
    assert proto.gpu_options.allow_growth


@pytest.mark.parametrize(
    ('device', 'gpus', 'options', 'intra', 'inter'),
    [
        ('cpu', 0, {'num_gpus': 2}, 1, len(os.sched_getaffinity(0))),
        ('cpu', 0, {'num_gpus': 1}, 0, 0),
        ('gpu', 4, {'num_gpus': 4}, 0, 0),
        ('cpu', 0, {'num_gpus': 2, 'intra_op_threads': 3}, 3, len(os.sched_getaffinity(0))),
        ('cpu', 0, {'num_gpus': 2, 'inter_op_threads': 5}, 1, 5),
        ('gpu', 1, {'num_gpus': 1, 'intra_op_threads': 2, 'inter_op_threads': 7}, 2, 7),
    ],
)
def test_threads_follow_the_towers_unless_given(device, gpus, options, intra, inter):
    proto = make(device, gpus, **options)
    assert (proto.intra_op_parallelism_threads, proto.inter_op_parallelism_threads) == (intra, inter)


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)


def test_memory_and_threads_of_gpus_are_those_asked_for():
    proto = make('gpu', 8, num_gpus=2, visible_gpus=(5, 7), gpu_memory_fraction=0.25, gpu_allow_growth=False, xla=True)
    options = proto.gpu_options
    assert (options.visible_device_list, options.per_process_gpu_memory_fraction, options.allow_growth) == ('5,7', 0.25, False)
    assert proto.graph_options.optimizer_options.global_jit_level == tf.OptimizerOptions.ON_1
    assert not options.experimental.use_cuda_malloc_async
    assert make('gpu', 1, gpu_allocator='cuda_malloc_async').gpu_options.experimental.use_cuda_malloc_async


@pytest.mark.parametrize(
    ('options', 'limits', 'virtual'),
    [
        ({'num_gpus': 2, 'gpu_memory_limit_mb': 100}, [[100], [100]], 0),
        ({'num_gpus': 4, 'gpu_memory_limit_mb': 100, 'towers_per_gpu': 2}, [[100, 100], [100, 100]], 0),
        ({'num_gpus': 4, 'towers_per_gpu': 4}, [], 4),
    ],
)
def test_virtual_gpus_share_a_real_one(options, limits, virtual):
    proto = make('gpu', 4, **options)
    made = proto.gpu_options.experimental
    assert [list(device.memory_limit_mb) for device in made.virtual_devices] == limits
    assert made.num_virtual_devices_per_gpu == virtual
    real = options['num_gpus'] // options.get('towers_per_gpu', 1)
    assert (proto.device_count['GPU'], proto.gpu_options.visible_device_list) == (real, ','.join(map(str, range(real))))


@pytest.mark.parametrize(
    ('device', 'options', 'expected'),
    [
        (
            'gpu',
            {'gpu_thread_mode': 'gpu_private', 'gpu_thread_count': 3},
            {'TF_GPU_THREAD_MODE': 'gpu_private', 'TF_GPU_THREAD_COUNT': '3'},
        ),
        ('gpu', {'gpu_thread_mode': 'gpu_shared'}, {'TF_GPU_THREAD_MODE': 'gpu_shared'}),
        ('gpu', {}, {}),
        ('cpu', {}, {}),
    ],
)
def test_threads_of_gpus_stand_in_the_environment(device, options, expected):
    asked = config.DeviceConfig(device=device, **options)
    assert session_config.environment(asked, devices.place(asked, gpus=1)) == expected


def test_a_server_takes_the_same_options():
    server = tf.train.Server.create_local_server(config=make('cpu', 0, num_gpus=3))
    with tf.Graph().as_default(), tf.Session(server.target) as session:
        assert [device.name.rpartition(':')[2] for device in session.list_devices()] == ['0', '1', '2', '3']


@pytest.mark.parametrize(
    ('device', 'placement', 'soft'),
    [('cpu', 'auto', False), ('gpu', 'auto', True), ('cpu', 'soft', True), ('gpu', 'soft', True), ('gpu', 'strict', False)],
)
def test_soft_placement_is_for_gpus_unless_asked(device, placement, soft):
    proto = make(device, 1, placement=placement, log_placement=soft, per_session_threads=soft)
    assert (proto.allow_soft_placement, proto.log_device_placement, proto.use_per_session_threads) == (soft, soft, soft)


@pytest.mark.parametrize(('device', 'there'), [('/cpu:2', True), ('/cpu:3', False), ('/gpu:0', False)])
def test_nothing_moves_silently_on_the_cpu(device, there):
    with tf.Graph().as_default(), tf.Session(config=make('cpu', 0, num_gpus=2)) as session:
        with tf.device(device):
            result = tf.constant([1.0]) + 1.0
        if there:
            np.testing.assert_array_equal(session.run(result), [2.0])
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match=device[1:].upper()):
                session.run(result)


@pytest.mark.parametrize(
    ('mode', 'fake', 'by_rows', 'off'),
    [
        ('auto', True, False, True), ('auto', True, True, False), ('auto', False, False, False),
        ('on', True, False, False), ('off', True, True, True), ('off', False, False, True),
    ],
)  # fmt: skip
def test_the_graph_is_rewritten_where_that_pays(mode, fake, by_rows, off):
    with tf.Graph().as_default() as graph:
        table = tf.get_variable('table', [4, 2], use_resource=True)
        if by_rows:
            tf.raw_ops.ResourceScatterSub(resource=table.handle, indices=[1], updates=tf.ones([1, 2]))
    place = structs.Placement((), '/cpu:0', fake, '')
    given = tf.ConfigProto(intra_op_parallelism_threads=3)
    made = session_config.for_graph(given, config.DeviceConfig(graph_optimizer=mode), place, graph)
    assert made.graph_options.rewrite_options.disable_meta_optimizer == off and made.intra_op_parallelism_threads == 3
    assert given == tf.ConfigProto(intra_op_parallelism_threads=3)
