"""Calling hooks at each step, but only those that have something to do there, so that many hooks cost little."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

MISSED = object()  # stands for what could not be fetched; the hook that asked for it isn't called after the run
_BLANK = tf.train.SessionRunHook


class Caller:
    """The hooks of a session, called in their order.

    A hook that asks for the same tensors at each step may say so by an attribute `steady_request`, a SessionRunArgs; its
    `before_run` isn't called then. Methods that a hook leaves as they are in SessionRunHook aren't called either.
    """

    def __init__(self, hooks: Sequence[tf.train.SessionRunHook], stopped: Callable[[Any], None]) -> None:
        """Calls `hooks`; `stopped` is told the hook that asks to stop."""
        self._stopped = stopped
        self._steady = [getattr(hook, 'steady_request', None) for hook in hooks]
        changing = [request is None for request in self._steady]
        self._asked = [(at, hook) for at, hook in enumerate(hooks) if changing[at] and _has_own(hook, 'before_run')]
        self._told = [(at, hook) for at, hook in enumerate(hooks) if _has_own(hook, 'after_run')]

    def before(self, context: tf.train.SessionRunContext) -> list[tf.train.SessionRunArgs | None]:
        """What each hook asks for, in order; None = nothing."""
        requests = self._steady.copy()
        hook = None
        try:
            for at, hook in self._asked:
                requests[at] = hook.before_run(context)
                if context.stop_requested:
                    self._stopped(hook)
        except StopIteration:
            self._stopped(hook)
            raise
        return requests

    def key(self, requests: Sequence[tf.train.SessionRunArgs | None]) -> tuple[int, ...]:
        """The same for two steps in which the hooks ask by the same objects."""
        return tuple([id(requests[at]) for at, _ in self._asked])

    def listeners(self, requests: Sequence[tf.train.SessionRunArgs | None]) -> list[tuple[Any, int]]:
        """The hooks to call after the step, each with the place of its answer among those of all that ask for something, or -1."""
        places = [-1 if request is None or request.fetches is None else 0 for request in requests]
        answered = [at for at, place in enumerate(places) if place == 0]
        return [(hook, answered.index(at) if at in answered else -1) for at, hook in self._told]

    def after(self, context: tf.train.SessionRunContext, listeners: Sequence[tuple[Any, int]], results: Sequence[Any], about: Any) -> None:
        """Gives the hooks their answers.

        Args:
          context: of the step.
          listeners: from `listeners`.
          results: the answers, in the order of the requests.
          about: RunOptions and RunMetadata of the step.
        """
        hook = None
        values = tf.train.SessionRunValues
        try:
            for hook, place in listeners:
                if place >= 0 and results[place] is MISSED:
                    continue
                hook.after_run(context, values(None if place < 0 else results[place], *about))
                if context.stop_requested:
                    self._stopped(hook)
        except StopIteration:
            self._stopped(hook)
            raise


def quietly(
    hooks: Sequence[Any],
    step: Callable[[], Sequence[Any]],
    failed: Callable[[tf.errors.OpError], NoReturn],
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[int, float], tuple[int, Any]]:
    """`step` as a function that makes some steps of which no hook is told but the one that has `quiet`, a watch, and that one by it.

    Args:
      hooks: all of them.
      step: makes one; the first of its values says whether it changed anything, None where that can't be otherwise.
      failed: raises what is to be said of its error.
      clock: seconds that never go back.

    Returns:
      A function from the most steps to make and the time after which no further one begins to how many were made, at least one, and
      the first value of the last: one that changed nothing is the last.
    """
    [watch] = [hook.quiet for hook in hooks if hasattr(hook, 'quiet')]
    steps = watch.steps

    def make(most: int, until: float) -> tuple[int, Any]:
        watch.step_begins()
        made = 0
        try:
            while True:  # each call of Python costs a microsecond here, where the processor's caches hold the step's data
                changed = step()[0]
                made += 1
                steps.done += 1
                steps.number += 1
                if made >= most or clock() >= until or not (changed is None or changed):
                    break
        except tf.errors.OpError as error:
            failed(error)
        watch.steps_end(made)
        return made, changed

    return make


def tell_held_back(hooks: Sequence[Any], session: tf.Session) -> None:
    """Tells the hooks with a method `held_back` that a quiet step changed nothing."""
    for hook in hooks:
        if hasattr(hook, 'held_back'):
            hook.held_back(session)


def _has_own(hook: tf.train.SessionRunHook, method: str) -> bool:
    return getattr(getattr(hook, method), '__func__', None) is not getattr(_BLANK, method)
