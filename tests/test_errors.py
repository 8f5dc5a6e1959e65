"""Errors of a step name where they come from, also where TensorFlow's own error does not."""

import re

import pytest
import tensorflow.compat.v1 as tf

from towers import errors


def failure(session, fetches, prepared):
    with pytest.raises(tf.errors.OpError) as caught:
        session.make_callable([fetches])() if prepared else session.run(fetches)
    return caught.value


@pytest.mark.parametrize(
    ('make', 'kind', 'expected'),
    [
        (
            lambda zero: tf.debugging.check_numerics(1.0 / zero, 'bad', name='check'),
            tf.errors.InvalidArgumentError,
            'bad : Tensor had Inf values [node check (CheckNumerics) on /device:CPU:0, made at ',
        ),
        (
            lambda zero: tf.identity(tf.placeholder(tf.float32, name='missing')) + zero,
            tf.errors.InvalidArgumentError,
            "You must feed a value for placeholder tensor 'missing' with dtype float [node missing (Placeholder)",
        ),
        (
            lambda zero: tf.get_variable('w', [2]).read_value()[0] + zero,
            tf.errors.FailedPreconditionError,
            'Could not find variable w.',
        ),
    ],
    ids=['check', 'placeholder', 'variable'],
)
@pytest.mark.parametrize('prepared', [True, False], ids=['callable', 'run'])
def test_one_line_names_node_device_and_source(make, kind, expected, prepared):
    with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
        fetches = make(tf.placeholder_with_default(0.0, []))
        with tf.Session() as session:
            error = errors.located(failure(session, fetches, prepared), graph)
    assert type(error) is kind
    assert str(error).startswith(expected)
    assert '\n' not in str(error) and 'Node:' not in str(error)
    assert f'made at {__file__}:' in str(error)


@pytest.mark.parametrize(
    ('prepared', 'place'),
    [(True, r' \[node limit/AssertGuard \(If\) on no particular device, made at .*test_errors.py:\d+\]'), (False, '')],
    ids=['callable', 'run'],  # `run` hides the function's name
)
def test_an_assertion_names_the_branch_that_it_is_in(prepared, place):
    with tf.Graph().as_default() as graph:
        zero = tf.placeholder_with_default(0.0, [])
        check = tf.debugging.Assert(tf.greater(zero, 1.0), ['too small', zero], name='limit')
        with tf.Session() as session:
            error = errors.located(failure(session, check, prepared), graph)
    assert re.fullmatch(r'assertion failed: \[too small\] \[0\]' + place, str(error))


def test_an_error_in_a_function_names_the_call_and_not_a_node_of_the_same_name():
    with tf.Graph().as_default() as graph:
        tf.debugging.check_numerics(tf.constant(1.0), 'fine')

        @tf.function
        def inner(x):
            return tf.debugging.check_numerics(x, 'inside')

        called = inner(tf.constant(1.0) / tf.placeholder_with_default(0.0, []))
        with tf.Session() as session:
            operation = errors.find_operation(failure(session, called, True), graph)
    assert operation.type == 'StatefulPartitionedCall'


def test_of_several_root_errors_the_first_counts():
    with tf.Graph().as_default() as graph:
        first, second = tf.constant(1, name='first'), tf.constant(2, name='second')
    message = (
        '2 root error(s) found.\n  (0) INVALID_ARGUMENT: one thing\n\t [[{{node second}}]]\n'
        '  (1) INVALID_ARGUMENT: another\n\t [[{{node first}}]]\n0 successful operations.\n0 derived errors ignored.'
    )
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert errors.find_operation(error, graph) is second.op
    assert str(errors.located(error, graph)).startswith('INVALID_ARGUMENT: one thing [node second (Const)')
    assert first.op is not second.op


def test_an_error_without_a_node_keeps_its_reason():
    error = tf.errors.DeadlineExceededError(None, None, 'Timed out\n  waiting')
    located = errors.located(error, tf.Graph())
    assert type(located) is tf.errors.DeadlineExceededError and str(located) == 'Timed out waiting'


def test_the_source_is_the_innermost_line_of_the_user():
    def user_code():
        return tf.reduce_mean(tf.nn.relu(tf.ones([2])))

    with tf.Graph().as_default():
        line = errors.source_line(user_code().op)
    assert line == f'{__file__}:{user_code.__code__.co_firstlineno + 1}'


def test_what_a_map_of_the_dataset_says_comes_without_tensorflows_path_to_it():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        checked = tf.data.Dataset.range(3).map(lambda x: tf.debugging.Assert(x < 2, ['file 7: too large']) and x).batch(3)
        iterator = tf.data.make_initializable_iterator(checked)
        batch = iterator.get_next()
        session.run(iterator.initializer)
        error = errors.located(failure(session, batch, True), graph)
    assert str(error) == 'assertion failed: [file 7: too large]'
