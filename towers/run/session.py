"""The master session: an own loop round the standard `tf.train.SessionRunHook` protocol.

It calls hooks as `tf.train.SingularMonitoredSession` does, with the same arguments in the same order, but makes a step
through a prepared callable. It differs in two points, both on purpose: only the input's own end is the end of data,
and an OutOfRangeError out of a hook (a save to a full disk raises one) is a failure.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf
from absl import logging

from towers import errors
from towers.run import calling, ending, exhausted, looping, signals

_THREADS_GRACE_SECS = 120.0
_CLOSE_SECS = 10.0
_LOWER = ('--batch_size', '--towers_per_gpu', 'the shares of other sessions of the device (scripts/sessions.py shows them)')
_MOST_READY = 64  # a hook that asks by new objects at each step must not fill the memory
_NUMERIC_OPTIONS = (
    'trace_level', 'timeout_in_ms', 'inter_op_thread_pool', 'output_partition_graphs', 'report_tensor_allocations_upon_oom',
)  # fmt: skip


class MasterSession(contextlib.AbstractContextManager):
    """A session with hooks, as a context manager whose body is the training loop.

    On entry: `begin` of the hooks, the graph is finalised, the session made, `initialize` called, `after_create_session`
    of the hooks. On a clean exit: `end` of the hooks. Inside, the graph is the default graph of this thread.

        with MasterSession(graph, hooks, initialize=restore) as session:
            while not session.should_stop():
                values = session.run(fetches)

    The end of data and a StopIteration leave `run` as exceptions that the context manager takes as a clean end.
    """

    def __init__(
        self,
        graph: tf.Graph,
        hooks: Sequence[tf.train.SessionRunHook],
        *,
        connect: Callable[[tf.Graph], tf.Session] | None = None,
        initialize: Callable[[tf.Session], None],
        ended: Sequence[tf.Tensor] = (),
    ) -> None:
        """Makes nothing yet; the session exists inside the `with` block.

        Args:
          graph: the graph to run; hooks may still add to it in `begin`, nobody later.
          hooks: called in this order; with a `looping.Runs` among them each call makes several steps.
          connect: makes the session of a graph; None = a plain one.
          initialize: sets the variables and iterators of `graph`; variables that hooks add are set before it.
          ended: of `structs.Input`; none = it has no end.
        """
        self._graph = graph
        self._hooks = tuple(hooks)
        self._connect = connect or _plain
        self._initialize = initialize
        self._ended = ended
        self._stopped_by: str | None = None
        self._end_of_data: Exception | None = None
        self._coordinator = tf.train.Coordinator(clean_stop_exception_types=())
        self._contexts = contextlib.ExitStack()
        self._caller = calling.Caller(self._hooks, self._note_stop)
        self._session: Any = None
        self._fetcher: Any = None
        self._context: Any = None
        self._ready: dict[Any, _Ready] = {}

    @property
    def stopped_by(self) -> str | None:
        """Why the loop should end: 'data', a hook's own `stopped_by`, 'hook' for one without; None while it goes on."""
        return self._stopped_by

    def raw_session(self) -> tf.Session:
        """The TensorFlow session, to run something that hooks shall not see; closing it cancels a step in flight."""
        return self._session

    def __enter__(self) -> 'MasterSession':
        with contextlib.ExitStack() as undo:
            self._contexts.enter_context(self._graph.as_default())
            undo.push(lambda *_: self._close(clean=False))
            added = self._begin()
            self._session = self._connect(self._graph)
            self._fetcher = looping.fetcher(self._session, self._hooks)
            self._session.run(added)
            self._initialize(self._session)
            for hook in self._hooks:
                hook.after_create_session(self._session, self._coordinator)
                if self._coordinator.should_stop():
                    self._note_stop(hook)
            undo.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        clean = error is None or error is self._end_of_data or isinstance(error, StopIteration)
        self._close(clean=clean)
        return clean

    def should_stop(self) -> bool:
        """Whether the loop should end.

        Raises:
          Exception: what a thread reported to the coordinator.
        """
        self._coordinator.raise_requested_exception()
        if self._coordinator.should_stop():
            self._note_stop(None)
        return self._stopped_by is not None

    def request_stop(self, stopped_by: str) -> None:
        """Ends the loop before its next step, as a hook that stops does; `stopped_by` is why, unless there is a reason already."""
        self._stopped_by = self._stopped_by or stopped_by

    def run(self, fetches: Any) -> Any:
        """Makes one step with all hooks.

        Args:
          fetches: any structure that `tf.Session.run` takes.

        Returns:
          the values of `fetches` in the same structure.

        Raises:
          tf.errors.OutOfRangeError: at the end of data, a clean end, after which `should_stop()` holds.
          tf.errors.OpError: the step failed; the message names the node, its device and the user's line.
          RuntimeError: the session should stop already, or two hooks feed one tensor.
        """
        if self.should_stop():
            raise RuntimeError(f'run() was called though the session should stop (by {self._stopped_by}); ask should_stop() before it.')
        context = self._context
        if context is None or context.original_args.fetches is not fetches:
            context = self._context = tf.train.SessionRunContext(tf.train.SessionRunArgs(fetches), self._session)
        requests = self._caller.before(context)
        key = id(fetches), *self._caller.key(requests)
        ready = self._ready.get(key) or self._prepare(key, fetches, requests)
        results = self._step(ready.step)
        self._caller.after(context, ready.listeners, results[1:], ready.about)
        return results[0]

    def quiet(self, fetches: Sequence[Any]) -> Callable[[int, float], tuple[int, Any]]:
        """A function that makes steps which hooks have nothing to do in, by a flat list of fetches; see `calling.quietly`.

        Errors are those of `run`.
        """
        step = self._session.make_callable(list(fetches))
        return calling.quietly(self._hooks, step, self._fail)

    def held_back(self) -> None:
        """Tells the hooks with a method of this name that the last step, a quiet one, changed nothing."""
        calling.tell_held_back(self._hooks, self._session)

    def close(self) -> None:
        """Ends cleanly: `end` of the hooks, then the session is closed; a second call does nothing."""
        self._close(clean=True)

    def _begin(self) -> list[tf.Operation]:
        """Lets the hooks add to the graph, then finalises it; returns the initialisers of the variables that they added."""
        known = {id(variable) for variable in tf.global_variables() + tf.local_variables()}
        if any(isinstance(hook, tf.train.CheckpointSaverHook) for hook in self._hooks) and not tf.get_collection(tf.GraphKeys.SAVERS):
            tf.add_to_collection(tf.GraphKeys.SAVERS, tf.train.Saver())  # a monitored session's Scaffold makes it one
        for hook in self._hooks:
            hook.begin()
        added = [variable for variable in tf.global_variables() + tf.local_variables() if id(variable) not in known]
        self._graph.finalize()
        return [variable.initializer for variable in added]

    def _prepare(self, key: Any, fetches: Any, requests: Sequence[tf.train.SessionRunArgs | None]) -> '_Ready':
        """The step that gives what the caller and the hooks ask for, kept by its key where it may be made again."""
        made = [request for request in requests if request is not None]
        asked = [fetches, *[request.fetches for request in made if request.fetches is not None]]
        feeds, options = _merge(made)
        about = options or tf.RunOptions(), tf.RunMetadata()
        listeners = self._caller.listeners(requests)
        if feeds:
            given = about[1] if options else None
            return _Ready(lambda: self._fetcher.fed(asked, feeds, options, given), listeners, about)
        if options:
            return _Ready(lambda: self._fetcher.fetch(asked, *about), listeners, about)
        steady = self._fetcher.steady(asked)
        if steady is None:
            return _Ready(lambda: self._fetcher.fetch(asked), listeners, about)
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        return self._ready.setdefault(key, _Ready(steady, listeners, about, (fetches, requests)))

    def _note_stop(self, hook: Any) -> None:
        if self._stopped_by is None:
            self._stopped_by = getattr(hook, 'stopped_by', 'hook')

    def _step(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; only what TensorFlow raises in there is an error of the step."""
        try:
            return make()
        except tf.errors.OpError as error:
            self._fail(error)

    def _fail(self, error: tf.errors.OpError) -> NoReturn:
        """Raises what is to be said of the error of a step."""
        if isinstance(error, tf.errors.OutOfRangeError) and ending.is_end(error, self._session, self._ended):
            self._stopped_by, self._end_of_data = 'data', error
            raise error
        if exhausted.is_one(error):
            raise exhausted.explained(error, self._graph, self._again, session='training', lower=_LOWER) from error
        raise errors.located(error, self._graph) from error

    def _again(self, options: tf.RunOptions) -> Any:
        """The step that was last asked for, once more, when it has failed for good."""
        assert self._context is not None
        return self._session.run(self._context.original_args.fetches, options=options)

    def _close(self, *, clean: bool) -> None:
        session, self._session = self._session, None
        with self._contexts, contextlib.ExitStack() as closing:
            if session is not None:
                closing.callback(close, session)
            closing.callback(self._join_threads, quiet=not clean)
            for hook in self._hooks if clean and session is not None else ():
                hook.end(session)

    def _join_threads(self, *, quiet: bool) -> None:
        """Stops the threads that hooks registered with the coordinator; raises what one of them raised unless `quiet`."""
        self._coordinator.request_stop()
        try:
            self._coordinator.join(stop_grace_period_secs=_THREADS_GRACE_SECS, ignore_live_threads=True)
        except Exception:
            if not quiet:
                raise
            logging.exception('A thread of a hook failed too.')


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A step prepared: for whatever it was made of, and for later ones where callers and hooks ask by the same objects.

    Attributes:
      step: returns the caller's results and the hooks' answers.
      listeners: from `calling.Caller.listeners`.
      about: RunOptions and RunMetadata for the hooks.
      kept: what the step was asked by, which must live where the step may be made again, as it is known by ids.
    """

    step: Callable[[], Any]
    listeners: Sequence[tuple[Any, int]]
    about: tuple[tf.RunOptions, tf.RunMetadata]
    kept: Any = None


def _plain(graph: tf.Graph) -> tf.Session:
    return tf.Session(graph=graph)


def close(session: tf.Session) -> None:
    """Closes a session, unless something in it blocks that can't be cancelled, such as an input that waits for its data."""
    if not signals.within(_CLOSE_SECS, session.close):
        logging.warning('The session was not closed within %g s, as something in it is blocked; it is left behind.', _CLOSE_SECS)


def _merge(requests: Sequence[tf.train.SessionRunArgs]) -> tuple[dict[Any, Any], tf.RunOptions | None]:
    """The feeds of all hooks, and the strongest of the options that they ask for; None where none asks.

    Raises:
      RuntimeError: two hooks feed the same tensor.
    """
    special = [request for request in requests if request.feed_dict or request.options]
    if not special:
        return {}, None
    feeds: dict[Any, Any] = {}
    for request in special:
        twice = feeds.keys() & (request.feed_dict or {}).keys()
        if twice:
            raise RuntimeError(f'Two hooks feed the same tensor: {", ".join(sorted(map(str, twice)))}; drop one of them.')
        feeds.update(request.feed_dict or {})
    options = [request.options for request in special if request.options]
    return feeds, _strongest(options) if options else None


def _strongest(asked: Sequence[tf.RunOptions]) -> tf.RunOptions:
    merged = tf.RunOptions()
    for options in asked:
        for name in _NUMERIC_OPTIONS:
            setattr(merged, name, max(getattr(merged, name), getattr(options, name)))
        merged.debug_options.debug_tensor_watch_opts.extend(options.debug_options.debug_tensor_watch_opts)
        merged.debug_options.reset_disk_byte_usage |= options.debug_options.reset_disk_byte_usage
    return merged
