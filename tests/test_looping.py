"""Calls of several steps: what hooks see of them, how they end, and what they refuse."""

import threading

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import marks
from towers.jobs import program, run_hooks, training

ROWS = np.arange(1, 9, dtype=np.float32)


def model(x, *, training):
    w = harness.variable('w', 1.0)
    return towers.ModelOutput(tf.reduce_mean(tf.square(w * tf.identity(x, name='x') - 1.0)))


def settings(folder, **changes):
    asked = {
        'global_batch_size': 2,
        'learning_rate': 0.001,
        'steps_per_run': 5,
        'log_steps': 1000,
        'summary_steps': 1000,
        'save_steps': 0,
        **changes,
    }
    return harness.config('parameter_server', 2, model_dir=str(folder), **asked)


class Seen(tf.train.SessionRunHook):
    """Records what each call gives for a fetch; may ask for every `until`-th step, for a trace, or feed."""

    def __init__(self, fetches, until=None, feeds=None, options=None):
        self.fetches, self.until, self.feeds, self.options = fetches, until, feeds, options
        self.seen, self.traced = [], []

    def steps_until_due(self, step):
        return self.until and self.until - step % self.until

    def before_run(self, run_context):
        graph = run_context.session.graph
        feeds = {graph.get_tensor_by_name(name): value for name, value in (self.feeds or {}).items()}
        fetches = {name: graph.get_tensor_by_name(name) for name in self.fetches}
        return tf.train.SessionRunArgs(fetches, feed_dict=feeds, options=self.options)

    def after_run(self, run_context, run_values):
        self.seen.append(tuple(np.asarray(run_values.results[name]).tolist() for name in self.fetches))
        self.traced.append(len(run_values.run_metadata.step_stats.dev_stats))


def trained(folder, *hooks, data=ROWS, model=model, **changes):
    return towers.train(model, harness.rows(data), settings(folder, **{'train_steps': 13, **changes}), hooks=hooks)


X = 'tower_0/x:0'


def test_a_hook_is_called_once_a_call_with_the_values_of_its_last_step(tmp_path):
    each = Seen([X])
    trained(tmp_path / 'one', each, steps_per_run=1)
    assert len(each.seen) == 13
    hook = Seen([X])
    trained(tmp_path / 'more', hook)
    assert hook.seen == [each.seen[step - 1] for step in (5, 10, 13)]


def test_a_hook_may_ask_for_steps(tmp_path):
    hook = Seen([X], until=3)
    trained(tmp_path, hook)
    assert len(hook.seen) == 5  # 3, 6, 9, 12, 13


def test_a_trace_is_that_of_the_last_step(tmp_path):
    hook = Seen([X], options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))
    trained(tmp_path, hook)
    assert len(hook.traced) == 3 and all(hook.traced)


def test_who_does_not_get_what_it_asked_for_is_not_called(tmp_path):
    """The loop ends at the third step, which is not finite, so that only the loop can tell of it."""
    hook, simple = Seen([X]), Seen([])
    data = np.float32([1, 2, 3, 4, np.nan, 6, *[1, 2] * 10])
    trained(tmp_path, hook, simple, data=data, nan_policy='skip', train_steps=7)
    assert hook.seen == [([1.0],)] and len(simple.seen) == 2


def test_what_a_hook_feeds_must_be_no_part_of_the_step(tmp_path):
    class Asks(Seen):
        def begin(self):
            tf.identity(tf.placeholder(tf.float32, [], name='given'), name='own')

    hook = Asks(['own:0'], feeds={'given:0': 3.0})
    trained(tmp_path / 'own', hook)
    assert hook.seen == [(3.0,)] * 3
    with pytest.raises(
        ValueError, match=r'^A hook feeds tower_0/x, a part of the step, and --steps_per_run .* leave --steps_per_run out.$'
    ):
        trained(tmp_path / 'other', Seen([], feeds={X: np.ones(1)}))


def test_stock_hooks_that_count_steps_act_at_the_end_of_a_call_or_are_refused(tmp_path):
    trained(tmp_path / 'saves', tf.train.CheckpointSaverHook(str(tmp_path / 'own'), save_steps=4))
    assert [path.rpartition('-')[2] for path in tf.train.get_checkpoint_state(str(tmp_path / 'own')).all_model_checkpoint_paths][-1] == '13'
    with pytest.raises(
        ValueError, match=r'^A StopAtStepHook would stop too late with --steps_per_run; give --train_steps instead of it\.$'
    ):
        trained(tmp_path / 'stops', tf.train.StopAtStepHook(last_step=7))


def placeholder(x, *, training):
    return towers.ModelOutput(tf.reduce_mean(x) * harness.variable('w', 1.0) * tf.placeholder(tf.float32, [], name='rate'))


def reference(x, *, training):
    count = tf.raw_ops.VariableV2(shape=[], dtype=tf.float32, container='', shared_name='count')
    return towers.ModelOutput(tf.reduce_mean(x) * harness.variable('w', 1.0) + 0.0 * tf.identity(count))


def looping(x, *, training):
    w = harness.variable('w', 1.0)
    _, y = tf.while_loop(lambda at, y: at < 3, lambda at, y: (at + 1, y * w), (0, x))
    return towers.ModelOutput(tf.reduce_mean(y))


def calling(x, *, training):
    w = harness.variable('w', 1.0)
    called = tf.function(lambda x: tf.while_loop(lambda at, y: at < 3, lambda at, y: (at + 1, y * 2.0), (0, x))[1], autograph=False)
    return towers.ModelOutput(tf.reduce_mean(called(x) * w))


@pytest.mark.parametrize(
    ('model', 'why'),
    [
        (placeholder, 'is a placeholder'),
        (reference, 'is or has a reference variable'),
        *[(made, "is a loop of the model's own") for made in (looping, calling)],
    ],
)
def test_a_model_that_can_not_be_repeated_is_refused_in_a_line(model, why, tmp_path):
    with pytest.raises(ValueError, match=rf'^--steps_per_run makes steps inside the graph, and .*test_looping.py:\d+\) {why}') as caught:
        trained(tmp_path, model=model)
    assert '\n' not in str(caught.value)


def failing(x, *, training):
    with tf.control_dependencies([tf.debugging.assert_less(x, 5.0, message='Too much.')]):
        return model(x, training=training)


def test_an_error_in_a_loop_names_the_operation_of_the_step_and_the_users_line(tmp_path):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r'Too much.*\[node tower_./.*made at .*test_looping.py:\d+\]'):
        trained(tmp_path, model=failing)


def test_a_stop_ends_a_loop_behind_the_step_in_flight(tmp_path):
    """The stop comes when the 40th example is read, long before the loop has made all that it may."""
    stop = threading.Event()

    def look(x):
        if x == 40:
            stop.set()
        return x

    def data():
        looked = tf.data.Dataset.range(10**9).map(lambda x: tf.ensure_shape(tf.numpy_function(look, [x], tf.int64), []))
        return looked.map(lambda x: tf.cast(x % 2, tf.float32))

    often = dict.fromkeys(('steps_per_run', 'train_steps', 'log_steps', 'summary_steps'), 10**9)
    config = settings(tmp_path, exact_resume=False, **often)
    made = program.make(model, data, config)
    with training.opened(made, config, around=run_hooks.Around(stop)) as master:
        *_, number = master.run((*marks.whole(made.step), made.step.step))
        assert master.should_stop() and master.stopped_by == 'signal'
    assert 1 < number < 10**9
