"""A watch over everything that a run may wait for: it says what is waited for, and ends the wait by policy.

A thread looks at what the loop last said of itself. Where a step, or another part of the run, takes longer than it may,
the thread names what is late, writes the Python stacks of all threads to a file, and warns or ends the run. Its clock
is its own: time in which the whole process did not run, suspended or starved, does not count.
"""

import collections
import contextlib
import enum
import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from towers import config as config_lib
from towers import errors
from towers.run import signals

EXIT_FAILED = 1
_STEP_SECS = 600.0  # for a step where no limit is given
_FIRST_SECS = 1800.0  # for the first step, in which TensorFlow prepares itself and buffers fill, and for restoring
_SAVE_SECS = 3600.0  # for what the run itself writes
_MEDIANS = 50  # a step may take so many usual ones
_FIRST_STEPS = 10  # so many given limits for the first
_NOTICE_SECS = 60.0
_NOTICE_MEDIANS = 5
_TICK_SECS = 1.0
_ANSWER_SECS = 6.0
_CLOSE_SECS = 3.0
_LEAVE_SECS = 5.0  # for the run to end by itself when its session is closed
_STEPS_REMEMBERED = 200


class Part(enum.Enum):
    """What a run is doing, in the words of a message."""

    START = 'The start of the session'
    STEP = 'The step after step {step}'
    HOOKS = 'A hook after step {step}'
    SAVING = 'Reporting and saving after step {step}'
    LOADING = 'Loading a checkpoint'
    PASS = 'The start of the evaluation of step {step}'
    BATCH = 'Batch {next} of the evaluation of step {step}'
    IDLE = 'Nothing'


_STEPS = (Part.STEP, Part.BATCH)


class Steps:
    """Steps that have ended; the thread that makes them counts, others read.

    Attributes:
      done: how many in this session, or in this pass.
      number: of the last one; 0 before the first of this session.
    """

    __slots__ = ('done', 'number')

    def __init__(self) -> None:
        self.done = self.number = 0


class Watchdog(contextlib.AbstractContextManager):
    """Watches the loop that runs in the `with` block and says in which part it is.

    A step may take `step_timeout_secs`, the first one ten times as long but no more than half an hour if that is longer.
    Where it isn't given, a step may take ten minutes, or 50 times the median step if that is longer, and the first half
    an hour; and a step that takes a minute (or 5 times the median) is named by a WARNING already. A save may take an
    hour in any case, a user's hook is only warned of.

    Args:
      config: `step_timeout_secs` (0 = no watch) and `on_step_timeout`.
      folder: where the stacks are written.
      late: says of the step after so many whole ones what it is waited for; called in another thread.
      close: ends a step in flight, as closing its session does.
      clock: seconds that never go back.

    Raises:
      Stalled: on leaving the block, in place of what ended it after its time was over.
    """

    def __init__(
        self,
        config: config_lib.RunConfig,
        *,
        folder: str,
        late: Callable[[int], str],
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._given = config.step_timeout_secs
        self._stops = config.on_step_timeout == 'stop'
        self._folder = folder
        self._late = late
        self._close = close
        self._clock = clock
        self._part = Part.START
        self._beat = 0  # goes up whenever the loop says something
        self.steps = Steps()
        self._started = 0.0
        self._secs: collections.deque[float] = collections.deque(maxlen=_STEPS_REMEMBERED)
        self._tick = _TICK_SECS if not self._given else min(_TICK_SECS, self._given / 5)
        self._seen = -1, 0
        self._looked = clock()
        self._waited = 0.0
        self._noticed = False
        self._expired = 0  # how often since the last beat
        self._stalled: errors.Stalled | None = None
        self._over = threading.Event()

    def __enter__(self) -> 'Watchdog':
        if self._given != 0:
            threading.Thread(target=self._watch, name='towers-watchdog', daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        if self._stalled is not None and error is not None:
            raise self._stalled from error

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first one of this session."""
        return self.steps.number

    @property
    def in_flight(self) -> int | None:
        """How many steps had ended before the one in flight; None where none is."""
        return self.steps.done if self._part is Part.STEP else None

    def enter(self, part: Part, step: int | None = None) -> None:
        """Says that the run is in another part; `step` where it is known."""
        if part is Part.PASS:
            self.steps.done = 0
        self.steps.number = self.steps.number if step is None else step
        self._part = part
        self._beat += 1

    def step_begins(self, part: Part = Part.STEP) -> None:
        """Says that a step begins, or several that are counted in `steps` as they end; cheap enough for each."""
        self._started = self._clock()
        self._part = part
        self._beat += 1

    def step_ends(self, step: int | None = None) -> None:
        """Says that the step ended, and its number where that is news."""
        self.steps.done += 1
        if step is not None:
            self.steps.number = step
        self.steps_end(1)

    def steps_end(self, made: int) -> None:
        """Says that so many steps ended, which are counted already."""
        if self.steps.done > made:  # the first is none like the others
            self._secs.append((self._clock() - self._started) / made)
        self._part = Part.HOOKS
        self._beat += 1

    def held_back(self) -> None:
        """Says that the step that ended last was none."""
        self.steps.number -= 1

    def calls_hooks(self) -> None:
        """Says that hooks are called, which may take long for reasons of their own."""
        self.enter(Part.HOOKS)

    def saves(self) -> None:
        """Says that the run reports and saves."""
        self.enter(Part.SAVING)

    def look(self) -> None:
        """Takes the time since the last look as waited, and acts where it is too long; the thread calls it every second."""
        now = self._clock()
        awake, self._looked = min(now - self._looked, 2 * self._tick), now
        beat = self._beat, self.steps.done
        if beat != self._seen:
            if self._noticed or self._expired:
                logging.info('What was waited for has come, after %.0f s.', self._waited)
            self._seen, self._waited, self._noticed, self._expired = beat, 0.0, False, 0
            return
        self._waited += awake
        limit = self._limit()
        if self._waited >= limit * 2**self._expired:
            self._expire(limit)
        elif not self._noticed and self._notice() <= self._waited < limit:
            self._noticed = True
            logging.warning('%s has taken %.0f s%s; it may take %.0f s.', self._what(), self._waited, self._for(), limit)

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            self.look()

    def _limit(self) -> float:
        """Seconds that the present part may take."""
        if self._part is Part.IDLE:
            return float('inf')
        step = _STEP_SECS if self._given is None else self._given
        if self._part is Part.SAVING:
            return max(step, _SAVE_SECS)
        if self._part is Part.HOOKS or (self._part in _STEPS and self.steps.done):
            return step if self._given else max(step, _MEDIANS * self._median())
        return max(step, min(_FIRST_STEPS * step, _FIRST_SECS))

    def _notice(self) -> float:
        return max(_NOTICE_SECS, _NOTICE_MEDIANS * self._median()) if self._part in _STEPS else float('inf')

    def _median(self) -> float:
        return statistics.median(tuple(self._secs) or (0.0,))

    def _what(self) -> str:
        return self._part.value.format(step=self.steps.number, next=self.steps.done + 1)

    def _for(self) -> str:
        """What is late, where that can be known."""
        said: list[str] = []
        if self._part not in _STEPS or not signals.within(_ANSWER_SECS, lambda: said.append(self._late(self.steps.done))) or not said:
            return ''
        return f', waiting for {said[0]}'

    def _expire(self, limit: float) -> None:
        """Warns, or ends the run."""
        self._expired += 1
        text = f'{self._what()} has not ended within {self._waited:.0f} s{self._for()}{self._dump()}.'
        if not self._stops or self._part is Part.HOOKS:
            logging.warning('%s It may take %.0f s (--step_timeout_secs); waiting on.', text, limit)
            return
        self._stalled = errors.Stalled(
            f'{text} The run ends, as it may take {limit:.0f} s; look there for what hangs and run the same command again, '
            'or give a larger --step_timeout_secs, or --on_step_timeout=warn.'
        )
        signals.within(_CLOSE_SECS, self._close)
        if not self._over.wait(_LEAVE_SECS):  # what hangs can't be cancelled
            signals.within(_CLOSE_SECS, lambda: logging.error('%s', self._stalled))
            signals.leave(EXIT_FAILED)

    def _dump(self) -> str:
        """Writes the stacks, and says where; nothing where the storage hangs too."""
        path = os.path.join(self._folder, time.strftime('stacks-%Y%m%d-%H%M%S.txt'))
        written: list[bool] = []
        signals.within(_ANSWER_SECS, lambda: written.append(_write_stacks(path, self._what())))
        return f' (the stacks of all threads are in {path})' if any(written) else ''


def _write_stacks(path: str, what: str) -> bool:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(f'{time.strftime("%Y-%m-%d %H:%M:%S")} {what}\n\n')
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        logging.warning('The stacks could not be written to %s (%s).', path, error)
        return False
    return True
