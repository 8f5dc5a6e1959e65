"""Fast steps of which hooks aren't told: they act at the same steps all the same, and the run is the same."""

import json
import os
import signal

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest
from towers.hooks import every, looks
from towers.jobs import program, stepping

EXAMPLES = np.linspace(-1, 1, 96, dtype=np.float32).reshape(32, 3)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def walked(timers, *, steps, secs, clock, back=None, extra=lambda step: 0.0, hooks=0.0):
    """The steps that are looked at, and those at which each timer is due; after step `back[0]` training goes on behind `back[1]`.

    A step takes `secs`, one at which a timer is due `extra(step)` more, and all hooks of one that is looked at `hooks`.
    """
    seen = looks.Looks(steps, clock)
    seen.at(*timers)
    looked, due = [], [[] for _ in timers]
    step = 0
    while step < steps:
        step += 1
        is_looked = seen.next(step)
        clock.now += secs
        if is_looked:
            looked.append(step)
            acting = [found for timer, found in zip(timers, due, strict=True) if timer.due(step)]
            for found in acting:
                found.append(step)
            clock.now += extra(step) if acting else 0.0
            seen.fetched()
            clock.now += hooks
        if back and step == back[0]:
            for timer in timers:
                timer.went_back(back[1])
            seen.next(step) and [timer.due(step) for timer in timers]  # the step that was held back
            step, back = back[1], None
    return looked, due


@pytest.mark.parametrize('secs', [0.001, 0.02, 0.06])
@pytest.mark.parametrize('every_steps', [(3, 7), (1, 100), (0, 50)])
def test_a_step_is_looked_at_where_a_hook_acts_by_its_number(every_steps, secs):
    clock = Clock()
    looked, due = walked([every.Every(n, clock=clock) for n in every_steps], steps=200, secs=secs, clock=clock)
    for n, found in zip(every_steps, due, strict=True):
        assert found == [step for step in range(1, 201) if n and step % n == 0]
    assert looked[0] == 1 and looked[-1] == 200
    longest = max(after - before for before, after in zip(looked, looked[1:], strict=False))
    assert longest <= max(1, looks.SECS // secs + 1)


@pytest.mark.parametrize('secs', [0.0001, 0.01])
@pytest.mark.parametrize('every_steps', [7, 50, 0])
def test_the_steps_that_need_not_be_asked_for_would_not_have_been_looked_at(every_steps, secs):
    """As many are made at once as `quiet` allows, each `secs` long: the same steps are looked at as where each is asked for."""
    clock, found, most = Clock(), [], []
    timer = every.Every(every_steps, clock=clock)
    seen = looks.Looks(300, clock)
    seen.at(timer)
    step = 1
    while step <= 300:
        if seen.next(step):
            found.append(step)
            clock.now += secs
            timer.due(step)
            seen.fetched()
        else:
            steps, until = seen.quiet(step, 0.025)
            made = 0
            while not made or (made < steps and clock.now < until):
                clock.now += secs
                made += 1
            most.append(made)
            step += made - 1
        step += 1
    single = Clock()
    assert found == walked([every.Every(every_steps, clock=single)], steps=300, secs=secs, clock=single)[0]
    assert max(most) > 1


def test_fast_steps_between_are_not_looked_at():
    clock = Clock()
    looked, _ = walked([every.Every(50, clock=clock)], steps=200, secs=0.0001, clock=clock)
    assert looked == [1, 50, 100, 150, 200]


def test_what_goes_by_time_is_looked_at_soon():
    clock = Clock()
    looked, [due] = walked([every.Every(secs=1.0, clock=clock)], steps=3000, secs=0.001, clock=clock)
    assert len(due) == 2 and all(abs(step - wanted) < 1.2 * looks.SECS / 0.001 for step, wanted in zip(due, [1000, 2000], strict=True))


def test_multiples_that_cost_too_much_are_passed_over():
    clock = Clock()
    timer = every.Every(10, clock=clock, share=0.01)
    timer.took(0.00205)  # not before 0.205 s
    looked, [due] = walked([timer], steps=400, secs=0.001, clock=clock)
    assert due == list(range(210, 401, 10)) and 1 < sum(step < 210 for step in looked) < 6


@pytest.mark.parametrize('extra', [0.0005, 0.003, 0.02])
@pytest.mark.parametrize('share', [0.01, 0.0025])
def test_what_looks_take_beyond_usual_steps_keeps_to_the_share_of_their_timer(share, extra):
    clock = Clock()
    timer = every.Every(20, clock=clock, share=share)
    _, [due] = walked([timer], steps=50_000, secs=0.001, clock=clock, extra=lambda step: extra)
    free = 2  # the first one's cost isn't known beforehand, and of two the cheaper counts
    assert share / 2 < (len(due) - free) * extra / clock.now < share or len(due) == 2500


@pytest.mark.parametrize('costs', [(0.002, 0.0001), (0.0001, 0.002)])
def test_of_several_costs_of_one_act_the_most_counts(costs):
    clock = Clock()
    timer = every.Every(10, clock=clock, share=0.01)
    for secs in costs:
        timer.took(secs)
    _, [due] = walked([timer], steps=400, secs=0.001, clock=clock)
    assert due[0] == 210  # the first multiple after 0.2 s; one of 200 is at its end


def test_what_hooks_take_is_theirs_to_say():
    clock = Clock()
    timer = every.Every(20, clock=clock, share=0.01)
    _, [due] = walked([timer], steps=4000, secs=0.001, clock=clock, extra=lambda step: 0.0001, hooks=5.0)
    assert len(due) > 150


def test_one_dear_look_does_not_silence_what_is_cheap_otherwise():
    clock = Clock()
    timer = every.Every(20, clock=clock, share=0.01)
    _, [due] = walked([timer], steps=4000, secs=0.001, clock=clock, extra=lambda step: 3.0 if step in (20, 1000) else 0.0001)
    assert len(due) > 150


def test_going_back_makes_the_same_steps_due_again():
    clock = Clock()
    _, [due] = walked([every.Every(10, clock=clock)], steps=60, secs=0.001, clock=clock, back=(35, 10))
    assert due == [10, 20, 30, 20, 30, 40, 50, 60]


def test_where_the_end_is_not_known_every_step_is_looked_at():
    seen = looks.Looks(None)
    assert [seen.next(step) for step in range(1, 5)] == [True] * 4 and seen.now


def model(batch, *, training):
    hidden = tf.nn.relu(tf.matmul(batch, tf.get_variable('w1', [3, 4])))
    value = tf.reduce_mean(tf.square(tf.matmul(hidden, tf.get_variable('w2', [4, 1])) - 1.0))
    return towers.ModelOutput(value, metrics={'value': tf.reduce_mean(hidden)})


def run(folder, settings, data, hooks=()):
    """The rows, the steps of the checkpoints and the newest one's variables, and the result."""
    result = towers.train(model, harness.rows(data), settings, hooks=hooks)
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for row in rows:
        del row['examples_per_sec'], row['step_ms'], row['input_wait']
    found = manifest.all(str(folder))
    reader = tf.train.load_checkpoint(found[-1].prefix)
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if not name.startswith('input_')}
    return rows, [each.step for each in found], values, result


@pytest.mark.parametrize('bad', [None, 'skip', 'rollback'])
@harness.each_split
def test_a_training_is_the_same_whether_or_not_somebody_looks_at_every_step(strategy, n, bad, tmp_path):
    data = EXAMPLES.copy()
    given = {'nan_policy': bad, 'nan_limit': 1000} if bad else {}
    if bad:
        data[13] = np.nan  # in one batch of each pass
    runs = []
    for name, hooks in (('quiet', ()), ('told', [tf.train.SessionRunHook()])):
        settings = harness.config(
            strategy, n, global_batch_size=8, learning_rate=0.1, train_steps=70, model_dir=str(tmp_path / name),
            log_steps=7, save_steps=3, summary_steps=20, keep_checkpoints=100, sync_checkpoint=True, **given,
        )  # fmt: skip
        runs.append(run(tmp_path / name, settings, data, hooks))
    (rows, saved, values, result), (told_rows, told_saved, told_values, told_result) = runs
    assert rows == told_rows and [row['step'] for row in rows] == list(range(7, 71, 7))
    assert saved == told_saved == [*range(3, 70, 3), 70]
    assert values.keys() == told_values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, told_values[name], err_msg=name)
    assert (result.step, result.examples, result.loss) == (told_result.step, told_result.examples, told_result.loss)


def test_steps_that_nobody_looks_at_fetch_one_scalar_at_most(tmp_path):
    settings = harness.config(n=4, global_batch_size=8, train_steps=50, model_dir=str(tmp_path))
    made = program.make(model, harness.rows(EXAMPLES), settings)
    fetched = [fetch for fetch in stepping.bare(made.step) if isinstance(fetch, tf.Tensor)]
    assert [(tensor.dtype, tensor.shape.rank) for tensor in fetched] == [(tf.bool, None)] or fetched[0].shape.rank == 0
    assert stepping.seen(made, settings).next(1)
    for ends in ({'train_secs': 5.0}, {'early_stop': 'loss:3', 'evaluate': True}):
        changed = harness.config(n=4, global_batch_size=8, train_steps=50, model_dir=str(tmp_path), **ends)
        assert all(stepping.seen(made, changed).next(step) for step in range(1, 20))


def test_a_signal_between_two_looks_leaves_the_right_counts(tmp_path, monkeypatch):
    """The loop is in fast steps when the signal comes: what it says it has done is what it saved."""
    monkeypatch.setattr(looks, 'SECS', 30.0)
    settings = harness.config(
        n=2, global_batch_size=8, learning_rate=0.01, train_steps=10**7, model_dir=str(tmp_path), log_steps=10**6, save_steps=10**6,
        summary_steps=10**6,
    )  # fmt: skip

    def data():
        def stop(number):
            if number == 4000:
                os.kill(os.getpid(), signal.SIGTERM)
            return np.float32(number)

        numbers = tf.data.Dataset.range(10**6)
        return numbers.map(lambda x: tf.ones([3]) * tf.ensure_shape(tf.numpy_function(stop, [x], tf.float32), []) * 1e-6)

    result = towers.train(model, data, harness.dataclasses.replace(settings, exact_resume=False))
    [saved] = manifest.all(str(tmp_path))
    assert result.stopped_by == 'signal' and 400 < result.step == saved.step and result.examples == 8 * result.step
