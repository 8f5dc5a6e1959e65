"""Initial values: the same as TensorFlow's own, and not kept by the session beside the variables."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import initial

SIZE = 2000  # TensorFlow makes zeros of fewer than 1000 numbers as a constant at once


def made(initializer, dtype=tf.float32, **settings):
    return tf.get_variable('v', [SIZE], dtype, initializer=initializer, use_resource=settings.pop('use_resource', True), **settings)


def largest_constant(session, operation):
    """Elements of the largest constant that the runtime has for a run, after it has folded what it can."""
    metadata = tf.RunMetadata()
    session.run(operation, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    constants = [node.attr['value'].tensor for part in metadata.partition_graphs for node in part.node if node.op == 'Const']
    return max((int(np.prod([dim.size for dim in each.tensor_shape.dim])) for each in constants), default=0)


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.bfloat16, tf.int32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize('number', [0, 1, 0.1])
@pytest.mark.parametrize('use_resource', [True, False])
def test_the_values_are_those_of_the_variables_own_initialisers(dtype, number, use_resource):
    with tf.Graph().as_default(), tf.Session() as session:
        variable = made(lambda shape, dtype, partition_info=None: tf.fill(shape, tf.cast(number, dtype)), dtype, use_resource=use_resource)
        session.run(initial.group([variable]))
        found = session.run(variable)
        session.run(variable.initializer)
        np.testing.assert_array_equal(found, session.run(variable))
        assert found.dtype == dtype.as_numpy_dtype and (found == found[0]).all()


@pytest.mark.parametrize('initializer', [tf.zeros_initializer(), tf.ones_initializer()], ids=['zeros', 'ones'])
@pytest.mark.parametrize('is_rewritten', [False, True])
def test_the_session_keeps_no_copy_of_them(initializer, is_rewritten):
    proto = tf.ConfigProto(device_count={'CPU': 2})
    proto.graph_options.rewrite_options.disable_meta_optimizer = not is_rewritten
    with tf.Graph().as_default(), tf.Session(config=proto) as session:
        with tf.device('/cpu:1'):
            variable = made(initializer)
        assert largest_constant(session, variable.initializer) == SIZE  # what would be kept
        assert largest_constant(session, initial.group([variable])) < SIZE
