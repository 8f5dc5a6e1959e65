"""The watch over a run's waits: what it says, when, and what it ends; by a clock that the test sets."""

import pytest
from small_run import names_in

import towers
from towers import errors
from towers.run import watchdog

STEP, HOOKS, SAVING, IDLE = watchdog.Part.STEP, watchdog.Part.HOOKS, watchdog.Part.SAVING, watchdog.Part.IDLE


class Watched:
    """A watch without its thread, its clock, and what it said and did."""

    def __init__(self, folder, monkeypatch, **settings):
        self.now, self.said, self.done = 0.0, [], []
        self.watch = watchdog.Watchdog(
            towers.Config(**settings),
            folder=str(folder / 'run'),
            late=lambda done: f'number {done}',
            close=lambda: self.done.append('close'),
            clock=lambda: self.now,
        )
        for level in ('info', 'warning', 'error'):
            monkeypatch.setattr(watchdog.logging, level, lambda text, *values: self.said.append(text % values))
        monkeypatch.setattr(watchdog.signals, 'leave', lambda code: self.done.append(code))
        monkeypatch.setattr(watchdog, '_LEAVE_SECS', 0.0)
        monkeypatch.setattr(watchdog, '_write_stacks', lambda path, what: self.done.append(what) or True)

    def steps(self, *secs):
        """Makes steps that take so long."""
        for step, each in enumerate(secs, 1):
            self.watch.step_begins()
            self.look_for(each)
            self.watch.step_ends(step)
        self.watch.look()

    def look_for(self, secs, tick=1.0):
        """Looks once in a tick, for so long; stops when something happened."""
        self.watch.look()
        before = len(self.done)
        for _ in range(round(secs / tick)):
            self.now += tick
            self.watch.look()
            if len(self.done) > before:
                break
        return self.now


@pytest.fixture
def watched(tmp_path, monkeypatch):
    return lambda **settings: Watched(tmp_path, monkeypatch, **settings)


@pytest.mark.parametrize(
    ('settings', 'steps', 'limit'),
    [({}, [], 1800), ({}, [900, 1, 1, 1], 600), ({}, [1, 20, 30, 20], 1000), ({'step_timeout_secs': 2.0}, [], 20),
     ({'step_timeout_secs': 2.0}, [19, 1, 1], 2), ({'step_timeout_secs': 400.0}, [], 1800), ({'step_timeout_secs': 4000.0}, [], 4000)],
)  # fmt: skip
def test_a_step_may_take_so_long(watched, settings, steps, limit):
    run = watched(**settings)
    run.steps(*steps)
    assert run.done == []
    run.watch.step_begins()
    start = run.now
    run.look_for(10000, tick=run.watch._tick)
    assert run.now - start == pytest.approx(limit, abs=1)
    assert run.done[:2] == [f'The step after step {len(steps)}', 'close'] and run.done[-1] == watchdog.EXIT_FAILED


def test_it_says_what_it_waits_for_before_it_ends_the_run(watched):
    run = watched()
    run.steps(1, 1, 1)
    run.watch.step_begins()
    run.look_for(599)
    assert run.said == ['The step after step 3 has taken 60 s, waiting for number 3; it may take 600 s.'] and run.done == []
    with pytest.raises(errors.Stalled) as caught, run.watch:
        run.look_for(2)
        raise RuntimeError('what a closed session raises')
    assert str(caught.value).startswith('The step after step 3 has not ended within 600 s, waiting for number 3 (the stacks of all threads')
    assert '--step_timeout_secs' in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


def test_usual_steps_of_a_minute_are_not_worth_a_line(watched):
    run = watched()
    run.steps(70, *[70] * 9)
    came = 'What was waited for has come, after 70 s.'
    first, second = (
        'The step after step {0} has taken 60 s, waiting for number {0}; it may take {1} s.'.format(*x) for x in ((0, 1800), (1, 600))
    )
    assert run.said == [first, came, second, came]


def test_with_warn_it_goes_on_and_speaks_more_and_more_seldom(watched):
    run = watched(step_timeout_secs=10.0, on_step_timeout='warn')
    run.steps(1, 1)
    run.watch.step_begins()
    start, spoken = run.now, []
    for _ in range(5):
        spoken.append(run.look_for(1000) - start)
    assert spoken == [10, 20, 40, 80, 160] and set(run.done) == {'The step after step 2'}
    assert all('waiting on' in text for text in run.said)
    run.watch.step_ends(3)
    run.watch.look()
    assert run.said[-1] == 'What was waited for has come, after 160 s.'


def test_time_in_which_the_process_did_not_run_does_not_count(watched):
    run = watched(step_timeout_secs=10.0)
    run.steps(1, 1)
    run.watch.step_begins()
    run.watch.look()
    for _ in range(4):
        run.now += 1000.0  # suspended
        run.watch.look()
    assert run.done == [] and run.said == []
    run.look_for(10)
    assert 'close' in run.done


def test_a_users_hook_is_only_warned_of_a_save_may_take_an_hour_and_idling_any_time(watched):
    run = watched(step_timeout_secs=10.0)
    run.steps(1, 1)
    run.watch.calls_hooks()
    run.look_for(1000)
    assert run.done == ['A hook after step 2'] and run.said[-1].endswith('It may take 10 s (--step_timeout_secs); waiting on.')
    run.watch.saves()
    start = run.now
    assert run.look_for(10000) - start == 3600 and 'close' in run.done
    run.done.clear()
    run.watch.enter(IDLE)
    run.look_for(10000)
    assert run.done == []


def test_0_watches_nothing_and_the_thread_watches_by_itself(watched, monkeypatch):
    looks = []
    monkeypatch.setattr(watchdog.Watchdog, 'look', lambda self: looks.append(self._given))
    with watched(step_timeout_secs=0.0).watch, watched(step_timeout_secs=0.01).watch as watch:
        while len(looks) < 3:
            watch._over.wait(0.001)
    assert set(looks) == {0.01}


def test_stacks_of_all_threads_are_written(tmp_path):
    path = tmp_path / 'made' / 'stacks.txt'
    assert watchdog._write_stacks(str(path), 'The step after step 3')
    text = path.read_text()
    assert 'The step after step 3\n' in text and 'test_stacks_of_all_threads_are_written' in text
    (tmp_path / 'file').write_text('')
    assert not watchdog._write_stacks(str(tmp_path / 'file' / 'stacks.txt'), '')
    assert names_in(tmp_path) == ['file', 'made']
