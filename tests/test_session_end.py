"""How the master session ends: when something in it blocks, and when the loop ends between two steps."""

import threading
import time

import pytest
import tensorflow.compat.v1 as tf

from towers.hooks import watch
from towers.run import session, watchdog


class Log(tf.train.SessionRunHook):
    """A user's hook that writes down its calls."""

    def __init__(self, calls):
        self.calls = calls

    def after_create_session(self, session, coord):
        self.calls.append('created')

    def before_run(self, run_context):
        self.calls.append('before')

    def after_run(self, run_context, run_values):
        self.calls.append('after')

    def end(self, session):
        self.calls.append('end')


class Watch:
    """Writes down what it is told."""

    def __init__(self, calls):
        self.calls, self.steps = calls, watchdog.Steps()

    def step_begins(self):
        self.calls.append('step begins')

    def step_ends(self, step):
        self.calls.append(f'step {step} ends')

    def steps_end(self, made):
        self.calls.append(f'{made} steps end')

    def held_back(self):
        self.calls.append('held back')

    def calls_hooks(self):
        self.calls.append('hooks')

    def saves(self):
        self.calls.append('saves')


def counting():
    with tf.Graph().as_default() as graph:
        number = tf.get_variable('number', [], tf.int64, initializer=tf.zeros_initializer(), use_resource=True)
        tf.identity(number.assign_add(1), name='step')
        tf.variables_initializer([number], name='init')
    return graph


def opened(graph, hooks):
    return session.MasterSession(graph, hooks, initialize=lambda raw: raw.run('init'))


def test_a_watch_hears_of_steps_of_the_users_hooks_and_of_saves():
    calls, graph = [], counting()
    told = Watch(calls)
    hooks = [watch.StepHook(told, graph.get_tensor_by_name('step:0')), Log(calls), watch.SavingHook(told), Log(calls)]
    with opened(graph, hooks) as master:
        assert master.run('step:0') == 1
    assert calls == [
        *['hooks', 'created', 'saves', 'created'],
        *['step begins', 'before', 'before', 'step 1 ends', 'after', 'saves', 'after'],
        *['hooks', 'end', 'saves', 'end'],
    ]


@pytest.mark.parametrize(
    ('most', 'tells', 'secs', 'made'), [(5, None, 1e9, 5), (5, None, 0.0, 1), (9, 3, 1e9, 3)], ids=['most', 'time', 'held back']
)
def test_only_a_watch_hears_of_quiet_steps_and_counts_them(most, tells, secs, made):
    """They end with the most that are asked for, with the time, and with one that changed nothing."""
    calls, graph = [], counting()
    told = Watch(calls)
    with graph.as_default():
        number = graph.get_tensor_by_name('step:0')
        changed = tf.not_equal(number, -1 if tells is None else tells)
    with opened(graph, [watch.StepHook(told, number), Log(calls)]) as master:
        calls.clear()
        assert master.quiet([changed])(most, time.monotonic() + secs) == (made, tells is None)
        assert calls == ['step begins', f'{made} steps end'] and (told.steps.done, told.steps.number) == (made, made)
        assert master.run('step:0') == made + 1


def test_a_loop_ended_between_two_steps_ends_cleanly_and_keeps_its_first_reason():
    calls = []
    with opened(counting(), [Log(calls)]) as master:
        master.run('step:0')
        master.request_stop('signal')
        assert master.should_stop() and master.stopped_by == 'signal'
        with pytest.raises(RuntimeError, match='by signal'):
            master.run('step:0')
        master.request_stop('time')
        assert master.stopped_by == 'signal'
    assert calls[-1] == 'end'


def test_a_session_that_can_not_be_closed_is_left_behind(monkeypatch):
    """An input that waits for its data can't be cancelled; the end must not wait for it."""
    monkeypatch.setattr(session, '_CLOSE_SECS', 0.3)
    said, arrive, asked = [], threading.Event(), threading.Event()
    monkeypatch.setattr(session.logging, 'warning', lambda text, *values: said.append(text % values))

    def wait(x):
        if x == 2:
            asked.set()
            arrive.wait()
        return x

    with tf.Graph().as_default() as graph:
        data = tf.data.Dataset.range(9).map(lambda x: tf.numpy_function(wait, [x], tf.int64)).prefetch(4)
        iterator = tf.data.make_initializable_iterator(data)
        number = iterator.get_next()
        tf.group(iterator.initializer, name='init')
    try:
        with opened(graph, []) as master:
            assert master.run(number) == 0
            assert asked.wait(30)
            start = time.monotonic()
        assert time.monotonic() - start < 10
        assert said == ['The session was not closed within 0.3 s, as something in it is blocked; it is left behind.']
    finally:
        arrive.set()
