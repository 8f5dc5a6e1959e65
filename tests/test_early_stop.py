import json

import harness
import pytest
import runs
import tensorflow.compat.v1 as tf

import towers
from towers import config
from towers.config import stopping as early_stop
from towers.hooks import stop

NAN = float('nan')


def rows(*values, name='accuracy'):
    return [{'step': 10 * (place + 1), name: value} for place, value in enumerate(values)]


@pytest.mark.parametrize(
    ('rule', 'found', 'reason'),
    [
        ('accuracy:2', rows(0.1, 0.2, 0.3), ''),
        ('accuracy:2', rows(0.3, 0.2), ''),
        ('accuracy:2', rows(0.3, 0.2, 0.3), 'accuracy got no better than 0.3, of step 10, in 2 evaluations'),
        ('accuracy:2', rows(0.3, 0.2, 0.4, 0.1), ''),
        ('accuracy:1', rows(0.3, NAN), 'accuracy got no better than 0.3, of step 10, in 1 evaluations'),
        ('accuracy:1', rows(NAN, 0.3), ''),
        ('accuracy:min:2', rows(0.1, 0.2, 0.3), 'accuracy got no better than 0.1, of step 10, in 2 evaluations'),
        ('loss:2', rows(1.0, 2.0, 3.0, name='loss'), 'loss got no better than 1, of step 10, in 2 evaluations'),
        ('loss:max:2', rows(1.0, 2.0, 3.0, name='loss'), ''),
        ('loss:2', rows(1.0, 2.0, 3.0), ''),
        ('accuracy>=0.3', rows(0.2, 0.3, 0.1), 'accuracy is 0.3 at step 20'),
        ('accuracy>=0.3', rows(0.2, 0.29), ''),
        ('loss<=1e-2', rows(1.0, 0.01, name='loss'), 'loss is 0.01 at step 20'),
        ('accuracy:1', [*rows(0.5, 0.4), {'step': 20, 'accuracy': 0.6}], ''),  # evaluated once more after a rollback
        ('accuracy:1', [{'accuracy': 1.0}, {'step': 1, 'accuracy': 'high'}], ''),
    ],
)
def test_a_rule_holds_where_it_should(rule, found, reason):
    assert early_stop.parse(rule).holds(found) == reason


@pytest.mark.parametrize(
    'text', ['', 'accuracy', 'accuracy:', 'accuracy:0', 'accuracy:up:3', 'accuracy=1', 'accuracy>=high', ':3', 'a:1:2']
)
def test_what_is_no_rule_is_refused_at_the_start(text):
    with pytest.raises(ValueError, match='--early_stop wants metric:evaluations or metric>=value'):
        config.Config(early_stop=text)


def test_the_question_is_asked_now_and_then(caplog):
    asked, said, now = [], [''], [0.0]
    hook = stop.StopEarly(lambda: asked.append(now[0]) or said[0], every_secs=1.0, clock=lambda: now[0])
    context = tf.train.SessionRunContext(None, None)
    for now[0] in (0.0, 0.5, 0.9, 1.0, 1.5, 2.1):
        hook.after_run(context, None)
    assert asked == [0.0, 1.0, 2.1] and not context.stop_requested
    said[0], now[0] = 'enough', 4.0
    with caplog.at_level('INFO'):
        hook.after_run(context, None)
    assert context.stop_requested and 'enough' in caplog.text


def model(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))


def test_results_of_another_process_end_a_training_and_it_stays_ended(tmp_path):
    settings = harness.config(train_steps=10**6, model_dir=str(tmp_path), early_stop='loss:2', eval_name='held_out', global_batch_size=2)
    folder = tmp_path / 'eval' / 'held_out'

    class Evaluates(tf.train.SessionRunHook):
        """Stands for an evaluator's process: its results come while the training runs."""

        def after_run(self, run_context, run_values):
            if not folder.exists():
                folder.mkdir(parents=True)
                text = ''.join(json.dumps({'step': step, 'loss': float(step)}) + '\n' for step in (1, 2, 3))
                (folder / 'results.jsonl').write_text(text)

    first = towers.train(model, harness.numbers(1, 2), settings, hooks=[Evaluates()])
    assert (first.stopped_by, first.steps_run > 0, first.checkpoint is not None) == ('early_stop', True, True)
    again = towers.train(model, harness.numbers(1, 2), settings)
    assert (again.stopped_by, again.steps_run, again.step) == ('early_stop', 0, first.step)
    assert runs.manifest.newest(str(tmp_path)).manifest.final
