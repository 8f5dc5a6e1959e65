"""What the recorder keeps of a bad step, and whom it blames; on whole programs, since it looks at all their parts."""

import contextlib

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run import flight

ROWS = 4
NAN = np.nan


def data(x, **more):
    """A dataset of dicts with the values of x, a row each."""
    return harness.rows(x=np.asarray(x, np.float32), **more)


@contextlib.contextmanager
def held_back(model, dataset, *, n=2, strategy='parameter_server', steps=1, size=ROWS, **settings):
    """A program after the step that was held back."""
    config = harness.config(strategy, n, global_batch_size=size, learning_rate=0.0, nan_policy='skip', **settings)
    with harness.started(model, dataset, config) as run:
        reports = run.steps(steps)
        assert [int(report['skipped']) for report in reports] == [*[0] * (steps - 1), 1]
        yield run


def found(run):
    """What the recorder finds, having changed nothing."""
    before = run.variables()
    finding = run.program.recorder.find(run.session)
    for name, value in run.variables().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    return finding


def linear(batch, *, training):
    a, b = harness.variable('a', 1.0), harness.variable('b', 2.0)
    return towers.ModelOutput(tf.reduce_mean(a * batch['x'] + b))


@pytest.mark.parametrize('pipeline', ['global', 'sharded'])
@harness.each_split
def test_the_tower_its_input_and_the_first_variable_are_named(strategy, n, pipeline):
    rows = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, NAN, 8]
    with held_back(linear, data(rows), n=n, strategy=strategy, steps=2, size=8, input_pipeline=pipeline) as run:
        finding = found(run)
        [report] = run.steps(1)
        assert (report['skipped'], report['loss']) == (1, 6.5)  # the first batch again: it has asked for none
    per_tower = 8 // n
    assert finding.tower == 6 // per_tower
    assert finding.facts == (
        f'the input x holds 1 nan in {per_tower} values, the first at [{6 % per_tower}]',
        'the loss is nan',
        'the gradient of a holds 1 nan in 1 values',
    )
    assert str(finding).startswith(f'on tower {finding.tower}: the input x holds 1 nan in ')


def test_a_gradient_alone_is_found_among_the_towers():
    """b's gradient in tower 1 is that of a root at 0; the loss is finite."""

    def model(batch, *, training):
        a, b = harness.variable('a', 1.0), harness.variable('b', [1.0, 1.0])
        return towers.ModelOutput(tf.reduce_mean(a * batch['x']) + tf.reduce_mean(tf.sqrt(tf.reduce_sum(b) * batch['x'])))

    with held_back(model, data([1, 4, 9, 0])) as run:
        finding = found(run)
    assert finding.tower == 1 and finding.facts == ('the loss is 6.62132', 'the gradient of b holds 2 nan in 2 values, the first at [0]')


def test_several_variables_are_counted():
    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(tf.add_n([harness.variable(name, 1.0) * batch['x'] for name in 'abc'])))

    with held_back(model, data([np.inf, 1, 1, 1]), strategy='mirrored') as run:
        assert found(run).facts[1:] == ('the loss is inf', 'the gradient of a holds 1 inf in 1 values (and of 2 more of 3 variables)')


def test_a_variable_that_was_bad_before():
    def model(batch, *, training):
        return towers.ModelOutput(tf.reduce_mean(harness.variable('a', 1.0) * batch['x']) * harness.variable('bad', [1.0, NAN])[1])

    with held_back(model, data([1, 2, 3, 4])) as run:
        finding = found(run)
    assert finding.tower == 0 and finding.facts[:2] == ('the variable bad holds 1 nan in 2 values, the first at [1]', 'the loss is nan')


def test_a_penalty_is_of_no_tower():
    def model(batch, *, training):
        b = harness.variable('b', 0.0, regularizer=lambda v: tf.log(tf.abs(v)))
        return towers.ModelOutput(tf.reduce_mean(harness.variable('a', 1.0) * batch['x'] + b))

    with held_back(model, data([1, 2, 3, 4])) as run:
        finding = found(run)
    assert finding.tower is None and finding.facts[0] == 'the loss with the penalty holds 1 inf in 1 values'
    assert finding.facts[1].startswith('the gradient to apply of b holds 1 nan')
    assert str(finding).startswith('in no tower by itself: ')


def test_a_sum_that_overflows_is_told_apart():
    with held_back(linear, data([3e38, 3e38, 3e38, 3e38]), n=1) as run:
        finding = found(run)
    assert finding.tower == 0 and finding.facts[0] == 'the loss is inf'


def test_a_moving_statistic_and_the_learning_rate():
    def model(batch, *, training):
        mean = harness.variable('mean', 0.0, trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(tf.log(tf.reduce_mean(batch['x']))))
        return towers.ModelOutput(tf.reduce_mean(harness.variable('a', 1.0) * batch['x']))

    with held_back(model, data([0, 0, 0, 0])) as run:
        finding = found(run)
    assert finding == flight.Finding(None, ('the new value of mean holds 1 inf in 1 values',))


def test_draws_by_example_are_made_again():
    """Dropout decides whether the bad row is seen at all, so only the same draws find it again."""

    def model(batch, *, training):
        kept = towers.dropout(tf.ones_like(batch['x'])[:, None], 0.5, training=training)[:, 0]
        bad = tf.where(kept > 0, tf.log(batch['x'] - 1), tf.zeros_like(kept))
        return towers.ModelOutput(tf.reduce_mean(harness.variable('a', 1.0) * bad))

    rows = np.ones(32, np.float32)
    with held_back(model, data(rows), size=32) as run:
        first, again = found(run), found(run)
    assert first == again and first.tower == 0 and first.facts[0] in ('the loss is -inf', 'the loss is nan')


def test_every_kind_of_input_is_kept(tmp_path):
    """Uneven parts of a batch whose size is not known, strings, sparse and ragged features."""
    size = 5

    def dataset():
        ids = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
        return tf.data.Dataset.from_tensor_slices(
            {
                'x': np.array([1, 2, 3, 4, NAN], np.float32),
                'pair': (np.arange(size), np.array([f'name {k}' for k in range(size)])),
                'sparse': tf.sparse.from_dense(np.diag(np.arange(1.0, 6.0)).astype(np.float32)),
                'ragged': ids,
            }
        ).filter(lambda row: True)

    def model(batch, *, training):
        a = harness.variable('a', 1.0)
        more = tf.reduce_sum(batch['sparse'].values) + tf.cast(tf.reduce_sum(batch['ragged']), tf.float32)
        return towers.ModelOutput(tf.reduce_mean(a * batch['x']) + 0 * a * more)

    with held_back(model, dataset, size=size) as run:
        assert found(run).facts[0] == 'the input x holds 1 nan in 2 values, the first at [1]'
        run.program.recorder.write(run.session, str(tmp_path))
        described = run.program.recorder.describe()['towers']
    reader = tf.train.load_checkpoint(str(tmp_path / flight.BATCH))
    kept = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    assert (kept['examples'], kept['0/examples'], kept['1/examples'], kept['1/first']) == (5, 3, 2, 3)
    # The leaves in the order of tf.nest: pair 0, pair 1, ragged values and splits, sparse indices, values and shape, x.
    np.testing.assert_array_equal(kept['0/0'], [0, 1, 2])
    assert list(kept['1/1']) == [b'name 3', b'name 4']
    np.testing.assert_array_equal(kept['1/2'], [4, 5, 6, 7])
    np.testing.assert_array_equal(kept['1/3'], [0, 3, 4])
    np.testing.assert_array_equal(kept['1/5'], [4.0, 5.0])
    np.testing.assert_array_equal(kept['1/7'], [4.0, NAN])
    assert [len(leaves) for leaves in described] == [8, 8] and described[1][1] == {'dtype': 'string', 'shape': [None]}
    variables = tf.train.load_checkpoint(str(tmp_path / flight.VARIABLES))
    assert sorted(variables.get_variable_to_shape_map()) == ['a', 'examples_seen', 'global_step', 'skipped_steps']


def test_the_last_bad_batch_is_the_one_that_is_kept():
    rows = [1, 1, 1, NAN, 1, 1, 1, 1, 1, NAN, 1, 1]
    with held_back(linear, data(rows)) as run:
        assert found(run).tower == 1
        run.steps(1)
        assert found(run).tower == 1  # a good step keeps nothing
        run.steps(1)
        assert found(run).facts[0] == 'the input x holds 1 nan in 2 values, the first at [1]' and found(run).tower == 0


def test_a_good_step_keeps_nothing():
    with harness.started(linear, data([1, 2, 3, 4]), harness.config(n=2, global_batch_size=ROWS)) as run:
        run.steps(2)
        with pytest.raises(tf.errors.OpError):
            run.program.recorder.find(run.session)


@pytest.mark.parametrize(
    ('values', 'text'),
    [
        ([1.0, 2.0], None),
        (NAN, 'holds 1 nan in 1 values'),
        ([[0, np.inf], [-np.inf, NAN]], 'holds 1 nan and 2 inf in 4 values, the first at [0, 1]'),
        ([], None),
        (np.array([1, 2]), None),
    ],
)
def test_values_in_words(values, text):
    assert flight.not_finite(values) == text
