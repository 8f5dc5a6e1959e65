"""Time, and things that take it: what serves one at a time, what all share, and ways on which one tensor follows another."""

import collections
import functools
import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple


class Span(NamedTuple):
    """A time in which something was waited for, between two events of which one led to the other.

    Attributes:
      what: was waited for.
      secs: how long.
      before: what led there; None = the beginning.
    """

    what: str
    secs: float
    before: 'Span | None'


class Clock:
    """Events in order of their time, and things that serve one at a time.

    Attributes:
      now: seconds since the beginning.
      path: what led to the event that happens, or that happened last.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.path: Span | None = None
        self._events: list[tuple[float, int, str, float, Span | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queues: dict[str, collections.deque[tuple[float, Callable[[], None]]]] = {}

    def after(self, secs: float, what: str, then: Callable[[], None]) -> None:
        """Calls `then` after a time in which `what` is waited for."""
        heapq.heappush(self._events, (self.now + secs, next(self._order), what, self.now, self.path, then))

    def occupy(self, thing: str, secs: float, then: Callable[[], None]) -> None:
        """Uses a thing for a time, when it is free, and calls `then` afterwards."""
        if thing in self._queues:
            self._queues[thing].append((secs, then))
            return
        self._queues[thing] = collections.deque()
        self._serve(thing, secs, then)

    def run(self) -> None:
        """Lets all happen."""
        while self._events:
            self.now, _, what, since, before, then = heapq.heappop(self._events)
            self.came(what, since, before)
            then()

    def came(self, what: str, since: float, before: Span | None) -> None:
        """Says that the event that happens was waited for since a time, behind what led to it."""
        self.path = Span(what, self.now - since, before)

    def waits(self) -> dict[str, float]:
        """Seconds for which each thing was waited for on the way from the beginning to the last event: the critical path."""
        found: collections.Counter[str] = collections.Counter()
        span = self.path
        while span is not None:
            found[span.what] += span.secs
            span = span.before
        return dict(found)

    def _serve(self, thing: str, secs: float, then: Callable[[], None]) -> None:
        self.after(secs, thing, functools.partial(self._served, thing, then))

    def _served(self, thing: str, then: Callable[[], None]) -> None:
        then()
        if self._queues[thing]:
            self._serve(thing, *self._queues[thing].popleft())
        else:
            del self._queues[thing]


class Link:
    """Serves all that use it at once, each at an equal part of its speed.

    Of its own time as much passes as one user gets: a use that takes `secs` alone ends when so much of it has passed.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._time, self._seen = 0.0, 0.0  # its own time when it was last looked at, and the clock's
        self._ends: list[tuple[float, int, float, Span | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._planned = 0

    def use(self, secs: float, then: Callable[[], None]) -> None:
        """Uses it, beside the others, and calls `then` afterwards."""
        self._look()
        heapq.heappush(self._ends, (self._time + secs, next(self._order), self._clock.now, self._clock.path, then))
        self._plan()

    def _look(self) -> None:
        passed, self._seen = self._clock.now - self._seen, self._clock.now
        if self._ends:
            self._time += passed / len(self._ends)

    def _plan(self) -> None:
        """The next end; one that was planned before more users came is void."""
        self._planned += 1
        if self._ends:
            secs = max(self._ends[0][0] - self._time, 0.0) * len(self._ends)
            self._clock.after(secs, self._name, functools.partial(self._end, self._planned))

    def _end(self, planned: int) -> None:
        if planned != self._planned:
            return
        self._look()
        _, _, since, before, then = heapq.heappop(self._ends)
        self._plan()
        self._clock.came(self._name, since, before)
        then()


class Path:
    """From a hub to a machine, or back: one tensor at a time, in any order."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self._link, self._chance = link, chance
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self._is_used = False

    def send(self, secs: float, then: Callable[[], None]) -> None:
        """Sends what takes `secs` on a link of its own, and calls `then` when it is there."""
        self._waiting.append((secs, then))
        if not self._is_used:
            self._next()

    def _next(self) -> None:
        self._is_used = bool(self._waiting)
        if self._is_used:
            secs, then = self._waiting.pop(self._chance.randrange(len(self._waiting)))
            self._link.use(secs, functools.partial(self._sent, then))

    def _sent(self, then: Callable[[], None]) -> None:
        self._next()
        then()
