"""Time, and things that take it: what serves one at a time, what all share, and ways on which one tensor follows another."""

import collections
import functools
import heapq
import itertools
import random
from collections.abc import Callable


class Clock:
    """Events in order of their time, and things that serve one at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: collections.Counter[str] = collections.Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queues: dict[str, collections.deque[tuple[float, Callable[[], None]]]] = {}

    def after(self, secs: float, then: Callable[[], None]) -> None:
        """Calls `then` after a time."""
        heapq.heappush(self._events, (self.now + secs, next(self._order), then))

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
            self.now, _, then = heapq.heappop(self._events)
            then()

    def _serve(self, thing: str, secs: float, then: Callable[[], None]) -> None:
        self.busy[thing] += secs
        self.after(secs, functools.partial(self._served, thing, then))

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
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._planned = 0

    def use(self, secs: float, then: Callable[[], None]) -> None:
        """Uses it, beside the others, and calls `then` afterwards."""
        self._look()
        heapq.heappush(self._ends, (self._time + secs, next(self._order), then))
        self._plan()

    def _look(self) -> None:
        passed, self._seen = self._clock.now - self._seen, self._clock.now
        if self._ends:
            self._time += passed / len(self._ends)
            self._clock.busy[self._name] += passed

    def _plan(self) -> None:
        """The next end; one that was planned before more users came is void."""
        self._planned += 1
        if self._ends:
            self._clock.after(max(self._ends[0][0] - self._time, 0.0) * len(self._ends), functools.partial(self._end, self._planned))

    def _end(self, planned: int) -> None:
        if planned != self._planned:
            return
        self._look()
        _, _, then = heapq.heappop(self._ends)
        self._plan()
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
