"""Calls of several steps: variables, reports and checkpoints are those of calls of one step, bit for bit."""

import json
import os

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import errors
from towers.checkpoint import manifest

EXAMPLES, STEPS = 22, 17  # batches of 8: 8, 8, 6 in each pass
TIMES = ('examples_per_sec', 'step_ms', 'input_wait')


def dataset():
    inputs = np.random.default_rng(7).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices({'x': inputs, 'id': np.arange(EXAMPLES)}).shuffle(EXAMPLES, seed=5)


def model(batch, *, training):
    """Dense and sparse variables, a moving mean, draws by example, a metric and a summary."""
    x = tf.nn.relu(tf.matmul(batch['x'], tf.get_variable('w', [3, 4])) + tf.get_variable('b', [4]))
    mean = tf.get_variable('mean', [4], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(mean * 0.9 + 0.1 * tf.reduce_mean(x, 0)))
    x = towers.dropout(x, 0.3, training=training) + tf.nn.embedding_lookup(tf.get_variable('table', [EXAMPLES, 4]), batch['id'])
    tf.summary.scalar('mean', tf.reduce_mean(x))
    return towers.ModelOutput(tf.reduce_mean(tf.square(x)), metrics={'mean': towers.mean(x), 'id': towers.mean(batch['id'])})


def config(folder, strategy='parameter_server', n=1, **changes):
    """Reports and checkpoints at steps that are no multiples of one another."""
    at = {'log_steps': 3, 'summary_steps': 5, 'save_steps': 4, 'sync_checkpoint': True, 'keep_checkpoints': 50, 'train_steps': STEPS}
    settings = {'optimizer': 'momentum', 'learning_rate': 0.05, 'global_batch_size': 8, **at, **changes}
    return harness.config(strategy, n, model_dir=str(folder), **settings)


def left(folder):
    """All that a run left but for times: variables of each checkpoint, rows, and scalars and summaries by step."""
    saved = {}
    for found in manifest.all(str(folder)):
        reader = tf.train.load_checkpoint(found.prefix)
        saved[found.step] = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != 'input_position'}
    rows = []
    for path in tf.gfile.Glob(f'{folder}/metrics.jsonl'):  # there is none where no row was written
        with open(path) as file:
            rows = [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in file]
    shown = {}
    for path in sorted(tf.gfile.Glob(f'{folder}/events*')):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                if value.tag not in TIMES and value.WhichOneof('value') == 'simple_value':
                    shown[event.step, value.tag] = value.simple_value
    return {'checkpoints': saved, 'rows': rows, 'shown': shown}


def require_same(found, expected):
    np.testing.assert_equal(found['checkpoints'], expected['checkpoints'])
    np.testing.assert_equal(found['rows'], expected['rows'])
    np.testing.assert_equal(found['shown'], expected['shown'])


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """What calls of one step leave, each case trained once."""
    known = {}

    def of(strategy, n):
        if (strategy, n) not in known:
            folder = tmp_path_factory.mktemp('alone')
            towers.train(model, dataset, config(folder, strategy, n))
            known[strategy, n] = left(folder)
        return known[strategy, n]

    return of


@pytest.mark.parametrize(('strategy', 'n', 'k'), [*[(*case, 5) for case in harness.CASES], ('mirrored', 2, 2), ('parameter_server', 4, 7)])
def test_a_call_of_several_steps_leaves_what_calls_of_one_leave(alone, strategy, n, k, tmp_path):
    result = towers.train(model, dataset, config(tmp_path, strategy, n, steps_per_run=k))
    assert (result.step, result.stopped_by) == (STEPS, 'steps')
    found = left(tmp_path)
    assert sorted(found['checkpoints']) == [4, 8, 12, 16, 17] and [row['step'] for row in found['rows']] == [3, 6, 9, 12, 15, 17]
    require_same(found, alone(strategy, n))


def test_a_run_that_is_resumed_at_another_number_of_steps_is_one_that_never_stopped(alone, tmp_path):
    for steps, k in ((5, 4), (11, 1), (STEPS, 7)):
        towers.train(model, dataset, config(tmp_path, train_steps=steps, steps_per_run=k))
    found, expected = left(tmp_path), alone('parameter_server', 1)
    for step in expected['checkpoints']:
        np.testing.assert_equal(found['checkpoints'][step], expected['checkpoints'][step])


def shared(x, *, training):
    """A loss that is not finite where an example is not, a state, and a weight of 0 where it is 0."""
    w = harness.variable('w', 0.5)
    mean = harness.variable('mean', 0.0, trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign_sub(0.1 * (mean - tf.reduce_mean(x))))
    tf.summary.scalar('x', tf.reduce_mean(x))
    return towers.ModelOutput(tf.reduce_mean(tf.square(x * w - 1.0)), weight=tf.reduce_sum(tf.abs(x)))


def batches(*values):
    """A dataset of two examples of each value, with one pass of them."""
    return harness.rows(np.repeat(np.float32(values), 2))


def trained(folder, data, k, **changes):
    """How a training of `shared` on two towers ended, a string where it diverged, and what it left."""
    settings = config(folder, 'mirrored', 2, learning_rate=0.01, global_batch_size=2, train_epochs=1, steps_per_run=k, **changes)
    try:
        result = towers.train(shared, data, settings)
        ended = result.step, result.examples, result.stopped_by, result.loss
    except (errors.Diverged, ValueError) as error:
        ended = str(error).replace(str(folder), 'FOLDER')
    bundles = {os.path.basename(path): facts(path) for path in tf.gfile.Glob(f'{folder}/bundles/*')}
    return ended, {**left(folder), 'bundles': bundles}


def facts(bundle):
    with open(os.path.join(bundle, 'bundle.json')) as file:
        return {name: value for name, value in json.load(file).items() if name != 'config'}


BAD = (1.0, 2.0, 3.0, 4.0, np.nan, 6.0, 7.0, 9.0, np.inf, np.inf, 1.5, 0.5, 2.5, 3.5, 4.5)  # the first where summaries are due


@pytest.mark.parametrize('policy', ['stop', 'skip', 'rollback', 'ignore'])
def test_a_step_that_is_not_finite_ends_its_call(policy, tmp_path):
    (ended, expected), (also, found) = (trained(tmp_path / str(k), batches(*BAD), k, nan_policy=policy) for k in (1, 5))
    assert also == ended
    require_same(found, expected)
    assert found['bundles'] == expected['bundles'] and len(found['bundles']) == {'ignore': 0, 'stop': 1}.get(policy, 3)


@pytest.mark.parametrize(
    ('values', 'k'),
    [((1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 4.0), 5), ((0.0,) * 3, 2), ((5.0, *[0.0] * 105, 1.0), 7)],
    ids=['some', 'first', 'many'],
)
def test_batches_without_weight_are_no_steps(values, k, tmp_path, caplog):
    (ended, expected), (also, found) = (trained(tmp_path / str(steps), batches(*values), steps) for steps in (1, k))
    assert also == ended
    require_same(found, expected)
    warned = [record.getMessage() for record in caplog.records if 'has weight 0' in record.getMessage()]
    assert len(warned) == 2 and warned[0] == warned[1]


@pytest.mark.parametrize(('examples', 'steps', 'pipeline'), [(9, 5, 'global'), (9, 5, 'sharded'), (13, 7, 'global'), (3, 2, 'global')])
def test_the_end_of_the_data_inside_of_a_call_is_the_end(examples, steps, pipeline, tmp_path):
    """The number of examples is not known beforehand, so that only the input can tell."""

    def data():
        unknown = tf.data.Dataset.range(100).take(examples).filter(lambda x: x >= 0)
        return unknown.map(lambda x: tf.cast(x + 1, tf.float32))

    (ended, expected), (also, found) = (
        trained(tmp_path / str(k), data, k, input_pipeline=pipeline, save_steps=50, log_steps=50, summary_steps=6) for k in (1, 5)
    )
    assert ended[:3] == (steps, examples, 'data') and also == ended
    require_same(found, expected)
