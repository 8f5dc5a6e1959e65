"""When the hook saves; a fake clock and a saver that only takes notes."""

import pytest
import small_run
import tensorflow.compat.v1 as tf

from towers import config
from towers.checkpoint import manifest
from towers.hooks import checkpointing, every


class Notes:
    """A saver that writes down what it is asked."""

    def __init__(self):
        self.busy = False
        self.spent = 0.0
        self.asked = []

    def prepare(self, session):
        self.asked.append('prepare')

    def save(self, session, *, final=False, last=False):
        self.asked.append((session, final, last))


def drive(hook, steps, saver):
    """The steps after which the hook saved."""
    saved = []
    for step in steps:
        context = tf.train.SessionRunContext(tf.train.SessionRunArgs(None), session=step)
        assert hook.steady_request.fetches == 'step'
        hook.after_run(context, tf.train.SessionRunValues(results=step, options=None, run_metadata=None))
        saved += [asked[0] for asked in saver.asked if asked != 'prepare']
        saver.asked.clear()
    return saved


def made(clock=lambda: 0.0, final=lambda: True, **settings):
    saver = Notes()
    return checkpointing.CheckpointHook(saver, 'step', config=config.CheckpointConfig(**settings), final=final, clock=clock), saver


@pytest.mark.parametrize(
    ('settings', 'steps', 'expected'),
    [
        ({'save_steps': 4}, range(1, 13), [4, 8, 12]),
        ({'save_steps': 4}, range(7, 13), [8, 12]),  # resumed: the same steps as without an interruption
        ({'save_steps': 1}, range(1, 4), [1, 2, 3]),
        ({'save_steps': 10}, range(8, 50, 8), [16, 24, 32, 40]),  # several steps a call
        ({'save_steps': 3}, [1, 2, 2, 3, 3, 4], [3]),  # skipped steps
        ({'save_steps': 2}, [0, 0, 1, 2], [2]),  # the first ones too
        ({'save_steps': 0}, range(1, 50), []),
        ({}, range(1, 301), [100, 200, 300]),
        ({'save_secs': 1e9}, range(1, 301), []),
    ],
)
def test_by_steps(settings, steps, expected):
    hook, saver = made(**settings)
    assert drive(hook, steps, saver) == expected


def test_by_default_a_save_comes_when_the_last_one_is_paid_for():
    now = [0.0]
    hook, saver = made(clock=lambda: now[0])
    saver.spent = 2.5 * every.SHARE
    saved = []
    for step in range(1, 1001):
        now[0] += 0.01
        saved += drive(hook, [step], saver)
    assert saved == [100, 400, 700, 1000]


def test_nothing_is_saved_before_the_first_step_that_was_made():
    seconds = iter(range(100))
    hook, saver = made(clock=lambda: float(next(seconds)), final=lambda: False, save_secs=0.5)
    assert drive(hook, [0, 0, 0], saver) == []
    hook.end('session')
    assert saver.asked == []
    assert drive(hook, [1], saver) == [1]


def test_by_seconds():
    now = [0.0]
    hook, saver = made(clock=lambda: now[0], save_steps=0, save_secs=10)
    saved = []
    for step in range(1, 40):
        now[0] += 1.0
        saved += drive(hook, [step], saver)
    assert saved == [11, 21, 31]


def test_a_busy_writer_puts_a_save_off_and_stops_no_step():
    hook, saver = made(save_steps=5)
    assert drive(hook, range(1, 5), saver) == []
    saver.busy = True
    assert drive(hook, range(5, 13), saver) == []
    saver.busy = False
    assert drive(hook, range(13, 21), saver) == [13, 15, 20]


def test_a_writer_that_hangs_is_told_now_and_then(caplog):
    now = [0.0]
    hook, saver = made(clock=lambda: now[0], save_steps=1)
    saver.busy = True
    for step in range(1, 1300):
        now[0] += 1.0
        drive(hook, [step], saver)
    assert ['has not been written for 600 s' in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.parametrize('final', [True, False])
def test_the_last_step_is_saved_at_the_end(final):
    hook, saver = made(final=lambda: final)
    hook.after_create_session('session', None)
    assert saver.asked == ['prepare']
    drive(hook, range(1, 3), saver)
    hook.end('session')
    assert saver.asked == [('session', final, True)]


@pytest.mark.parametrize(('final', 'expected'), [(True, 1), (False, 0)])
def test_a_run_that_made_no_step_saves_only_when_it_is_done(final, expected):
    hook, saver = made(final=lambda: final)
    hook.end('session')
    assert len(saver.asked) == expected


def test_with_a_real_session(tmp_path):
    with small_run.started(tmp_path, keep_checkpoints=2, sync_checkpoint=True) as run:
        with run.graph.as_default():
            hook = checkpointing.CheckpointHook(run.saver, 'step', config=config.CheckpointConfig(save_steps=2))
        hook.after_create_session(run.session, None)
        for step in range(1, 6):
            run.steps()
            context = tf.train.SessionRunContext(tf.train.SessionRunArgs(None), run.session)
            hook.after_run(context, tf.train.SessionRunValues(results=step, options=None, run_metadata=None))
        hook.end(run.session)
    assert small_run.steps_in(tmp_path) == [4, 5]
    assert [found.manifest.final for found in manifest.all(str(tmp_path))] == [False, True]
