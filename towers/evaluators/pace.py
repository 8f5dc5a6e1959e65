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

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import identity, structs
from towers.checkpoint import manifest
from towers.sessions import ledger, membership

_STEPS = 20  # in a window at least, so that one more or less is little
_PAUSE_SECS, _WORK_SECS = 1.0, 4.0  # shortest windows
_LONGEST_WORK_SECS = 600.0  # of a window of work, where the training can't be measured
_WINDOW_SECS = 60.0  # after which a window without enough steps says nothing
_LONGEST_PAUSE_SECS = 600.0  # after one batch
_LOOK_SECS = 0.1
_LEAST_SHARE = 0.001
_MARGIN = 0.8  # of the limit that is aimed at
_MEASUREMENTS = 10  # the newest ones count
_DOUBT = 0.05  # a measurement at this share counts as much as what is believed before
_GAP_SECS = 2.0  # between two evaluations; after a longer one the windows begin anew
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
    window that was worked more counts more, and what is believed at first counts a little. The share of the time to work is the limit
    over the cost.

    Args:
      limit: part of the training's speed that may be lost, between 0 and 1; it may change.
      cost: what work is believed to cost as long as nothing is measured; 1 = all of the speed while it goes on.
    """

    def __init__(self, limit: float, cost: float = 1.0) -> None:
        self.limit = limit
        self._believed = self._cost = cost
        self._losses: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MEASUREMENTS)  # (part worked, speed lost)
        self._alone: tuple[float, float] | None = None  # rate and part worked of the last pause
        self._work_secs = _WORK_SECS
        self._working = False
        self._resume = self._since = self._asked = 0.0
        self._worked: list[tuple[float, float]] = []  # from when to when, since the window's first point
        self._first: Point | None = None
        self._newest: Point | None = None

    @property
    def measured(self) -> int:
        """How many measurements the share rests on."""
        return len(self._losses)

    @property
    def share(self) -> float:
        """The part of the time to work."""
        return min(1.0, max(_LEAST_SHARE, _MARGIN * self.limit / max(self._cost, 1e-9)))

    def begin(self, now: float) -> None:
        """An evaluation begins; a longer time since the last one says nothing, but for the pause that its last batch is followed by."""
        gap = now - self._asked
        if not 0 <= gap <= _WINDOW_SECS:
            self._alone = None  # the training may have another speed by now
        if not 0 <= gap <= _GAP_SECS:
            self._begin(now, max(now, self._resume))

    def _begin(self, now: float, resume: float) -> None:
        self._working = True  # at the share that is believed, so that a short evaluation waits for no measurement
        self._resume, self._newest = resume, None
        self._open(now)

    def wait(self, now: float, busy: float, point: Point | None) -> float:
        """Seconds to wait before asking again; 0 = work.

        Args:
          now: seconds since 1970.
          busy: seconds that were worked since the last call.
          point: the training's newest, where one is known.
        """
        if now < self._since or self._resume - now > _LONGEST_PAUSE_SECS:  # the clock was set
            self._begin(now, now)
        self._asked = now
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
            worked = sum(p * p for p, _ in self._losses) + _DOUBT**2
            self._cost = (sum(p * lost for p, lost in self._losses) + self._believed * _DOUBT**2) / worked
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

    A training of this very process does not count: it may be waiting for this evaluation. Evaluators of one run on one machine share
    the limit.

    Args:
      model_dir: the run directory, whose metrics.jsonl, sessions and manifests say how far the training is.
      limit: as `Pace`.
      cost: as `Pace`.
    """

    def __init__(self, model_dir: str, limit: float, cost: float = 1.0) -> None:
        self.pace = Pace(limit, cost)
        self._limit, self._model_dir = limit, model_dir
        self._rows = os.path.join(model_dir, 'metrics.jsonl')
        self._sessions = os.path.join(model_dir, membership.FOLDER)
        self._master: Point | None = None
        self._looked = float('-inf')
        self._worked_at = 0.0
        self._told = False

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
            self._tell()
            busy = 0.0
            stop.wait(secs)
        self._worked_at = time.monotonic()

    def _tell(self) -> None:
        if not self._told:
            text = (
                'A training is at work in %s: the evaluation pauses between its batches, and works %.0f %% of the time until it is known '
            )
            text += 'what that costs. --eval_max_slowdown=%g is the part of its speed that it may lose; with 1 there are no pauses.'
            logging.info(text, self._model_dir, 100 * self.pace.share, self._limit)
        self._told = True

    def _is_trained(self) -> bool:
        """Whether a training is at work here; looked at once a second."""
        now = time.monotonic()
        if now - self._looked >= _PRESENT_SECS:
            self._looked = now
            here = [seen for seen in ledger.read(self._sessions) if seen.entry.is_here and seen.lives]
            masters = [seen for seen in here if seen.entry.role == 'master' and not seen.entry.is_own]
            self.pace.limit = self._limit / max(1, sum(map(_evaluates, here)))
            self._master = _beat(masters[-1]) if masters else None
            if self._master is not None and self._is_done():
                self._master = None
        return self._master is not None

    def _is_done(self) -> bool:
        """Whether the training has made its last step, and waits for its evaluators."""
        steps, point = manifest.steps(self._model_dir), self._point()
        if not steps or (point is not None and point.step > steps[-1]):
            return False
        try:
            return manifest.read(manifest.prefix_of(self._model_dir, steps[-1])).final
        except ValueError:
            return False

    def _point(self) -> Point | None:
        """The newest of what the reports and the session's heartbeat say."""
        found = [point for point in (self._master, newest_row(self._rows)) if point is not None and point.step >= 0]
        return max(found, default=None)


def _evaluates(seen: ledger.Seen) -> bool:
    """Whether this is an evaluator that works: not one that is stopped, has no checkpoint yet, or waits for another of its name."""
    works = seen.entry.step is not None and seen.silent_secs < ledger.SILENT_SECS
    return seen.entry.role == 'evaluator' and (works or seen.entry.is_own)


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


def believed(placement: structs.Placement, proto: tf.ConfigProto) -> float:
    """What work is believed to cost a training: all of its speed on GPUs, on the CPU the part of the cores that it keeps busy.

    Args:
      placement: where the evaluator's towers run.
      proto: the threads of its session; 0 = as many as there are cores.
    """
    cores = identity.cores()
    threads = [proto.intra_op_parallelism_threads or cores, proto.inter_op_parallelism_threads or cores]
    return min(1.0, max(threads) / cores) if placement.fake else 1.0


def of(config: config_lib.Config, cost: float) -> Yielder | None:
    """What holds an evaluator back; None where it may work all the time, or has no run directory."""
    limit = config.eval_max_slowdown
    return Yielder(config.model_dir, limit, cost) if config.model_dir and limit < 1 else None
