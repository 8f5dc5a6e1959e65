"""What a resume may change and what it may not, as pure functions of two configurations."""

import dataclasses
import functools
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.directory import meaning


def model(batch, *, training, width=3):
    raise NotImplementedError


def data():
    raise NotImplementedError


def step_of(activation=tf.nn.relu, epoch_examples=100, shards=(), **shapes):
    """As much of a training step as is looked at."""
    with tf.Graph().as_default() as graph:
        saved = {name: tf.get_variable(name, shape, use_resource=True) for name, shape in shapes.items()}
        with tf.name_scope('tower_0'):
            activation(tf.reshape(tf.matmul(tf.ones([2, 2]), tf.ones([2, 2])), [4]))
    given = types.SimpleNamespace(epoch_examples=epoch_examples, shards=shards)
    return types.SimpleNamespace(saved=saved, input=given, step=types.SimpleNamespace(graph=graph), summary_prefixes=('tower_0/',))


STEP = step_of(w=[2, 3], b=[3])


def facts(n=2, *, step=STEP, steps=400, functions=None, **settings):
    config = towers.Config(num_gpus=n, **settings)
    return meaning.of(config, step, towers=n, total_steps=steps, functions={'model': model, 'dataset': data, **(functions or {})})


def check(before, now, **settings):
    meaning.require_same(now, before, towers.Config(**settings), place='ckpt-7')


COSINE = {'schedule': 'cosine'}


@pytest.mark.parametrize(
    ('before', 'now'),
    [
        ({'steps': 400}, {'steps': 800}),
        ({'n': 2, 'batch_size': 32}, {'n': 4, 'batch_size': 16}),
        ({'n': 2, 'batch_size': 32}, {'n': 3, 'global_batch_size': 64}),
        ({'n': 1, 'global_batch_size': 32}, {'n': 1}),
        ({}, {'strategy': 'mirrored', 'input_pipeline': 'sharded', 'device': 'cpu'}),
        ({}, {'log_steps': 1, 'summary_steps': 5, 'verbose': True, 'save_steps': 7, 'keep_checkpoints': 2, 'deterministic': True}),
        ({}, {'train_secs': 9.0, 'prefetch': 3, 'eval_batch_size': 7, 'sync_checkpoint': True, 'init_checkpoint': 'other'}),
        (COSINE, COSINE),
        ({**COSINE, 'steps': 400}, {**COSINE, 'steps': 800, 'decay_over': 400.0}),
        ({'functions': {'optimizer': model}}, {'functions': {'optimizer': model}, 'optimizer': 'adam', 'beta1': 0.5}),
    ],
)
def test_what_means_the_same(before, now):
    check(facts(**before), facts(**now))


@pytest.mark.parametrize(
    ('before', 'now', 'message'),
    [
        ({}, {'learning_rate': 0.1}, 'under: learning_rate was 0.05, is 0.1. As before: --learning_rate=0.05. To accept it: --allow_'),
        ({'n': 2}, {'n': 4}, 'global_batch_size was 64, is 128. As before: --global_batch_size=64. To accept'),
        ({}, {'seed': 2}, 'seed was 1, is 2. As before: --seed=1'),
        ({}, {'optimizer': 'nesterov'}, 'optimizer was momentum, is nesterov. As before: --optimizer=momentum'),
        ({}, {'momentum': 0.8}, 'momentum was 0.9, is 0.8'),
        ({'optimizer': 'adam'}, {'optimizer': 'adam', 'beta2': 0.9}, 'beta2 was 0.999, is 0.9'),
        ({'optimizer': 'adam'}, {'optimizer': 'adam', 'epsilon': 0.1}, 'epsilon was none, is 0.1. As before: no --epsilon'),
        ({'l2': 0.1, 'clip_norm': 1.0}, {}, 'l2 was 0.1, is 0.0; clip_norm was 1.0, is none. As before: --l2=0.1 --clip_norm=1.0'),
        ({}, {'batch_norm': 'first'}, 'batch_norm was mean, is first'),
        ({}, {'warmup': 5.0}, 'warmup was 0.0, is 5.0'),
        ({'warmup': 5.0}, {'warmup': 5.0, 'schedule_unit': 'epochs'}, 'schedule_unit was steps, is epochs'),
        ({**COSINE, 'steps': 400}, {**COSINE, 'steps': 800}, 'decay_over was 400 steps, is 800 steps. As before: --decay_over=400. To'),
        (
            {**COSINE, 'steps': 400},
            {**COSINE, 'decay_over': 9.0, 'schedule_unit': 'epochs'},
            'decay_over was 400 steps, is 9 epochs. As before: --schedule_unit=steps --decay_over=400. To',
        ),
        (
            {'schedule': 'piecewise', 'boundaries': (3.0, 4.5)},
            {'schedule': 'piecewise', 'boundaries': (3.0,)},
            'boundaries was 3,4.5, is 3. As before: --boundaries=3,4.5',
        ),
        (
            {'schedule': 'exponential', 'decay_every': 2.0},
            {'schedule': 'exponential', 'decay_every': 2.0, 'staircase': False},
            'staircase was True, is False. As before: --staircase',
        ),
        ({}, {'step': step_of(w=[2, 4], b=[3])}, r'variables was 2 with 9 values in all \(.{8}\), is 2 with 11 values in all.*\. To '),
        ({}, {'step': step_of(w=[3, 2], b=[3])}, r'variables was 2 with 9 values in all \(.{8}\), is 2 with 9 values in all'),
        ({}, {'step': step_of(tf.nn.tanh, w=[2, 3], b=[3])}, 'operations was 1 MatMul, 1 Relu, is 1 MatMul, 1 Tanh. To accept it: --al'),
        ({}, {'functions': {'model': data}}, 'model was test_meaning:model, is test_meaning:data. To accept it: --allow_changed=model.'),
        ({}, {'functions': {'optimizer': data}}, 'optimizer was momentum, is test_meaning:data. As before: --optimizer=momentum'),
    ],
)  # fmt: skip
def test_what_means_another_thing_is_refused_with_its_remedy(before, now, message):
    with pytest.raises(ValueError, match=message):
        check(facts(**before), facts(**now))


def test_a_rate_that_is_scaled_by_the_towers_is_another_with_other_towers():
    scaled = functools.partial(facts, lr_scaling='linear')
    check(scaled(2, batch_size=8), scaled(2, batch_size=8))
    with pytest.raises(ValueError, match='lr_scaling was linear by 2 towers, is linear by 4 towers'):
        check(scaled(2, batch_size=8), scaled(4, batch_size=4))


def test_the_remedy_for_the_global_batch_names_what_it_replaces():
    with pytest.raises(ValueError, match='As before: --global_batch_size=64 in place of --batch_size=32.'):
        check(facts(2), facts(4, batch_size=32), batch_size=32)


def test_another_number_of_examples_in_a_pass_is_another_dataset():
    more = step_of(epoch_examples=101, w=[2, 3], b=[3])
    with pytest.raises(ValueError, match='epoch_examples was 100, is 101. To accept it: --allow_changed=epoch_examples'):
        check(facts(), facts(step=more))


def test_shards_are_never_cut_anew_and_counted_once():
    cut, other, finer = (facts(step=step_of(w=[2, 3], b=[3], shards=shards)) for shards in ((9,) * 20, (9,) * 19 + (8,), (1,) * 40))
    check(cut, cut)
    with pytest.raises(ValueError, match=r'input_shards was 20, is 40; .* As before: --input_shards=20\. To accept it: --allow_changed='):
        check(cut, finer)
    with pytest.raises(ValueError, match=r'input_shards was 20, is 0\. As before: --input_shards=20\.'):
        check(cut, facts())
    with pytest.raises(ValueError, match=r'under: shard_examples was 9(,9)+,\.\.\. \(20 in all\), is 9'):
        check(cut, other)
    known = functools.partial(meaning.shard_examples, cut)
    assert known(towers.Config(input_shards=20)) == [9] * 20
    for settings in ({}, {'input_shards': 40}, {'input_shards': 20, 'allow_changed': ('dataset',)}):
        assert known(towers.Config(**settings)) is None
    assert meaning.shard_examples({}, towers.Config(input_shards=20)) is None


def test_changes_are_accepted_one_by_one(caplog):
    before, now = facts(), facts(learning_rate=0.1, seed=2)
    with pytest.raises(ValueError, match=r'under: seed was 1, is 2\. .*--allow_changed=seed\.'):
        check(before, now, allow_changed=('learning_rate',))
    check(before, now, allow_changed=('seed', 'learning_rate', 'l2'))
    assert 'with changes that --allow_changed accepts: seed was 1, is 2; learning_rate was 0.05, is 0.1.' in caplog.text


@pytest.mark.parametrize('name', ['lerning_rate', 'all', 'strategy', 'towers', ''])
def test_only_facts_can_be_accepted(name):
    with pytest.raises(ValueError, match=f'--allow_changed={name} names no fact of a run; expected some of batch_norm, beta1, '):
        check(facts(), facts(), allow_changed=(name,))


def test_a_fact_that_only_one_of_two_versions_knows_is_let_be():
    now = facts()
    before = {**now, 'of_old': 3}
    del before['seed']
    check(before, now)
    check({}, now)


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 3
    layers: tuple[int, ...] = (1, 2)
    activation: object = None


def test_functions_are_described_without_addresses():
    sized = functools.partial(model, hparams=Sizes(width=4, activation=np.tanh))
    assert meaning.described(sized) == 'test_meaning:model(hparams=Sizes(width=4, activation=numpy:tanh))'
    assert meaning.described(functools.partial(functools.partial(data, 1), b=[2.5, 'x'])) == "test_meaning:data(1, b=(2.5, 'x'))"
    assert meaning.described(Sizes()) == 'Sizes()'
    assert meaning.described({'a': (None, True)}) == '(a=(None, True))'
    assert meaning.described(np.arange(3)) == meaning.described(np.arange(3)) != meaning.described(np.arange(1, 4))
    assert meaning.described(object()) == 'builtins:object'
    assert meaning.described(Sizes) == 'test_meaning:Sizes'


def test_a_dataset_is_its_function_whatever_its_arguments():
    bound = functools.partial(functools.partial(data, 'folder'), seed=3)
    check(facts(functions={'dataset': bound}), facts(functions={'dataset': functools.partial(data, 'elsewhere')}))


def test_a_script_has_the_same_name_whether_run_or_imported(tmp_path):
    (tmp_path / 'mine.py').write_text(
        'def model(): pass\nif __name__ == "__main__":\n  from towers.directory import meaning\n  print(meaning.described(model))'
    )
    environment = {'PYTHONPATH': str(meaning.pathlib.Path(meaning.__file__).parents[1]), 'TF_CPP_MIN_LOG_LEVEL': '3'}
    ran = subprocess.run([sys.executable, tmp_path / 'mine.py'], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == 'mine:model\n'
