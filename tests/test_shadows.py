"""What a shadow holds stays as it was while the variables go on."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import shadows


@pytest.mark.parametrize('use_resource', [True, False])
def test_what_is_held_is_of_the_moment_in_which_it_was_kept(use_resource):
    with tf.Graph().as_default():
        with tf.device('/cpu:1'):
            a = tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), use_resource=use_resource)
        count = tf.Variable(np.int64(5), use_resource=use_resource)
        shadow = shadows.Shadow([shadows.value_of(a), shadows.value_of(count)], device='/cpu:0', name='held')
        keep, drop, held = shadow.keep(), shadow.drop(), shadow.held
        change = tf.group(a.assign_add(tf.ones_like(a)), count.assign_add(1))
        with tf.Session(config=tf.ConfigProto(device_count={'CPU': 2})) as session:
            session.run(tf.global_variables_initializer())
            for turn in range(3):
                session.run(keep)
                session.run(change)
                first, second = session.run(held)
                np.testing.assert_array_equal(first, np.arange(6).reshape(2, 3) + turn)
                assert second == 5 + turn and session.run(count) == 6 + turn
            session.run(drop)
            with pytest.raises(tf.errors.FailedPreconditionError):
                session.run(held)
        assert [tensor.shape for tensor in held] == [[2, 3], []] and {tensor.device for tensor in held} == {'/device:CPU:0'}
