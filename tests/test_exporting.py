import json
import os

import harness
import numpy as np
import pytest
import runs
import starter
import tensorflow.compat.v1 as tf

import towers
from models import data
from towers.checkpoint import leases
from towers.jobs import inference
from towers.sessions import ledger

FEATURES = np.arange(12, dtype=np.float32).reshape(4, 3)


def model(batch, *, training):
    """A linear model with a moving statistic, whose loss needs a label and whose predictions don't."""
    weight = tf.get_variable('w', [3, 2], use_resource=True)
    moved = tf.get_variable('moved', [2], trainable=False, use_resource=True)
    made = tf.matmul(batch['x'], weight) + moved
    loss = tf.reduce_mean(tf.squared_difference(made[:, 0], tf.cast(batch['label'], tf.float32)))
    return towers.ModelOutput(loss, predictions={'score': made, 'class': tf.argmax(made, axis=1)})


def blind(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch['x']))


def dataset():
    return tf.data.Dataset.from_tensor_slices({'x': FEATURES, 'label': np.arange(4)})


def values(step):
    return {'w': np.float32([[step, 0], [0, 1], [1, 1]]), 'moved': np.float32([0.5, -0.5])}


def expected(step, features):
    scores = features @ values(step)['w'] + values(step)['moved']
    return {'score': scores, 'class': scores.argmax(1)}


@pytest.fixture
def run(tmp_path):
    for step in (3, 5):
        runs.publish(tmp_path, step, final=step == 5, **values(step))
    os.makedirs(tmp_path / 'eval' / 'test')
    rows = [{'step': 3, 'accuracy': 0.9}, {'step': 5, 'accuracy': 0.8}]
    (tmp_path / 'eval' / 'test' / 'results.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return tmp_path


def require_same(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)


@pytest.mark.parametrize(('which', 'step'), [(None, 5), ('final', 5), ('best', 3), (3, 3)])
def test_a_saved_model_predicts_as_the_model_of_its_checkpoint(run, which, step):
    folder = towers.export(model, dataset, runs.config(run, keep_best='accuracy'), checkpoint=which, frozen=True)
    assert folder == str(run / 'export' / str(step)) and os.listdir(run / 'export') == [str(step)]
    signature = tf.compat.v2.saved_model.load(folder).signatures['serving_default']
    assert {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_input_signature[1].items()} == {
        'x': (tf.float32, [None, 3])
    }
    for count in (1, 7):
        features = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
        made = signature(x=tf.compat.v2.constant(features))
        np.testing.assert_allclose(made['score'], expected(step, features)['score'], rtol=1e-6)
        np.testing.assert_array_equal(made['class'], expected(step, features)['class'])


def test_a_frozen_graph_predicts_the_same(run):
    folder = towers.export(model, dataset, runs.config(run), frozen=True)
    about = json.loads((run / 'export' / '5' / 'export.json').read_text())
    definition = tf.GraphDef.FromString((run / 'export' / '5' / 'frozen_graph.pb').read_bytes())
    assert not [node.name for node in definition.node if node.op in ('VarHandleOp', 'VariableV2') or node.device]
    with tf.Graph().as_default(), tf.Session() as session:
        tf.import_graph_def(definition, name='')
        outputs = {name: tensor['tensor'] for name, tensor in about['outputs'].items()}
        require_same(session.run(outputs, {about['inputs']['x']['tensor']: FEATURES}), expected(5, FEATURES))
    assert (about['step'], about['examples'], about['checkpoint'], os.path.basename(folder)) == (5, 50, 'ckpt-5', '5')


def test_an_export_takes_the_place_of_one_before_and_leaves_nothing(run):
    os.makedirs(run / 'export' / '5.tmp')  # a killed one's
    for _ in range(2):
        towers.export(model, dataset, runs.config(run))
    assert os.listdir(run / 'export') == ['5']
    assert not leases.is_pinned(str(run), 5) and ledger.read(str(run / 'sessions')) == []


@pytest.mark.parametrize(
    ('of', 'which', 'message'),
    [
        (model, 'best', 'No best checkpoint is known'),
        (model, 4, 'is not whole'),
        (blind, None, 'returns no predictions'),
    ],
)
def test_what_can_not_be_exported_is_said(run, of, which, message):
    with pytest.raises(ValueError, match=message):
        towers.export(of, dataset, runs.config(run), checkpoint=which)
    assert not os.path.exists(run / 'export')


@pytest.mark.parametrize(('rows', 'step'), [([(3, 0.9), (5, 0.8), (4, 0.95)], 3), ([(4, 0.95)], None)])
def test_a_best_checkpoint_that_is_gone_is_told_of(run, caplog, rows, step):
    lines = [json.dumps({'step': step, 'accuracy': value}) for step, value in rows]
    (run / 'eval' / 'test' / 'results.jsonl').write_text('\n'.join(lines) + '\n')
    settings = runs.config(run, keep_best='accuracy')
    if step is None:
        with pytest.raises(ValueError, match='That of step 4, 0.95, is gone'):
            inference.checkpoint(settings, 'best')
        return
    assert inference.checkpoint(settings, 'best').step == step
    assert 'of step 4 with 0.95, is gone; taking that of step 3 with 0.9.' in caplog.text


@pytest.mark.parametrize('n', harness.TOWERS)
@pytest.mark.parametrize('count', [1, 2, 5, 12])
def test_predictions_come_in_the_order_of_the_examples(run, n, count):
    features = np.random.default_rng(n).integers(-9, 9, (count, 3)).astype(np.float32)
    settings = runs.config(run, eval_num_gpus=n, eval_batch_size=2)
    found = list(towers.predict(model, dataset, settings, examples=({'x': row} for row in features)))
    require_same({name: np.stack([each[name] for each in found]) for name in ('score', 'class')}, expected(5, features))


@pytest.mark.parametrize(
    ('example', 'message'),
    [
        ({'y': 1}, 'Example 1 has y, the model needs x'),
        ({'x': [1, 2]}, r'x of example 1 must have the shape \[3\], got \[2\]'),
        ({'x': ['a', 'b', 'c']}, 'x of example 1 is no float32'),
    ],
)
def test_an_example_that_does_not_fit_is_named(run, example, message):
    with pytest.raises(ValueError, match=message):
        list(towers.predict(model, dataset, runs.config(run), examples=[{'x': [0, 0, 0]}, example]))


@pytest.mark.parametrize(
    ('structure', 'names'),
    [(7, ['all']), ({'a': 1, 'b': 2}, ['a', 'b']), ((1, 2), ['0', '1']), ({'a': (1, {'c': 2})}, ['a_0', 'a_1_c'])],
)
def test_leaves_have_names(structure, names):
    assert list(inference.named(structure, 'all')) == names


@pytest.fixture
def commands():
    made = starter.Starter()
    yield made
    made.close()


def test_the_commands_export_and_predict_what_was_trained(commands, tmp_path):
    run, folder = tmp_path / 'run', str(starter.ROOT / 'scripts')

    def command(name, *more):
        done = commands.start(tmp_path / name, f'{folder}/{name}.py', f'--model_dir={run}', *more)
        assert done.wait() == 0, done.text()
        return done.text()

    command('train', '--model=mlp', '--device=cpu', '--train_steps=30', '--num_gpus=2')
    text = command('export', '--checkpoint=final', '--frozen')
    assert text.splitlines()[-1].split() == ['exported', str(run / 'export' / '30')]
    test = data.load('digits').test
    with tf.Graph().as_default(), tf.Session() as session:
        batch = session.run(tf.data.make_one_shot_iterator(test().batch(50)).get_next())
    np.savez(tmp_path / 'new.npz', **batch)
    command('predict', f'--files={tmp_path / "new.npz"}', '--eval_num_gpus=2', '--eval_batch_size=8', f'--output={tmp_path / "made"}')
    rows = [json.loads(line) for line in (tmp_path / 'made').read_text().splitlines()]
    signature = tf.compat.v2.saved_model.load(str(run / 'export' / '30')).signatures['serving_default']
    made = signature(image=tf.compat.v2.constant(batch['image']))
    assert [row['example'] for row in rows] == list(range(50))
    assert [row['class'] for row in rows] == made['class'].numpy().tolist()
    np.testing.assert_allclose([row['probability'] for row in rows], made['probability'], rtol=1e-5)
    assert np.mean([row['class'] for row in rows] == batch['label']) > 0.5
