"""Which checkpoints an evaluator takes: by cadence, once each, over restarts, though they come and go."""

import re
import threading

import pytest

import towers
from towers.checkpoint import manifest
from towers.evaluators import queue, results, scoring


def publish(folder, *steps, time=None, final=False):
    """Checkpoints without values, saved at the second of their step."""
    for step in steps:
        at = float(step if time is None else time)
        manifest.write(str(folder), manifest.Manifest(step=step, examples=0, files={}, time=at, final=final))


def evaluated(folder, cadence, *, over=False, between=lambda step: None):
    """The steps taken until none is due, `between` called after each."""
    known, taken = results.Results(str(folder), 'test'), []
    with known, queue.Queue(str(folder), known, cadence) as waiting:
        while (found := waiting.next(over=over)) is not None:
            known.add(scoring.Evaluation(found, {'step': found.step, 'examples': 1, 'loss': 1.0}, 0.0))
            taken.append(found.step)
            between(found.step)
    return taken


@pytest.fixture
def messages(monkeypatch):
    said = []
    for level in ('info', 'warning'):
        monkeypatch.setattr(queue.logging, level, lambda text, *args: 'Passed' in text and said.append(text % args))
    return said


@pytest.mark.parametrize(
    ('cadence', 'expected'),
    [('every', [10, 20, 30, 40, 50]), ('newest', [50]), ('20steps', [10, 30, 50]), ('25secs', [10, 40]), ('1000steps', [10])],
)
def test_a_cadence_takes_in_order_and_a_restart_nothing_twice(tmp_path, cadence, expected):
    publish(tmp_path, 10, 20, 30, 40, 50)
    assert evaluated(tmp_path, cadence) == expected
    assert evaluated(tmp_path, cadence) == []
    publish(tmp_path, 52, final=True)
    assert evaluated(tmp_path, cadence) == [52]


@pytest.mark.parametrize('cadence', ['every', 'newest', '100steps', '100secs'])
def test_the_newest_counts_as_final_where_none_will_follow(tmp_path, cadence):
    publish(tmp_path, 10)
    assert evaluated(tmp_path, cadence) == [10]
    publish(tmp_path, 20)
    assert evaluated(tmp_path, cadence, over=True) == [20]


def test_newest_says_what_it_passes_over_and_never_goes_back(tmp_path, messages):
    publish(tmp_path, 10, 20)
    between = {20: lambda: publish(tmp_path, 30, 40)}
    assert evaluated(tmp_path, 'newest', between=lambda step: between.get(step, lambda: None)()) == [20, 40]
    assert messages == [
        'Passed over the checkpoints of steps 10 (evaluator test), since that of 20 is there.',
        'Passed over the checkpoints of steps 30 (evaluator test), since that of 40 is there.',
    ]


def test_one_saved_anew_is_taken_again_and_one_that_is_gone_is_told_of(tmp_path, messages):
    publish(tmp_path, 10, 20, 30)

    def between(step):
        if step == 10:
            manifest.remove(str(tmp_path), 20)
            publish(tmp_path, 30, time=31)

    assert evaluated(tmp_path, 'every', between=between) == [10, 30]
    [text] = messages
    assert text.startswith('Passed over the checkpoints of steps 20, 30 (evaluator test): removed before they were evaluated;')


def test_those_that_come_and_go_during_an_evaluation_are_told_of(tmp_path, messages, monkeypatch):
    monkeypatch.setattr(queue, '_LOOK_SECS', 0.01)
    publish(tmp_path, 10)
    seen, real = threading.Event(), queue.Queue._look

    def look(self):
        found = real(self)
        if any(each.step == 20 for each in found):
            seen.set()
        return found

    def between(step):
        publish(tmp_path, 20)
        assert seen.wait(60)
        manifest.remove(str(tmp_path), 20)

    monkeypatch.setattr(queue.Queue, '_look', look)
    assert evaluated(tmp_path, 'every', between=between) == [10]
    assert len(messages) == 1 and 'steps 20 (evaluator test): removed' in messages[0]


@pytest.mark.parametrize('text', ['', 'each', '100', '10 steps', '-1steps', '5minutes'])
def test_other_cadences_are_refused(text):
    with pytest.raises(ValueError, match=f'--eval_cadence must be every, newest, or such as .*, got {re.escape(repr(text))}'):
        towers.Config(eval_cadence=text)


@pytest.mark.parametrize('name', ['a/b', '../other', '', '.hidden', 'a b'])
def test_a_name_that_is_no_folders_is_refused_at_once(name):
    with pytest.raises(ValueError, match=f'--eval_name must be the name of a folder, got {re.escape(repr(name))}'):
        towers.Config(eval_name=name)


def test_what_was_passed_over_is_said_once_and_briefly(tmp_path, messages):
    publish(tmp_path, *range(10, 110, 10))
    evaluated(tmp_path, 'newest', between=lambda step: step == 100 and publish(tmp_path, 110, 120))
    assert messages == [
        'Passed over the checkpoints of steps 10, 20, 30, 40, ..., 90 (9 in all) (evaluator test), since that of 100 is there.',
        'Passed over the checkpoints of steps 110 (evaluator test), since that of 120 is there.',
    ]
