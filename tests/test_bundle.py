"""Bundles of bad steps: what is written where, how many, and what is said of it."""

import json
import pathlib
import shutil

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run import bundle, flight


def linear(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(harness.variable('w', [2.0, 3.0]) * batch[:, None]))


@pytest.fixture(scope='module')
def bad():
    """A program of two towers after a step that was held back; the last row is bad."""
    config = harness.config(n=2, global_batch_size=4, nan_policy='skip')
    with harness.started(linear, harness.numbers(1, 2, 3, np.nan), config) as run:
        run.steps(1)
        yield run


def explain(run, model_dir, step=1):
    config = harness.config(n=2, global_batch_size=4, nan_policy='skip', model_dir=str(model_dir))
    return bundle.explainer(run.program.recorder, config)(run.session, step)


def names(folder):
    return sorted(path.name for path in pathlib.Path(folder).iterdir())


def test_a_bundle_holds_the_step_and_the_message_names_it(bad, tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    (tmp_path / 'flags.txt').write_text('--model=mine:model\n')
    folder = tmp_path / 'bundles' / 'step-6'
    assert explain(bad, tmp_path, 6) == (
        'Step 6 is not finite on tower 1: the input holds 1 nan in 2 values, the first at [1]; the loss is nan; '
        'the gradient of w holds 2 nan in 2 values, the first at [0]. '
        f'Its inputs and variables are in {folder}: python scripts/replay.py {folder} names the operation.'
    )
    found = bundle.read(str(folder))
    assert (found.folder, found.step, found.tower, found.facts[1]) == (str(folder), 6, 1, 'the loss is nan')
    assert found.config['seed'] == 1 and found.towers == [[{'dtype': 'float32', 'shape': [2]}]] * 2
    np.testing.assert_array_equal(found.values(flight.BATCH)['1/0'], [3, np.nan])
    np.testing.assert_array_equal(found.values(flight.VARIABLES)['w'], [2, 3])
    assert found.values(flight.VARIABLES)['global_step'] == 0
    data = 'data-00000-of-00001'
    files = ['bundle.json', 'config.json', 'flags.txt', *[f'{name}.{end}' for name in ('batch', 'variables') for end in (data, 'index')]]
    assert names(folder) == sorted(files) and names(tmp_path / 'bundles') == ['step-6']


def test_three_at_most_and_none_is_replaced(bad, tmp_path):
    folder = tmp_path / 'bundles'
    for step, name in ((4, 'step-4'), (4, 'step-4-2'), (9, 'step-9')):
        assert f'{folder / name} names the operation.' in explain(bad, tmp_path, step)
    before = names(folder)
    text = explain(bad, tmp_path, 10)
    assert text.startswith('Step 10 is not finite on tower 1: ')
    assert text.endswith(f'No bundle was written: {folder} holds 3 already; remove those you have seen.')
    assert names(folder) == before == ['step-4', 'step-4-2', 'step-9']
    shutil.rmtree(folder / 'step-4')
    assert f'{folder / "step-10"} names' in explain(bad, tmp_path, 10)


def test_what_a_killed_writer_left_is_no_bundle(bad, tmp_path):
    left = tmp_path / 'bundles' / 'step-4.tmp'
    left.mkdir(parents=True)
    (left / 'rubbish').write_text('x')
    explain(bad, tmp_path, 4)
    assert names(tmp_path / 'bundles') == ['step-4'] and 'rubbish' not in names(tmp_path / 'bundles' / 'step-4')


def test_a_folder_that_can_not_be_made_is_said_and_no_more(bad, tmp_path):
    (tmp_path / 'bundles').write_text('a file')
    text = explain(bad, tmp_path)
    assert text.startswith('Step 1 is not finite on tower 1: ') and 'Its bundle could not be written (' in text


def test_a_step_that_can_not_be_made_again_is_said(caplog, tmp_path):
    """No step was held back, so nothing is kept."""
    with harness.started(linear, harness.numbers(1, 2, 3, 4), harness.config(n=2, global_batch_size=4)) as run:
        text = explain(run, tmp_path)
    assert text.startswith('Step 1 is not finite in no tower by itself: it could not be made again. Its bundle could not be written (')
    assert 'The step could not be made again: ' in caplog.text


def test_others_are_no_bundles(bad, tmp_path):
    explain(bad, tmp_path, 1)
    folder = tmp_path / 'bundles' / 'step-1'
    with pytest.raises(
        ValueError, match=r'is no bundle of a bad step \(.*No such file.*\); expected a folder such as runs/mine/bundles/step-6'
    ):
        bundle.read(str(tmp_path))
    facts = json.loads((folder / 'bundle.json').read_text())
    (folder / 'bundle.json').write_text(json.dumps({**facts, 'format': 99}))
    with pytest.raises(ValueError, match='is no bundle of a bad step .it is of another version'):
        bundle.read(str(folder))
    (folder / 'bundle.json').write_text('{"format": 1')
    with pytest.raises(ValueError, match='is no bundle of a bad step'):
        bundle.read(str(folder))
