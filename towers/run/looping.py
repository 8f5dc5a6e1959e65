"""Calls that make several steps: how many each makes, and what the hooks are told of it.

A call makes at most so many steps as are left to the next one at which a hook has something to do, so that falls on the
last step of a call. What the loop keeps of its last step (report and metrics) is all that most calls are asked for; where
more is asked (summaries, a trace, a user's own tensors) the last step is made outside of the loop, as any step is.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import loop as loop_lib
from towers.run import calling, fetching

_ANSWER_SECS = 5.0


class Runs(tf.train.SessionRunHook):
    """Plans each call, and counts the steps of this session; as a hook it must stand before those that it tells.

    A hook says by `steps_until_due(step)` how many steps after `step` it has something to do, None = at none in particular,
    and is told before each call by `planned(step, steps)`; both are optional.

    Args:
      step: to repeat.
      operations: those that make one whole step.
      most: steps of one call.
    """

    def __init__(self, step: structs.TrainStep, operations: Sequence[tf.Operation], most: int) -> None:
        self.train_step, self.operations = step, tuple(operations)
        self._most = most
        self._loop: loop_lib.Loop | None = None
        self._untils: list[Callable[[int], float | None]] = []
        self._told: list[Callable[[int, int], None]] = []
        self._session: Any = None
        self._begun: int | None = None  # global_step before the call; None = to be read
        self._done = 0  # steps of this session, as the marks count them
        self.in_loops = 0  # of those, in loops that have ended
        self.steps = 1  # of the call
        self.was_held_back = False  # the last step of the last call changed nothing

    @property
    def loop(self) -> loop_lib.Loop:
        """What makes the steps, once the session has begun."""
        assert self._loop is not None
        return self._loop

    def begin(self) -> None:
        """Adds the loop to the graph."""
        self._loop = loop_lib.make(self.train_step, self.operations)

    def fetcher(self, session: tf.Session, hooks: Sequence[tf.train.SessionRunHook]) -> 'Fetcher':
        """What makes the calls in a session; `hooks` may ask for steps."""
        self._session = session
        self._untils = [hook.steps_until_due for hook in hooks if hasattr(hook, 'steps_until_due')]
        self._told = [hook.planned for hook in hooks if hasattr(hook, 'planned')]
        return Fetcher(session, self)

    def before_run(self, run_context: tf.train.SessionRunContext) -> None:
        """Plans the call."""
        if self._begun is None:
            self._begun = int(self._session.run(self.train_step.global_step))
        begun = self._begun
        self.steps = int(max(1, min([self._most, *[until for ask in self._untils if (until := ask(begun)) is not None]])))
        for tell in self._told:
            tell(begun, self.steps)

    def looped(self, made: int, reached: int) -> int:
        """Notes a loop: steps that loops have made by now, and the step that was reached; returns how many this one made."""
        steps, self.in_loops = made - self.in_loops, made
        self._note(steps, reached)
        return steps

    def stepped(self, reached: int) -> None:
        """Notes a step outside of the loop."""
        self._note(1, reached)

    def went_back(self) -> None:
        """Says that the variables are those of another step now."""
        self._begun = None

    def in_flight(self) -> int:
        """Steps that the loop in flight has made, 0 where the session does not answer; for any thread, it may take seconds."""
        try:
            return int(_beside(self._session, self.loop.made_so_far)) - self.in_loops
        except (tf.errors.OpError, RuntimeError):
            return 0

    def done(self) -> int:
        """Steps of this session, those of the loop in flight too; as `in_flight`."""
        return self._done + self.in_flight()

    def reached(self) -> int:
        """The last finished step, which may be one of the loop in flight; as `in_flight`."""
        return (self._begun or 0) + self.in_flight()

    def stop(self) -> None:
        """Ends the loop behind its step in flight; for any thread."""
        _beside(self._session, self.loop.stop)

    def _note(self, steps: int, reached: int) -> None:
        self.was_held_back = reached < (self._begun or 0) + steps
        self._done += steps
        self._begun = reached


class Fetcher:
    """Fetches as `fetching.Fetcher` does, from the last step of each call.

    Where a loop ends before the last step that was planned, at one that was held back or at the end of the data, what it does
    not keep of a step is `calling.MISSED`. An error that ends it behind steps that it has made is raised by the next call.

    Args:
      session: to run.
      runs: how many steps each call makes.
    """

    def __init__(self, session: tf.Session, runs: Runs) -> None:
        self._session, self._runs, self._loop = session, runs, runs.loop
        self._step = runs.train_step.step
        self._ordinary = fetching.Fetcher(session)
        self._inside = {**runs.loop.results, **dict.fromkeys(runs.operations, runs.loop.operation)}
        self._most = 0  # steps of a loop, as the graph knows it
        self._error: tf.errors.OpError | None = None

    def fetch(self, asked: Sequence[Any], options: tf.RunOptions | None = None, metadata: tf.RunMetadata | None = None) -> list[Any]:
        """As `fetching.Fetcher.fetch`; with options the last step is made outside of the loop."""
        last = functools.partial(self._ordinary.fetch, [*asked, self._step], options, metadata)
        return self._call(self._prepared(asked, has_options=options is not None), last)

    def fed(self, asked: Sequence[Any], feeds: Mapping[Any, Any], *about: Any) -> list[Any]:
        """As `fetching.Fetcher.fed`, for tensors that are no part of the step.

        Raises:
          ValueError: one is.
        """
        names = [getattr(tensor, 'name', str(tensor)).partition(':')[0] for tensor in feeds]
        for name in self._loop.parts.intersection(names):
            raise ValueError(
                f'A hook feeds {name}, a part of the step, and --steps_per_run makes steps inside the graph, which no hook can feed; '
                'make it a part of the dataset, or leave --steps_per_run out.'
            )
        last = functools.partial(self._ordinary.fed, [*asked, self._step], feeds, *about)
        return self._call(self._prepared(asked, has_options=True), last)

    def steady(self, asked: Sequence[Any]) -> Callable[[], list[Any]] | None:
        """As `fetching.Fetcher.steady`."""
        last = self._ordinary.steady([*asked, self._step])
        return None if last is None else functools.partial(self._call, self._prepared(asked, has_options=False), last)

    def _prepared(self, asked: Sequence[Any], *, has_options: bool) -> '_Prepared':
        inside = [_translated(structure, self._inside) for structure in asked]
        known = [structure for structure in inside if structure is not calling.MISSED]
        plan = fetching.Plan(self._session, [self._loop.made, self._loop.results[self._step.name], *known])
        return _Prepared(asked, plan.run, tuple(structure is not calling.MISSED for structure in inside), has_options)

    def _call(self, prepared: '_Prepared', last: Callable[[], list[Any]]) -> list[Any]:
        """Makes the steps of a call, the last one by `last` where the loop does not keep all that is asked."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        inside = self._runs.steps - prepared.needs_last
        values: list[Any] = []
        if inside:
            values, is_over = self._make(prepared, inside)
            if is_over or not prepared.needs_last:
                return values
        try:
            *results, reached = last()
        except tf.errors.OutOfRangeError as error:
            if not inside:
                raise
            self._error = error
            return values
        self._runs.stepped(int(reached))
        return results

    def _make(self, prepared: '_Prepared', steps: int) -> tuple[list[Any], bool]:
        """What is asked, as far as the loop keeps it, of the last of so many steps, and whether it ended before them."""
        try:
            if steps != self._most:
                self._session.run(self._loop.set_most, {self._loop.given: steps})
                self._most = steps
            made, reached, *values = _named(prepared.run)
            values = prepared.spread(values)
        except tf.errors.OutOfRangeError as error:
            made = self._session.run(self._loop.made_so_far)
            if made == self._runs.in_loops:
                raise
            kept = self._session.run(dict(self._loop.kept))
            values = [_translated(structure, {**kept, **dict.fromkeys(self._runs.operations)}) for structure in prepared.asked]
            reached, self._error = kept[self._step.name], error
        is_short = self._runs.looped(int(made), int(reached)) < steps
        return values, is_short or self._runs.was_held_back or self._error is not None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A loop prepared for what is asked.

    Attributes:
      asked: by the caller and the hooks.
      run: returns the steps that loops have made, the step reached, and what is asked as far as the loop keeps it.
      known: for each of what is asked whether it does.
      has_options: the last step has to be made outside of the loop in any case.
    """

    asked: Sequence[Any]
    run: Callable[[], list[Any]]
    known: tuple[bool, ...]
    has_options: bool

    @property
    def needs_last(self) -> bool:
        """Whether the last step is made outside of the loop."""
        return self.has_options or not all(self.known)

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """`values` at the places of what is known."""
        found = iter(values)
        return [next(found) if known else calling.MISSED for known in self.known]


def fetcher(session: tf.Session, hooks: Sequence[tf.train.SessionRunHook]) -> fetching.Fetcher | Fetcher:
    """What makes the calls of a session: several steps with a `Runs` among the hooks, else one."""
    runs = [hook for hook in hooks if isinstance(hook, Runs)]
    return runs[0].fetcher(session, hooks) if runs else fetching.Fetcher(session)


def require(hooks: Sequence[tf.train.SessionRunHook]) -> None:
    """Raises ValueError where one of a user's hooks can't do its work where a call makes several steps."""
    if any(isinstance(hook, tf.train.StopAtStepHook) for hook in hooks):
        raise ValueError('A StopAtStepHook would stop too late with --steps_per_run; give --train_steps instead of it.')


def _translated(structure: Any, table: Mapping[Any, Any]) -> Any:
    """A fetch structure with what `table` says in place of tensors (by name) and operations; MISSED where it doesn't for all."""
    kind = type(structure)
    if not isinstance(structure, dict | list | tuple):
        return table.get(structure.name if isinstance(structure, tf.Tensor) else structure, calling.MISSED)
    parts = [_translated(part, table) for part in (structure.values() if isinstance(structure, dict) else structure)]
    if any(part is calling.MISSED for part in parts):
        return calling.MISSED
    return kind(zip(structure, parts, strict=True)) if isinstance(structure, dict) else getattr(kind, '_make', kind)(parts)


def _named(run: Callable[[], list[Any]]) -> list[Any]:
    """What `run` returns; its errors name the operations of the step, not the loop's copies, since those know a user's line."""
    try:
        return run()
    except tf.errors.OpError as error:
        kind: Any = type(error)
        if kind is tf.errors.OpError:
            raise
        raise kind(error.node_def, None, error.message.replace(loop_lib.COPIES, '')) from error


def _beside(session: tf.Session, fetch: Any) -> Any:
    """Runs something while a call of another thread is in flight; in this thread, since those of the session may be blocked."""
    return session.run(fetch, options=tf.RunOptions(inter_op_thread_pool=-1, timeout_in_ms=int(1000 * _ANSWER_SECS)))
