import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config
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
