"""What follows a step that is not finite, by policy: a hook on a counter that says which steps were held back."""

import contextlib

import pytest
import tensorflow.compat.v1 as tf

from towers import config, errors
from towers.hooks import nan
from towers.run import session


class Training:
    """A session that makes a step in each run, but for those runs (counted from 1) in which it is held back."""

    def __init__(self, bad, *, first_skipped=0, back_to=None, **settings):
        self.told, self.gone_back = [], []
        with tf.Graph().as_default() as graph:
            counts = {name: tf.Variable(start, name=name, dtype=tf.int64) for name, start in self.starts(first_skipped).items()}
            run = tf.assign_add(counts['runs'], 1)
            held = tf.reduce_any(tf.equal(run, tf.constant([0, *bad], tf.int64)))
            with tf.control_dependencies([tf.assign_add(counts['step'], 1 - tf.cast(held, tf.int64))]):
                step = counts['step'].read_value()
            report = {'step': step, 'skipped': tf.assign_add(counts['skipped'], tf.cast(held, tf.int64))}
            back = tf.assign(counts['step'], back_to or 0).op

            def rollback(raw):
                raw.run(back)
                self.gone_back.append(back_to)
                return back_to

            self.hook = nan.NanHook(
                report,
                (counts['skipped'], counts['step']),
                config.RunConfig(**settings),
                explain=self.explain,
                rollback=None if back_to is None else rollback,
            )
            init = tf.global_variables_initializer()
        self.fetches = report
        self.session = session.MasterSession(graph, [self.hook], initialize=lambda raw: raw.run(init))

    @staticmethod
    def starts(skipped):
        return {'runs': 0, 'step': 0, 'skipped': skipped}

    def explain(self, raw, number):
        assert isinstance(raw, tf.Session)
        self.told.append(number)
        return f'Step {number} is bad.'

    def run(self, count):
        """The steps reached after each run."""
        with self.session:
            return [int(self.session.run(self.fetches)['step']) for _ in range(count)]


def test_stop_stops_at_the_first():
    training = Training([3])
    with pytest.raises(errors.Diverged, match=r'^Step 3 is bad\. Use a lower --learning_rate.*--nan_policy=skip\.$'):
        training.run(5)
    assert training.told == [3]


def test_what_was_held_back_in_an_earlier_session_is_no_news():
    training = Training([], first_skipped=7)
    assert training.run(3) == [1, 2, 3] and training.told == []


def test_skip_goes_on_with_a_warning_for_each(caplog):
    training = Training([1, 4, 5], nan_policy='skip')
    assert training.run(7) == [0, 1, 2, 2, 2, 3, 4]
    assert training.told == [1, 3, 3]
    said = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert [text[: len('Step 3 is bad.')] for text in said] == ['Step 1 is bad.', 'Step 3 is bad.', 'Step 3 is bad.']
    assert said[2].endswith('The step is left out and the next batch taken (2 in a row of at most 10, 3 in all).')


@pytest.mark.parametrize(('bad', 'reached'), [([2, 3, 5, 6, 8], 9), ([2, 3, 4], None), ([1, 2, 3], None)])
def test_the_limit_is_of_steps_in_a_row(bad, reached):
    training = Training(bad, nan_policy='skip', nan_limit=2)
    with contextlib.nullcontext() if reached else pytest.raises(errors.Diverged, match='one more than --nan_limit=2 in a row'):
        assert len(training.run(9)) == reached
    assert len(training.told) == len(bad)


def test_no_limit_above_zero_stops_at_the_first():
    with pytest.raises(errors.Diverged, match=r'Step 2 is bad\. That is one more than --nan_limit=0'):
        Training([2], nan_policy='skip', nan_limit=0).run(3)


def test_rollback_goes_back_and_on(caplog):
    training = Training([4], nan_policy='rollback', back_to=1)
    assert training.run(6) == [1, 2, 3, 3, 2, 3]
    assert training.gone_back == [1] and 'Going back to step 1 and on with the next batch (1 in a row of at most 10' in caplog.text


def test_steps_made_again_do_not_end_a_row():
    """Each try fails at a step that was reached before, so the same checkpoint is not tried for ever."""
    training = Training([4, 7, 10], nan_policy='rollback', back_to=1, nan_limit=2)
    with pytest.raises(errors.Diverged, match='Step 4 is bad. That is one more than --nan_limit=2'):
        training.run(12)
    assert training.gone_back == [1, 1]


def test_a_step_further_than_before_ends_a_row():
    training = Training([3, 7, 12], nan_policy='rollback', back_to=1, nan_limit=1)
    assert training.run(12)[-1] == 5 and training.gone_back == [1, 1, 1]
