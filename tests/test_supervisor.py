"""Which evaluators a run has, from what it declares, and what each of them is asked."""

import re

import pytest
import runs
import test_evaluation

import towers
from towers.config import evaluation as eval_config
from towers.evaluators import supervisor


def data():
    return test_evaluation.DATA()


def named(folder, datasets, *, evaluate=False, evaluator=()):
    found = supervisor.of(runs.config(folder, evaluate=evaluate, evaluator=evaluator), datasets)
    return {each.name: each for each in found}


def test_each_has_the_runs_values_but_for_its_own(tmp_path):
    texts = ('held_out:cadence=60secs,batch_size=7,threads=2,nice=3', 'seen:dataset=train,num_gpus=2,gpu_memory_fraction=0.25')
    found = named(tmp_path, data, evaluator=texts)
    held, seen = found['held_out'].config, found['seen'].config
    assert (held.eval_name, held.eval_cadence, held.eval_batch_size, held.eval_threads, held.eval_nice) == ('held_out', '60secs', 7, 2, 3)
    assert (seen.eval_cadence, seen.eval_batch_size, seen.eval_num_gpus, seen.eval_gpu_memory_fraction) == ('every', 256, 2, 0.25)
    assert held.model_dir == str(tmp_path)


@pytest.mark.parametrize(
    ('datasets', 'given', 'expected'),
    [
        (None, {}, []),
        (data, {}, ['test']),
        (data, {'evaluate': True}, ['test']),
        (data, {'evaluator': ('a', 'b:')}, ['a', 'b']),
        (data, {'evaluator': ('a',), 'evaluate': True}, ['test', 'a']),
        ({'x': data, 'y': data}, {}, ['x', 'y']),
        ({'x': data, 'y': data}, {'evaluator': ('y:nice=0',)}, ['x', 'y']),
    ],
    ids=['none', 'one', 'one beside', 'declared', 'declared and one', 'by name', 'one of them declared'],
)
def test_there_are_as_many_as_are_declared_or_have_a_dataset(tmp_path, datasets, given, expected):
    assert list(named(tmp_path, datasets, **given)) == expected


def test_what_has_no_dataset_is_told(tmp_path):
    with pytest.raises(ValueError, match='--evaluate needs an evaluation dataset, got none'):
        named(tmp_path, None, evaluator=('a',))
    with pytest.raises(ValueError, match="evaluator 'b' has no dataset, got those of a; give it one"):
        named(tmp_path, {'a': data}, evaluator=('b',))


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        (('a', 'a:nice=3'), "--evaluator=a:nice=3: there is one of the name 'a' already"),
        (('a/b',), "--evaluator=a/b: name must be the name of a folder, got 'a/b'"),
        (('a:nise=3',), '--evaluator=a:nise=3: expected dataset, cadence, device, num_gpus, batch_size, parts, gpu_memory_fraction, '),
        (('a:nice',), "as key=value, got 'nice'; correct it"),
        (('a:nice=x',), "--evaluator=a:nice=x: nice wants a number, got 'x'"),
        (('a:nice=20',), '--evaluator=a:nice=20: nice goes from 0 to 19, got 20'),
        (('a:gpu_memory_fraction=7',), '--evaluator=a:gpu_memory_fraction=7: gpu_memory_fraction must be above 0 and at most 1, got 7.0.'),
        (('a:device=tpu',), "--evaluator=a:device=tpu: device is one of auto, gpu, cpu, got 'tpu'"),
        (('a:cadence=never',), "--evaluator=a:cadence=never: cadence must be every, newest, or such as 100steps or 60secs, got 'never'"),
        (('a:cadence=0steps',), "cadence must be every, newest, or such as 100steps or 60secs, got '0steps'"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_wrong_declaration_says_what_is_wrong(texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        towers.Config(evaluator=texts)


def test_a_declaration_may_name_its_dataset():
    assert eval_config.specs(('a:dataset=my.data:test,nice=3',)) == {'a': {'eval_name': 'a', 'dataset': 'my.data:test', 'eval_nice': 3}}


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'use_ema': True}, '--use_ema evaluates with the averages that --ema_decay makes, got none; give e.g. --ema_decay=0.999'),
        ({'eval_max_slowdown': 0.1}, '--eval_max_slowdown=0.1 is for an evaluator beside the training, got none; give --evaluate or'),
        ({'eval_cadence': 'newest'}, '--eval_cadence=newest is for an evaluator beside the training, got none'),
        ({'eval_cadence': 'newest', 'eval_every_steps': 3}, '--eval_every_steps=3 evaluates in the training, --eval_cadence is for'),
    ],
    ids=range(4),
)
def test_what_would_have_no_effect_is_refused_at_the_start(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        towers.train(test_evaluation.scaled, data, runs.config(tmp_path / 'run', **settings), eval_dataset=data)
    assert not (tmp_path / 'run').exists()
    supervisor.check(runs.config(tmp_path, evaluate=True, eval_cadence='newest', eval_max_slowdown=0.1, use_ema=True, ema_decay=0.9))


def test_stopping_early_without_an_evaluator_is_warned_of(tmp_path, caplog):
    supervisor.check(runs.config(tmp_path, early_stop='loss:3', evaluate=True))
    assert not caplog.text
    supervisor.check(runs.config(tmp_path, early_stop='loss:3', eval_name='mine'))
    assert "--early_stop=loss:3: this training has no evaluator; only what one started by hand as 'mine' finds counts" in caplog.text


def only_out_of_training(batch, *, training):
    """A model that reports its score when it is evaluated, not in training."""
    made = test_evaluation.scaled(batch, training=training)
    return made if not training else towers.ModelOutput(made.loss)


@pytest.mark.parametrize('flag', ['keep_best', 'early_stop'])
def test_a_metric_that_no_evaluation_reports_is_refused(tmp_path, caplog, flag):
    def check(name, *, evaluators=True, dataset=data):
        settings = runs.config(tmp_path, evaluate=evaluators, **{flag: name if flag == 'keep_best' else f'{name}:3'})
        beside = supervisor.of(settings, dataset) if evaluators else ()
        supervisor.check_metrics(settings, beside, ('speed',), only_out_of_training)

    for name in ('loss', 'speed', 'twice'):
        check(name)
    with pytest.raises(ValueError, match=f'--{flag}=accuracy.*: the model reports both, loss, twice, not accuracy; name one of these'):
        check('accuracy')
    for given in ({'evaluators': False}, {'dataset': lambda: 1 / 0}):  # others may be started by hand; it fails on its own
        caplog.clear()
        check('accuracy', **given)
        assert 'the model reports loss, speed, not accuracy' in caplog.text
