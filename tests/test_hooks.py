"""The hooks that show, report and stop, on a tiny graph with a clock of the test's own."""

import io
import threading

import pytest
import tensorflow.compat.v1 as tf

from towers import errors, metrics, structs
from towers.hooks import every, progress, scalars, start, stop, summary
from towers.run import session

NAMES = ('step', 'loss', 'penalty', 'total_loss', 'learning_rate', 'examples', 'examples_seen')


class Clock:
    """Seconds that pass only when a test lets them."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Ticks(tf.train.SessionRunHook):
    """Each step takes so many seconds of a clock; the first one takes 10 more."""

    def __init__(self, clock, secs):
        self.clock, self.secs, self.first = clock, secs, 10.0

    def before_run(self, run_context):
        self.clock.now += self.secs + self.first
        self.first = 0.0


def train_step(*, first=0, stride=1, losses=None):
    """A TrainStep over one counter: 8 examples a step, loss 1/step or as given, the metrics a mean and an array."""
    global_step = tf.train.get_or_create_global_step()
    init = tf.assign(global_step, first)
    step = tf.assign_add(global_step, stride)
    number = tf.cast(step, tf.float32)
    loss = 1.0 / number if losses is None else tf.gather(tf.constant(losses, tf.float32), step - 1)
    report = {
        'step': step,
        'loss': loss,
        'penalty': loss * 0.0 + 0.5,
        'total_loss': loss + 0.5,
        'learning_rate': tf.constant(0.1) + 0.0 * loss,
        'examples': tf.constant(8, tf.int64) * stride + 0 * step,
        'examples_seen': 8 * step,
    }
    counted = {
        'accuracy': structs.Metric((number, 2.0 * number), metrics.ratio),
        'counts': structs.Metric((tf.stack([number, number]),), lambda total: total),
    }
    image = tf.summary.histogram('weights', tf.stack([loss, loss]))
    named = [tf.summary.scalar(f'tower_{n}/loss', loss) for n in (1, 10)]
    step_of = structs.TrainStep(
        ops=(step.op,),
        step=step,
        report=report,
        scalars={'gradient_norm': number * 2.0, 'towers/0/loss': loss},
        metrics=counted,
        summaries=(image, *named),
        summary_prefixes=('tower_1/',),
        global_step=global_step,
        saved={},
        sync=tf.no_op(),
        input=None,
    )
    return step_of, init


def run(make_hooks, *, steps=10, **about):
    """Makes so many steps with the hooks that `make_hooks(train_step)` returns; returns the session."""
    with tf.Graph().as_default() as graph:
        made, init = train_step(**about)
        hooks = make_hooks(made)
        with session.MasterSession(graph, hooks, initialize=lambda raw: raw.run(init)) as running:
            for _ in range(steps):
                if running.should_stop():
                    break
                running.run((*made.ops, made.report))
    return running


# Every


@pytest.mark.parametrize(
    ('settings', 'asked', 'due'),
    [
        ({'steps': 3}, range(1, 10), [3, 6, 9]),
        ({'steps': 1}, range(1, 4), [1, 2, 3]),
        ({'steps': 10}, [7, 8, 9, 10, 11], [10]),
        ({'steps': 10}, [8, 12, 16, 20, 24, 44], [12, 20, 44]),  # several steps a call
        ({'steps': 3}, [3, 4, 5, 5, 6, 3, 4, 5, 6], [3, 6, 3, 6]),  # a step held back, then a rollback to 2
        ({'steps': 3}, [0, 0, 1, 2, 3], [3]),  # the first steps are held back
        ({'steps': 0}, range(1, 5), []),
        ({}, range(1, 5), []),
        ({'secs': 2.5}, range(1, 9), [4, 7]),  # a second a step; counted from the first
        ({'secs': 0}, range(1, 5), []),
        ({'steps': 4, 'secs': 3}, range(1, 11), [4, 7, 8]),
    ],
)
def test_every_is_due(settings, asked, due):
    clock, found = Clock(), []
    timer = every.Every(**settings, clock=clock)
    for step in asked:
        found += [step] if timer.due(step) else []
        clock.now += 1.0
    assert found == due


@pytest.mark.parametrize(
    ('cost', 'expected'), [(0.0, [2, 4, 6, 8, 10, 12]), (0.02, [2, 4, 6, 8, 10, 12]), (0.03, [2, 6, 10]), (0.05, [2, 8])]
)
def test_with_a_share_a_multiple_comes_only_when_the_last_one_is_paid_for(cost, expected):
    clock, found = Clock(), []
    timer = every.Every(2, clock=clock, share=0.01)
    for step in range(1, 13):  # a second a step
        if timer.due(step):
            found.append(step)
            timer.took(cost)
        clock.now += 1.0
    assert found == expected


def test_only_what_nobody_asked_for_is_passed_over():
    for timer, expected in ((every.often(3, 5), [3, 6, 9]), (every.often(None, 5), [5])):
        found = []
        for step in range(1, 11):
            if timer.due(step):
                found.append(step)
                timer.took(1e9)
        assert found == expected


def test_summaries_that_cost_much_come_less_often_unless_asked_for():
    def steps_of(when):
        written = []

        class Slow(tf.train.SessionRunHook):
            def before_run(self, run_context):
                clock.now += 1.0

        clock = when.clock = Clock()

        def write(step, proto):
            clock.now += 0.05
            written.append(step)

        run(lambda made: [Slow(), summary.SummaryHook(made, when=when, write=write)], steps=24)
        return written

    assert steps_of(every.Every(2)) == list(range(2, 25, 2))
    assert steps_of(every.Every(2, share=0.01)) == [2, 4, 10, 16, 22]  # the first one prepares, and says nothing of the cost


# Progress


def lines(*, tty=False, last_step=40, steps=40, log_steps=10, secs=0.5, train_secs=None, **about):
    clock, stream = Clock(), io.StringIO()
    stream.isatty = lambda: tty

    def hooks(made):
        when = every.Every(steps=log_steps, clock=clock)
        return [Ticks(clock, secs), progress.ProgressHook(made.report, last_step=last_step, when=when, secs=train_secs, stream=stream)]

    run(hooks, steps=steps, **about)
    return stream.getvalue()


def test_a_pipe_gets_plain_lines():
    assert lines().splitlines() == [
        'step 1/40  loss 1.0000',
        'step 10/40  loss 0.1000  16 examples/s  ETA 0:15',
        'step 20/40  loss 0.0500  16 examples/s  ETA 0:10',
        'step 30/40  loss 0.0333  16 examples/s  ETA 0:05',
        'step 40/40  loss 0.0250  16 examples/s  ETA 0:00',
    ]


def test_the_last_step_is_shown_once_and_an_unknown_end_has_no_time_to_go():
    text = lines(last_step=None, steps=14)
    assert text.splitlines()[1:] == ['step 10  loss 0.1000  16 examples/s', 'step 14  loss 0.0714  16 examples/s']
    assert 'ETA' not in text


@pytest.mark.parametrize('last_step', [40, None])
def test_the_time_to_go_is_at_most_what_is_left_of_the_seconds(last_step):
    text = lines(last_step=last_step, steps=20, train_secs=20.0)  # the first step takes 10 of them
    assert [line.rpartition('  ')[2] for line in text.splitlines()] == ['ETA 0:10', 'ETA 0:05', 'ETA 0:00']
    assert [line.rpartition('ETA ')[2] for line in lines(train_secs=1000.0).splitlines()[1:]] == ['0:15', '0:10', '0:05', '0:00']


def test_a_resumed_run_shows_the_same_steps():
    assert [line.split('/')[0] for line in lines(first=27, steps=10).splitlines()] == ['step 28', 'step 30', 'step 37']


def test_a_terminal_gets_one_line_drawn_in_place(monkeypatch):
    monkeypatch.setenv('COLUMNS', '120')
    text = lines(tty=True, secs=0.04)
    drawn = text.split('\r')[1:]
    assert text.startswith('\r') and text.endswith('\n') and text.count('\n') == 1
    assert len(drawn) == 14  # the first of 40 steps, then every third: 0.12 s
    assert {len(line.rstrip('\n')) for line in drawn} == {119}
    assert drawn[0].startswith('[' + '-' * 24 + '] 1/40  loss 1.0000 ')
    assert drawn[-1].startswith('[' + '#' * 24 + '] 40/40  loss 0.0250  200 examples/s  ETA 0:00')


def test_a_narrow_terminal_cuts_the_line(monkeypatch):
    monkeypatch.setenv('COLUMNS', '30')
    assert {len(line.rstrip('\n')) for line in lines(tty=True).split('\r')[1:]} == {29}


def test_a_reader_that_is_gone_does_not_stop_the_training():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, 'Broken pipe')

    def hooks(made):
        return [progress.ProgressHook(made.report, last_step=5, when=every.Every(steps=1), stream=Gone())]

    assert run(hooks, steps=3).stopped_by is None


def test_a_failure_ends_the_live_line():
    class Fails(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise errors.Diverged

    stream = io.StringIO()
    stream.isatty = lambda: True
    kept = []

    def hooks(made):
        kept.append(progress.ProgressHook(made.report, last_step=5, when=every.Every(steps=1), stream=stream))
        return [*kept, Fails()]

    with pytest.raises(errors.Diverged):
        run(hooks, steps=3)
    kept[0].close()
    kept[0].close()
    assert stream.getvalue().count('\n') == 1


@pytest.mark.parametrize(
    ('secs', 'text'), [(0, '0:00'), (59.6, '1:00'), (3599, '59:59'), (3600, '1:00:00'), (90061, '25:01:01'), (-3, '0:00')]
)
def test_durations(secs, text):
    assert progress.duration(secs) == text


# Summaries


def summaries_of(*, summary_steps=4, **about):
    written, asked = [], []

    class Spy(summary.SummaryHook):
        def before_run(self, run_context):
            request = super().before_run(run_context)
            asked.append(len(request.fetches))
            return request

    def hooks(made):
        return [Spy(made, when=every.Every(steps=summary_steps), write=lambda step, proto: written.append((step, proto)))]

    run(hooks, **about)
    return written, asked


def test_summaries_are_computed_in_their_steps_only():
    written, asked = summaries_of(steps=9)
    assert [step for step, _ in written] == [4, 8]
    assert asked == [1, 1, 1, 6, 1, 1, 1, 6, 1]
    values = {value.tag: value for value in written[0][1].value}
    assert values['gradient_norm'].simple_value == 8.0
    assert values['towers/0/loss'].simple_value == 0.25
    assert values['weights'].histo.num == 2


@pytest.mark.parametrize(('first', 'stride', 'steps', 'expected'), [(6, 1, 6, [8, 12]), (0, 2, 5, [4, 8]), (0, 3, 6, [6, 9, 12, 18])])
def test_summaries_of_resumed_and_longer_calls(first, stride, steps, expected):
    assert [step for step, _ in summaries_of(first=first, stride=stride, steps=steps)[0]] == expected


def test_tags_lose_a_towers_scope_and_not_the_scope_of_another_tower():
    written, _ = summaries_of(steps=4)
    assert [value.tag for value in written[0][1].value][-2:] == ['loss', 'tower_10/loss']


@pytest.mark.parametrize(
    ('tag', 'prefixes', 'expected'),
    [
        ('tower_1/conv/w', ['tower_1'], 'conv/w'),
        ('tower_1/conv/w', ['tower_1/'], 'conv/w'),
        ('tower_10/conv/w', ['tower_1/'], 'tower_10/conv/w'),
        ('tower_0/tower_0/w', ['tower_0'], 'tower_0/w'),
        ('conv/my_tower_0/w', ['tower_0'], 'conv/my_tower_0/w'),
        ('family/tower_0/family/w', ['tower_0'], 'family/family/w'),
        ('towers/0/loss', ['tower_0', 'tower_1'], 'towers/0/loss'),
        ('tower_3/loss', ['tower_0', 'tower_3'], 'loss'),
        ('loss', [], 'loss'),
    ],
)
def test_strip(tag, prefixes, expected):
    assert summary.strip(tag, prefixes) == expected


# Starting and stopping


def test_the_start_and_the_graph_are_reported_once_and_the_graph_does_not_grow():
    starts, graphs, sizes = [], [], []

    class Size(tf.train.SessionRunHook):
        def before_run(self, run_context):
            sizes.append(len(run_context.session.graph.get_operations()))

    def hooks(made):
        when, out = every.Every(steps=2), io.StringIO()
        return [
            start.StartHook(made.global_step, start=starts.append, graph=graphs.append),
            progress.ProgressHook(made.report, last_step=12, when=when, stream=out),
            scalars.ScalarsHook(made, when=every.Every(steps=2), rows=dict, events=lambda *_: None),
            summary.SummaryHook(made, when=every.Every(steps=2), write=lambda *_: None),
            stop.StopAtStep(12, step=made.step, global_step=made.global_step),
            Size(),
        ]

    assert run(hooks, steps=20, first=7).stopped_by == 'steps'
    assert starts == [7] and len(graphs) == 1
    assert len(sizes) == 5 and set(sizes) == {len(graphs[0].get_operations())}


@pytest.mark.parametrize(
    ('first', 'last', 'stride', 'steps'), [(0, 3, 1, [1, 2, 3]), (2, 3, 1, [3]), (3, 3, 1, []), (5, 3, 1, []), (0, 3, 2, [2, 4])]
)
def test_stop_at_step(first, last, stride, steps):
    rows = []

    def hooks(made):
        return [
            stop.StopAtStep(last, step=made.step, global_step=made.global_step),
            scalars.ScalarsHook(made, when=every.Every(steps=1), rows=rows.append, events=lambda *_: None),
        ]

    assert run(hooks, first=first, stride=stride).stopped_by == 'steps'
    assert [row['step'] for row in rows] == steps


def test_stop_after_secs():
    clock, rows = Clock(), []

    def hooks(made):
        return [
            Ticks(clock, 1.0),
            stop.StopAfterSecs(13.0, clock),
            scalars.ScalarsHook(made, when=every.Every(steps=1), rows=rows.append, events=lambda *_: None),
        ]

    assert run(hooks).stopped_by == 'time'
    assert [row['step'] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(('set_at', 'steps'), [(0, 0), (1, 1), (3, 3)])
def test_stop_when_an_event_is_set(set_at, steps):
    event, seen = threading.Event(), []

    class Sets(tf.train.SessionRunHook):
        def before_run(self, run_context):
            seen.append(1)
            if len(seen) == set_at:
                event.set()  # while the step is in flight, which is finished

    if not set_at:
        event.set()
    assert run(lambda made: [Sets(), stop.StopWhen(event)]).stopped_by == 'signal'
    assert len(seen) == steps
