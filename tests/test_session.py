"""The master session against TensorFlow's own monitored session: what hooks and callers see is the same."""

import collections
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.run import session

Pair = collections.namedtuple('Pair', 'left right')


class Recorder(tf.train.SessionRunHook):
    """Asks for what it is told to and records every call; acts as told in one of them."""

    def __init__(self, log, name='a', *, ask=None, act=None, at=None):
        self.log, self.name, self.ask, self.act, self.at = log, name, ask, act, at

    def _record(self, call, *values):
        self.log.append((self.name, call, *values))
        return call == self.at and len([entry for entry in self.log if entry[:2] == (self.name, call)]) == 2

    def begin(self):
        self.log.append((self.name, 'begin', tf.get_default_graph().finalized))

    def after_create_session(self, session, coord):
        self.log.append((self.name, 'created', type(session).__name__, session.graph.finalized))
        if self.at == 'created':
            self.act(coord)

    def before_run(self, run_context):
        if self._record('before', shape_of(run_context.original_args), type(run_context.session).__name__):
            self.act(run_context)
        return self.ask() if self.ask else None

    def after_run(self, run_context, run_values):
        traced = bool(run_values.run_metadata.step_stats.dev_stats)
        if self._record('after', plain(run_values.results), run_values.options.trace_level, traced):
            self.act(run_context)

    def end(self, session):
        self.log.append((self.name, 'end', type(session).__name__))


def plain(value):
    """A result as something that compares: type and contents."""
    if isinstance(value, dict):
        return type(value).__name__, [(name, plain(part)) for name, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(part) for part in value]
    return type(value).__name__, np.asarray(value).tolist()


def shape_of(asked):
    """What a caller asked for, without addresses."""
    return type(asked).__name__, type(asked.fetches).__name__, asked.feed_dict, asked.options


def graph_with_step():
    """A graph whose `train` counts global_step; `step` is its value after the step."""
    graph = tf.Graph()
    with graph.as_default():
        global_step = tf.train.get_or_create_global_step()
        read = global_step.read_value() + 0
        tf.add_to_collection('global_step_read_op_cache', read)  # what stock hooks read; else it races with the update
        with tf.control_dependencies([read, graph.as_graph_element(global_step)]):
            tf.identity(tf.assign_add(global_step, 1), name='step')
        x = tf.placeholder_with_default(tf.constant([1.0, 2.0]), [2], name='x')
        tf.multiply(x, 2.0, name='double')
    return graph


def master(graph, hooks):
    with graph.as_default():
        init = tf.global_variables_initializer()
    return session.MasterSession(graph, hooks, initialize=lambda raw: raw.run(init))


def monitored(graph, hooks):
    with graph.as_default():
        return tf.train.SingularMonitoredSession(hooks)


def drive(make, hooks_of, fetches, steps=3):
    """Runs hooks under a kind of session; returns the log, the caller's results and how it ended."""
    graph, log, results = graph_with_step(), [], []
    with graph.as_default():
        hooks, fetches = hooks_of(log), fetches()
    outcome = 'clean'
    try:
        with graph.as_default(), make(graph, hooks) as running:
            while len(results) < steps and not running.should_stop():
                results.append(plain(running.run(fetches)))
    except Exception as error:
        outcome = type(error).__name__
    return log, results, outcome


def tensor(name):
    return tf.get_default_graph().get_tensor_by_name(f'{name}:0')


def sparse():
    return tf.SparseTensor(tf.constant([[0]], tf.int64), tensor('double')[:1], [3])


FETCHES = {
    'tensor': lambda: tensor('step'),
    'name': lambda: 'double:0',
    'operation': lambda: tensor('step').op,
    'operation name': lambda: 'double',
    'list': lambda: [tensor('step'), tensor('double')],
    'tuple': lambda: (tensor('step'), tensor('double')),
    'named tuple': lambda: Pair(tensor('step'), {'x': tensor('double')}),
    'dict': lambda: {'s': tensor('step'), 'o': tensor('step').op, 'l': [tensor('double')]},
    'ordered dict': lambda: collections.OrderedDict(b=tensor('double'), a=tensor('step')),
    'default dict': lambda: collections.defaultdict(list, a=tensor('step')),
    'twice the same': lambda: [tensor('step'), [tensor('step'), (tensor('step'),)]],
    'empty': lambda: [],
    'sparse': sparse,
    'slices': lambda: {'g': tf.IndexedSlices(tensor('double'), tf.constant([0, 1]))},
}


@pytest.mark.parametrize('form', FETCHES)
def test_results_have_the_form_that_the_monitored_session_gives(form):
    def hooks(log):
        asked = FETCHES[form]()
        fresh = tf.train.SessionRunArgs({'step': tensor('step')})
        return [Recorder(log, ask=lambda: tf.train.SessionRunArgs(asked)), Recorder(log, 'b', ask=lambda: fresh), Recorder(log, 'c')]

    own, theirs = (drive(make, hooks, FETCHES[form]) for make in (master, monitored))
    assert own == theirs
    assert own[2] == 'clean' and len(own[1]) == 3


REQUESTS = {
    'nothing': lambda: None,
    'only no fetches': lambda: tf.train.SessionRunArgs(None),
    'a feed': lambda: tf.train.SessionRunArgs(tensor('double'), feed_dict={tensor('x'): [3.0, 4.0]}),
    'a trace': lambda: tf.train.SessionRunArgs(tensor('double'), options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)),
    'a time limit': lambda: tf.train.SessionRunArgs([], options=tf.RunOptions(timeout_in_ms=60000)),
    'all': lambda: tf.train.SessionRunArgs(
        {'d': tensor('double')}, {tensor('x'): [5.0, 6.0]}, tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE)
    ),
}


@pytest.mark.parametrize('request_of', REQUESTS)
def test_feeds_and_options_of_hooks_act_as_in_the_monitored_session(request_of):
    def hooks(log):
        first, calls = REQUESTS[request_of], iter(range(100))
        return [
            Recorder(log, ask=lambda: first() if next(calls) % 2 else None),  # in every other step
            Recorder(log, 'b', ask=lambda: tf.train.SessionRunArgs(tensor('step'))),
        ]

    own, theirs = (drive(make, hooks, lambda: tensor('double'), steps=4) for make in (master, monitored))
    assert own == theirs
    assert len(own[1]) == 4


def stop(context):
    context.request_stop()


def raises(error):
    def act(context):
        raise error

    return act


ACTS = {
    'stop before the step': (stop, 'before'),
    'stop after the step': (stop, 'after'),
    'stop at the start': (stop, 'created'),
    'StopIteration before the step': (raises(StopIteration()), 'before'),
    'StopIteration after the step': (raises(StopIteration()), 'after'),
    'an error before the step': (raises(ValueError('bad')), 'before'),
    'an error after the step': (raises(ValueError('bad')), 'after'),
    'an error at the start': (raises(ValueError('bad')), 'created'),
}


@pytest.mark.parametrize('act', ACTS)
def test_stops_and_errors_of_hooks_end_as_in_the_monitored_session(act):
    what, where = ACTS[act]

    def hooks(log):
        return [Recorder(log), Recorder(log, 'b', act=what, at=where), Recorder(log, 'c')]

    own, theirs = (drive(make, hooks, lambda: tensor('step'), steps=5) for make in (master, monitored))
    assert own == theirs
    assert len(own[1]) < 5


def test_stock_hooks_run_unchanged(tmp_path):
    def trained(make, folder):
        graph, seen = graph_with_step(), []
        with graph.as_default():
            hooks = [
                tf.train.StopAtStepHook(last_step=4),
                tf.train.NanTensorHook(tensor('double')[0]),
                tf.train.StepCounterHook(every_n_steps=2, output_dir=folder),
                tf.train.FeedFnHook(lambda: {tensor('x'): [7.0, 8.0]}),
                tf.train.FinalOpsHook(tensor('double')),
                tf.train.ProfilerHook(save_steps=2, output_dir=folder),
                tf.train.CheckpointSaverHook(folder, save_steps=2, saver=tf.train.Saver()),
            ]
            fetches = [tensor('step'), tensor('double')]
        with graph.as_default(), make(graph, hooks) as running:
            while not running.should_stop():
                seen.append(plain(running.run(fetches)))
        files = {path.name for pattern in ('model*', 'timeline*') for path in (tmp_path / folder).glob(pattern)}
        return seen, hooks[4].final_ops_values.tolist(), files

    own, theirs = (trained(make, str(tmp_path / make.__name__)) for make in (master, monitored))
    assert own == theirs
    assert [step for _, ((_, step), _) in own[0]] == [1, 2, 3, 4]
    assert {'model.ckpt-4.index', 'timeline-2.json'} <= own[2]


def data_graph():
    """A graph whose step adds the elements of range(3) to `total`; `ended` asks the iterator."""
    graph = tf.Graph()
    with graph.as_default():
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(3))
        ended = tf.logical_not(iterator.get_next_as_optional().has_value())
        total = tf.get_variable('total', [], tf.int64, tf.zeros_initializer())
        step = tf.assign_add(total, iterator.get_next())
        init = tf.group(iterator.initializer, tf.global_variables_initializer())
    return graph, step, ended, init


def test_the_end_of_data_is_a_clean_end():
    graph, step, ended, init = data_graph()
    log, seen = [], []
    with session.MasterSession(graph, [Recorder(log)], initialize=lambda raw: raw.run(init), ended=[ended]) as running:
        while not running.should_stop():
            seen.append(running.run(step))
        pytest.fail('the end of data leaves the loop')
    assert seen == [0, 1, 3]
    assert running.stopped_by == 'data'
    assert running.should_stop()
    assert [call for _, call, *_ in log] == ['begin', 'created', *['before', 'after'] * 3, 'before', 'end']


def test_the_end_of_data_is_a_failure_where_nothing_can_tell_it_from_another_error():
    graph, step, _, init = data_graph()
    with pytest.raises(tf.errors.OutOfRangeError, match='End of sequence'):
        with session.MasterSession(graph, [], initialize=lambda raw: raw.run(init)) as running:
            for _ in range(5):
                running.run(step)
    assert running.stopped_by is None


def test_another_out_of_range_error_of_the_step_is_a_failure():
    graph, step, ended, init = data_graph()
    with graph.as_default():
        queue = tf.FIFOQueue(1, tf.int64, shapes=[[]])
        closed, taken = queue.close(), queue.dequeue()
    log = []
    with pytest.raises(tf.errors.OutOfRangeError, match=r'is closed .*node fifo_queue_Dequeue \(QueueDequeueV2\)'):
        with session.MasterSession(graph, [Recorder(log)], initialize=lambda raw: raw.run([init, closed]), ended=[ended]) as running:
            running.run(step)
            running.run([step, taken])
    assert running.stopped_by is None
    assert log[-1][1] == 'before'


@pytest.mark.parametrize('where', ['before', 'after'])
def test_an_out_of_range_error_of_a_hook_is_a_failure(where):
    """A save to a disk where files may not grow raises one; a monitored session would end cleanly."""
    graph, step, ended, init = data_graph()
    log = []
    hook = Recorder(log, act=raises(tf.errors.OutOfRangeError(None, None, 'File too large')), at=where)
    with pytest.raises(tf.errors.OutOfRangeError, match='File too large'):
        with session.MasterSession(graph, [hook], initialize=lambda raw: raw.run(init), ended=[ended]) as running:
            while not running.should_stop():
                running.run(step)
    assert 'end' not in [call for _, call, *_ in log]


def test_an_error_of_a_step_names_the_node_its_device_and_the_users_line():
    graph = tf.Graph()
    with graph.as_default(), tf.device('/cpu:0'):
        zero = tf.placeholder_with_default(0.0, [])
        checked = tf.debugging.check_numerics(1.0 / zero, 'bad loss', name='check')
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        with session.MasterSession(graph, [], initialize=lambda raw: None) as running:
            running.run(checked)
    message = str(caught.value)
    assert '\n' not in message
    assert message.startswith('bad loss : Tensor had Inf values [node check (CheckNumerics) on /device:CPU:0, made at ')
    assert f'{__file__}:' in message
    assert isinstance(caught.value.__cause__, tf.errors.InvalidArgumentError)


def test_the_graph_does_not_grow_and_is_finalised():
    graph, counts = graph_with_step(), []
    with graph.as_default():
        step, double = tensor('step'), tensor('double')
    asks = iter([step, [step], {'a': double}, (step, double), step])
    hook = Recorder([], ask=lambda: tf.train.SessionRunArgs(next(asks)))
    with master(graph, [hook]) as running:
        assert graph.finalized
        for _ in range(5):
            counts.append(len(graph.get_operations()))
            running.run(step)
    assert len(set(counts)) == 1 and len(graph.get_operations()) == counts[0]


def test_variables_that_a_hook_makes_are_initialised():
    class Counting(tf.train.SessionRunHook):
        def begin(self):
            self.count = tf.assign_add(tf.get_variable('runs', [], tf.int32, tf.zeros_initializer()), 1)

        def before_run(self, run_context):
            return tf.train.SessionRunArgs(self.count)

        def after_run(self, run_context, run_values):
            self.seen = run_values.results

    graph, hook = graph_with_step(), Counting()
    with master(graph, [hook]) as running:
        for _ in range(3):
            running.run([])
    assert hook.seen == 3


def test_a_failed_start_ends_no_hook_and_leaves_no_session():
    graph, log, made = graph_with_step(), [], []
    running = session.MasterSession(graph, [Recorder(log)], initialize=lambda raw: made.append(raw) or raises(ValueError('no file'))(0))
    with pytest.raises(ValueError, match='no file'), running:
        pytest.fail('the body must not run')
    assert [call for _, call, *_ in log] == ['begin']
    with pytest.raises(RuntimeError, match='closed'):
        made[0].run('double:0')
    assert tf.get_default_graph() is not graph


def test_run_after_a_stop_is_refused_and_close_is_idempotent():
    graph, log = graph_with_step(), []
    with master(graph, [Recorder(log, act=stop, at='after')]) as running:
        running.run('step')
        running.run('step')
        assert running.stopped_by == 'hook'
        with pytest.raises(RuntimeError, match=r'should stop \(by hook\)'):
            running.run('step')
        running.close()
        running.close()
    assert [call for _, call, *_ in log].count('end') == 1


def test_two_hooks_may_not_feed_one_tensor():
    graph = graph_with_step()
    feed = {tensor_of(graph, 'x'): [1.0, 1.0]}
    hooks = [Recorder([], ask=lambda: tf.train.SessionRunArgs(None, feed)) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r'Two hooks feed the same tensor: .*"x:0"'):
        with master(graph, hooks) as running:
            running.run('step')


def test_the_first_hook_that_asks_to_stop_says_why():
    class Stops(Recorder):
        def __init__(self, why):
            super().__init__([], act=stop, at='after')
            self.stopped_by = why

    graph = graph_with_step()
    with master(graph, [Recorder([]), Stops('steps'), Stops('signal')]) as running:
        while not running.should_stop():
            assert running.stopped_by is None
            running.run('step')
    assert running.stopped_by == 'steps'


def test_what_a_thread_of_a_hook_raises_ends_the_run():
    class Threaded(tf.train.SessionRunHook):
        def after_create_session(self, session, coord):
            def work():
                with coord.stop_on_exception():
                    raise KeyError('lost')

            thread = threading.Thread(target=work)
            coord.register_thread(thread)
            thread.start()
            thread.join()

    graph = graph_with_step()
    with pytest.raises(KeyError, match='lost'):
        with master(graph, [Threaded()]) as running:
            while not running.should_stop():
                running.run('step')


def test_a_session_lives_in_a_thread_of_its_own():
    graph, default = graph_with_step(), []

    def body():
        with master(graph, [Recorder([])]) as running:
            running.run('step')
            default.append(tf.get_default_graph())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert default == [graph]


def test_closing_the_raw_session_cancels_a_step_that_waits():
    graph = tf.Graph()
    with graph.as_default():
        taken = tf.FIFOQueue(1, tf.int64, shapes=[[]]).dequeue()
    log, running_now = [], threading.Event()
    hook = Recorder(log, ask=running_now.set)
    running = session.MasterSession(graph, [hook], initialize=lambda raw: None)

    def close():
        running_now.wait()
        running.raw_session().close()

    closer = threading.Thread(target=close)
    with pytest.raises((tf.errors.CancelledError, RuntimeError)):
        with running:
            closer.start()
            running.run(taken)
    closer.join()
    assert 'end' not in [call for _, call, *_ in log]


def tensor_of(graph, name):
    return graph.get_tensor_by_name(f'{name}:0')
