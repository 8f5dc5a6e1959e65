"""How much of its time an evaluator works, so that the training beside it on the same machine keeps its speed.

The training's steps are counted while the evaluator pauses and while it works. What the work costs, the part of the training's speed
that is lost for the part of the time that is worked, says how much may be worked.
"""

import collections
import json
import os
import threading
import time
from typing import NamedTuple

from towers.sessions import ledger, membership

_STEPS = 20  # in a window at least, so that one more or less is little
_PAUSE_SECS, _WORK_SECS = 1.0, 4.0  # shortest windows
_LONGEST_WORK_SECS = 600.0  # of a window of work, where the training can't be measured
_WINDOW_SECS = 60.0  # after which a window without enough steps says nothing
_LONGEST_PAUSE_SECS = 600.0  # after one batch
_LOOK_SECS = 0.1
_LEAST_SHARE = 0.01
_MARGIN = 0.8  # of the limit that is aimed at
_MEASUREMENTS = 10  # the newest ones count
_DOUBT = 0.05  # a measurement at this share counts as much as the belief that work costs everything
_TAIL = 2**14  # bytes of metrics.jsonl that are looked at
_PRESENT_SECS = 1.0  # between two looks at who trains


class Point(NamedTuple):
    """When a training was at which step.

    Attributes:
      time: seconds since 1970.
      step: the last one finished then.
    """

    time: float
    step: int


class Pace:
    """Decides when to work; it looks at no clock and no file itself.

    Windows of pause and of work alternate, and each gives the training's rate between two of its points and the part of that time
    that was worked. A pair of them says what work costs: rate = alone * (1 - cost * part). Costs are averaged by least squares, so a
    window that was worked more counts more, and the belief that work costs all of the speed counts a little. The share of the time to
    work is the limit over the cost.

    Args:
      limit: part of the training's speed that may be lost, between 0 and 1.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.share = max(_MARGIN * limit, _LEAST_SHARE)
        self._losses: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MEASUREMENTS)  # (part worked, speed lost)
        self._alone: tuple[float, float] | None = None  # rate and part worked of the last pause
        self._work_secs = _WORK_SECS
        self._working = False
        self._resume = self._since = 0.0
        self._worked: list[tuple[float, float]] = []  # from when to when, since the window's first point
        self._first: Point | None = None
        self._newest: Point | None = None

    @property
    def measured(self) -> int:
        """How many measurements the share rests on."""
        return len(self._losses)

    def begin(self, now: float) -> None:
        """An evaluation begins; the time since the last one says nothing."""
        self._working = self._alone is not None
        self._resume, self._newest = now, None
        self._open(now)

    def wait(self, now: float, busy: float, point: Point | None) -> float:
        """Seconds to wait before asking again; 0 = work.

        Args:
          now: seconds since 1970.
          busy: seconds that were worked since the last call.
          point: the training's newest, where one is known.
        """
        if now < self._since or self._resume - now > _LONGEST_PAUSE_SECS:  # the clock was set
            self.begin(now)
        if point is not None and (self._newest is None or point.time > self._newest.time):
            self._newest, self._first = point, self._first or point
        if busy:
            self._worked.append((now - busy, now))
            self._resume = now + min(busy * (1 / self.share - 1), _LONGEST_PAUSE_SECS)
        if self._working and now < self._resume:  # a window of work ends with the pause that belongs to a batch
            return min(_LOOK_SECS, self._resume - now)
        if self._is_over(now):
            self._turn(now)
        return 0.0 if self._working else _LOOK_SECS

    def _is_over(self, now: float) -> bool:
        shortest = self._work_secs if self._working else _PAUSE_SECS
        return now - self._since >= (shortest if self._measured() else max(shortest, _WINDOW_SECS))

    def _turn(self, now: float) -> None:
        found = self._measured()
        if not self._working:
            self._alone = found
            self._work_secs = _WORK_SECS if found else min(2 * self._work_secs, _LONGEST_WORK_SECS)
        elif found and self._alone:
            (rate, part), (before, little) = found, self._alone
            slope = (before - rate) / (part - little) if part > little else 0.0
            alone = before + slope * little
            self._losses.append((part, slope * part / alone))
            cost = (sum(p * lost for p, lost in self._losses) + _DOUBT**2) / (sum(p * p for p, _ in self._losses) + _DOUBT**2)
            self.share = min(1.0, max(_LEAST_SHARE, _MARGIN * self._limit / max(cost, 1e-9)))
        self._working = not self._working
        self._open(now)

    def _open(self, now: float) -> None:
        self._since, self._first = now, self._newest
        self._worked = [span for span in self._worked if self._first is not None and span[1] > self._first.time]

    def _measured(self) -> tuple[float, float] | None:
        """Steps per second between the window's points, and the part of that time that was worked; None where they are too few."""
        if self._first is None or self._newest is None or self._newest.step - self._first.step < _STEPS:
            return None
        began, ended = self._first.time, self._newest.time
        worked = sum(max(0.0, min(end, ended) - max(start, began)) for start, end in self._worked)
        return (self._newest.step - self._first.step) / (ended - began), worked / (ended - began)


class Yielder:
    """Holds an evaluator back between its batches, where a training works in the same run directory on this machine.

    Args:
      model_dir: the run directory, whose metrics.jsonl and sessions say how far the training is.
      limit: as `Pace`.
    """

    def __init__(self, model_dir: str, limit: float) -> None:
        self.pace = Pace(limit)
        self._rows = os.path.join(model_dir, 'metrics.jsonl')
        self._sessions = os.path.join(model_dir, membership.FOLDER)
        self._master: Point | None = None
        self._looked = float('-inf')
        self._worked_at = 0.0

    def begin(self) -> None:
        """An evaluation begins."""
        self._worked_at = time.monotonic()
        self.pace.begin(time.time())

    def between(self, stop: threading.Event) -> None:
        """Waits as long as it takes, after a batch, or before the first one; not after `stop` is set."""
        busy = time.monotonic() - self._worked_at
        while not stop.is_set() and self._is_trained():
            secs = self.pace.wait(time.time(), busy, self._point())
            if secs <= 0:
                break
            busy = 0.0
            stop.wait(secs)
        self._worked_at = time.monotonic()

    def _is_trained(self) -> bool:
        """Whether a training is at work here; looked at once a second."""
        now = time.monotonic()
        if now - self._looked >= _PRESENT_SECS:
            self._looked = now
            masters = [seen for seen in ledger.read(self._sessions) if seen.entry.role == 'master' and seen.entry.is_here and seen.lives]
            self._master = _beat(masters[-1]) if masters else None
        return self._master is not None

    def _point(self) -> Point | None:
        """The newest of what the reports and the session's heartbeat say."""
        found = [point for point in (self._master, newest_row(self._rows)) if point is not None and point.step >= 0]
        return max(found, default=None)


def _beat(seen: ledger.Seen) -> Point:
    """When a master last gave a sign of life, and at which step; -1 where it did not say."""
    return Point(time.time() - seen.silent_secs, -1 if seen.entry.step is None else seen.entry.step)


def newest_row(path: str) -> Point | None:
    """When the last row of a metrics.jsonl was written and of which step it is; None where there is none."""
    try:
        with open(path, 'rb') as file:
            about = os.fstat(file.fileno())
            file.seek(max(0, about.st_size - _TAIL))
            lines = file.read().split(b'\n')
        return Point(about.st_mtime, int(json.loads(lines[-2])['step'])) if len(lines) > 1 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def of(model_dir: str, limit: float | None) -> Yielder | None:
    """What holds an evaluator back; None without a limit."""
    return None if limit is None else Yielder(model_dir, limit)
