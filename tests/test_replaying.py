"""A bad step made again from its bundle: the first bad operation is named, with its line in this file."""

import inspect
import pathlib
import re

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run import bundle

GOOD = [1.0, 2.0, 3.0, 4.0]


def write(model, dataset, model_dir, *, n=2, steps=1, **settings):
    """Trains until a step is held back; returns its bundle."""
    config = harness.config(
        settings.pop('strategy', 'parameter_server'), n, global_batch_size=4, learning_rate=0.0, model_dir=str(model_dir), **settings
    )
    with harness.started(model, dataset, config) as run:
        reports = run.steps(steps)
        assert reports[-1]['skipped'] == 1
        text = bundle.explainer(run.program.recorder, config)(run.session, steps)
        return re.search(r'replay.py (\S+) names', text)[1]


def line_of(model, text):
    """'file:line' of the one line of a function that holds `text`."""
    lines, first = inspect.getsourcelines(model)
    [place] = [place for place, line in enumerate(lines) if text in line]
    return f'{inspect.getsourcefile(model)}:{first + place}'


def logarithm(batch, *, training):
    w = harness.variable('w', 1.0)
    return towers.ModelOutput(
        tf.reduce_mean(w * tf.log(batch)),  # log(0)
    )


@pytest.mark.parametrize('strategy', harness.STRATEGIES)
def test_a_logarithm_of_zero(strategy, tmp_path):
    folder = write(logarithm, harness.numbers(*GOOD, 1, 2, 3, 0), tmp_path, strategy=strategy, steps=2)
    found = towers.replay(logarithm, harness.numbers(*GOOD), folder)
    assert (found.step, found.tower, found.loss) == (2, 1, -np.inf)
    assert found.first.type == 'Log' and found.first.line == line_of(logarithm, 'log(0)') and found.first.forward is None
    assert found.first.outputs == ('holds 1 inf in 2 values, the first at [1]',)
    [given] = found.first.inputs
    assert given.endswith(': [2] from 0 to 3')
    assert found.first_nan is None  # the gradient is infinite too
    assert list(found.first.rows()) == ['operation', 'made at', 'input 0', 'result']


def product(batch, *, training):
    w = harness.variable('w', 2.0)
    scale = tf.exp(batch)  # inf
    masked = (
        scale * tf.cast(batch < 100, tf.float32)  # 0 * inf
    )
    return towers.ModelOutput(tf.reduce_mean(w * masked))


def test_zero_times_infinity_and_where_the_infinity_came_from(tmp_path):
    folder = write(product, harness.numbers(1, 100, 3, 4), tmp_path)
    found = towers.replay(product, harness.numbers(1), folder)
    assert np.isnan(found.loss) and found.tower == 0
    assert (found.first.type, found.first.line) == ('Exp', line_of(product, '# inf'))
    assert (found.first_nan.type, found.first_nan.line) == ('Mul', line_of(product, '0 * inf'))
    assert [text.split(': ')[1] for text in found.first_nan.inputs] == [
        '[2] from 2.71828 to 2.71828, holds 1 inf in 2 values, the first at [1]',
        '[2] from 0 to 1',
    ]


def masked(batch, *, training):
    """Infinities that are meant, as in a mask before softmax, are no fault; the root is."""
    w = harness.variable('w', 1.0)
    scores = tf.stack([batch, tf.where(batch > 2, tf.fill(tf.shape(batch), -np.inf), batch)], axis=1)
    chances = tf.nn.softmax(scores)
    return towers.ModelOutput(
        tf.reduce_mean(w * tf.sqrt(chances[:, 0] - 0.9)),  # of a negative number
    )


def test_infinities_that_do_no_harm_are_passed_over(tmp_path):
    folder = write(masked, harness.numbers(3, 4, 5, 1), tmp_path)
    found = towers.replay(masked, harness.numbers(1), folder)
    assert (found.tower, found.first.type, found.first.line) == (1, 'Sqrt', line_of(masked, 'of a negative number'))
    assert found.first == found.first_nan


def root(batch, *, training):
    w = harness.variable('w', [1.0, 1.0])
    return towers.ModelOutput(
        tf.reduce_mean(tf.sqrt(tf.reduce_sum(w) * batch)),  # root
    )


def test_a_fault_in_the_gradient_names_the_line_of_the_model(tmp_path):
    folder = write(root, harness.numbers(1, 4, 9, 0), tmp_path, clip_norm=1.0)
    found = towers.replay(root, harness.numbers(1), folder)
    assert np.isclose(found.loss, np.sqrt(18) / 2) and found.first.type == 'SqrtGrad'
    assert found.first.line == line_of(root, '# root') and found.first.forward.endswith('Sqrt')
    assert found.first.rows()['gradient of'] == found.first.forward


def penalised(batch, *, training):
    w = harness.variable('w', 0.0, regularizer=reciprocal)
    return towers.ModelOutput(tf.reduce_mean(batch + w))


def reciprocal(w):
    return 1.0 / w  # of nothing


def test_a_penalty_of_no_tower(tmp_path):
    folder = write(penalised, harness.numbers(*GOOD), tmp_path)
    found = towers.replay(penalised, harness.numbers(1), folder)
    assert found.tower == 0 and found.loss == 1.5
    assert (found.first.type, found.first.line) == ('RealDiv', line_of(reciprocal, '# of nothing'))


def drawn(batch, *, training):
    kept = towers.dropout(tf.ones([tf.shape(batch['x'])[0], 4]), 0.5, training=training)
    bad = tf.where(tf.reduce_sum(kept, 1) > 3, tf.log(batch['x']), batch['x'])  # in some rows, by chance
    return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 1.0) * bad))


def test_draws_by_example_are_those_of_the_step(tmp_path):
    data = harness.rows(x=np.zeros(64, np.float32), name=np.array(['a'] * 64))
    config = harness.config(n=4, global_batch_size=16, learning_rate=0.0, model_dir=str(tmp_path))
    with harness.started(drawn, data, config) as run:
        run.steps(1)
        finding = run.program.recorder.find(run.session)
        bundle.explainer(run.program.recorder, config)(run.session, 1)
    found = towers.replay(drawn, data, str(tmp_path / 'bundles' / 'step-1'))
    assert found.tower == finding.tower and finding.facts[0] == f'the loss is {found.loss:g}'
    assert found.first.type == 'Log'


def poisoned(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(harness.variable('w', 1.0) * batch['x']))


def test_an_input_that_was_bad_itself(tmp_path):
    data = harness.rows(x=np.array([1, 2, np.inf, 4], np.float32), y=np.arange(4))
    found = towers.replay(poisoned, data, write(poisoned, data, tmp_path))
    assert (found.tower, found.first.name, found.first.type, found.first.line) == (1, 'batch/x', 'Placeholder', None)


def test_another_tower_may_be_fine(tmp_path):
    folder = write(logarithm, harness.numbers(1, 2, 3, 0), tmp_path)
    found = towers.replay(logarithm, harness.numbers(1), folder, tower=0, device='cpu')
    assert found == towers.replay(logarithm, harness.numbers(1), folder, tower=0)
    assert found.first is found.first_nan is None and np.isclose(found.loss, np.log(2) / 2)
    assert 'It was tower 1 that was bad, and this is tower 0.' in found.why_finite()


def between(batch, *, training):
    """Each tower's gradient is finite, their sum is not."""
    w = harness.variable('w', 1.0)
    kept = 0 * tf.nn.dropout(batch, rate=0.5)  # drawn anew
    return towers.ModelOutput(w * 3e38 * tf.reduce_mean(tf.ones_like(batch) + kept), weight=tf.constant(1.0))


def test_what_can_not_be_made_again_is_said(tmp_path):
    folder = write(between, harness.numbers(*GOOD), tmp_path)
    found = towers.replay(between, harness.numbers(*GOOD), folder)
    assert (found.first, found.bad_tower) == (None, None)
    said = found.why_finite()
    assert (
        said.startswith('Not reproduced: all is finite this time, where the training found: ')
        and 'the gradient to apply of w holds 1 inf' in said
    )
    assert 'No tower was bad by itself' in said and '1 random operations of TensorFlow itself' in said
    assert f'RandomUniform made at {line_of(between, "drawn anew")}' in said


def test_what_does_not_fit_is_refused(tmp_path):
    folder = write(logarithm, harness.numbers(1, 2, 3, 0), tmp_path)
    with pytest.raises(ValueError, match='has towers 0 to 1, got tower 2; give one of them'):
        towers.replay(logarithm, harness.numbers(1), folder, tower=2)
    with pytest.raises(ValueError, match=r"inputs of types \['float32'\], the dataset has \['int64'\]; give the dataset of the training"):
        towers.replay(logarithm, harness.rows(np.arange(3)), folder)
    with pytest.raises(ValueError, match=r"inputs of types \['float32'\], the dataset has \['float32', 'float32'\]"):
        towers.replay(logarithm, harness.rows(np.zeros(2, np.float32), np.zeros(2, np.float32)), folder)
    with pytest.raises(ValueError, match=r'does not fit 1 of 4 variables \(w: shape'):
        towers.replay(root, harness.numbers(1), folder)
    with pytest.raises(ValueError, match='is no bundle'):
        towers.replay(logarithm, harness.numbers(1), str(tmp_path))
    inputs = pathlib.Path(folder, 'batch.data-00000-of-00001')
    inputs.write_bytes(inputs.read_bytes()[:3])
    with pytest.raises(ValueError, match=r'step-\d+/batch is damaged or not whole \(.+\); expected it as'):
        towers.replay(logarithm, harness.numbers(1), folder)
