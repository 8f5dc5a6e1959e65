"""When a hook acts: every so many steps or seconds, or as often as costs next to nothing."""

import contextlib
import time
from collections.abc import Callable, Iterator

import tensorflow.compat.v1 as tf

SHARE = 0.0015  # of the time, that reports and checkpoints each take where nobody said how often they are wanted


class Clock:
    """Seconds of training: they stand still while something else is done between the steps.

    Args:
      clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left_out = 0.0

    def __call__(self) -> float:
        """The seconds so far, from an arbitrary start."""
        return self._clock() - self._left_out

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out the time of the `with` block."""
        began = self._clock()
        try:
            yield
        finally:
            self._left_out += self._clock() - began


class Every:
    """A timer that is asked at each step whether it is due.

    By steps it is due at multiples, so a resumed run acts at the same steps as an uninterrupted one; where a call makes
    several steps it is due when one of them was a multiple. By seconds it is due so long after it was due last. With both
    it is due at either; with neither, or 0, never.
    """

    def __init__(
        self,
        steps: int | None = None,
        secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        share: float | None = None,
    ) -> None:
        """Starts counting when it is asked for the first time.

        Args:
          steps: due at multiples of it; None or 0 = not by steps.
          secs: due after so many seconds; None or 0 = not by time.
          clock: returns the time in seconds.
          share: multiples of `steps` are passed over as long as acting, by what `took` was told, would take a larger part of
            the time than this; None = none is.
        """
        self.clock = clock
        self._steps = steps or 0
        self._secs = secs or 0.0
        self._share = share
        self._asked_at: int | None = None
        self._back: int | None = None
        self._due_at: float | None = None
        self._not_before = float('-inf')

    def due(self, step: int) -> bool:
        """Whether to act at `step`; to be asked once a step, with rising steps but where the training goes back."""
        if self._back is not None:  # asked after the step that was held back
            self._asked_at, self._back = self._back, None
            return False
        by_steps = self._is_multiple(step)
        self._asked_at = step
        return self._is_time(by_steps) if self._secs else by_steps

    def next(self, step: int) -> float:
        """The first multiple after `step`, at which it may be due by steps; infinite where it goes by time alone."""
        return (step // self._steps + 1) * self._steps if self._steps else float('inf')

    def comes(self, step: int) -> bool:
        """Whether `due` will say so of `step`, the one that is about to be made, by its number; where not, nobody may ask after it."""
        if self._back is not None:
            self._asked_at, self._back = self._back, None
        if self._is_multiple(step):
            return True
        is_passed_over = self._steps > 0 and step % self._steps == 0
        self._asked_at = step if is_passed_over else step - 1  # the step may be held back, and is then asked for by the number before
        return False

    def begins(self, step: int) -> None:
        """Says that the steps asked about next come after `step`."""
        self._asked_at = step

    def went_back(self, step: int) -> None:
        """Says, during a step that was held back, that the next one will be the one after `step`."""
        self._back = step

    def took(self, secs: float) -> None:
        """Says what it cost to act just now, in seconds; where several say so, the most counts."""
        if self._share is not None:
            self._not_before = max(self._not_before, self.clock() + secs / self._share)

    def _is_multiple(self, step: int) -> bool:
        if not self._steps:
            return False
        before = max(step - 1, 0) if self._asked_at is None or step < self._asked_at else self._asked_at  # none is at step 0
        return step // self._steps > before // self._steps and (self._share is None or self.clock() >= self._not_before)

    def _is_time(self, by_steps: bool) -> bool:
        now = self.clock()
        started = now if self._due_at is None else self._due_at
        due = by_steps or now - started >= self._secs
        self._due_at = now if due else started
        return due


class TimedHook(tf.train.SessionRunHook):
    """A hook that asks a timer after each step, and is told where the training went back."""

    timer: Every

    def steps_until_due(self, step: int) -> float:
        """How many steps after `step` the timer is due by steps; a call that makes several ends there."""
        return self.timer.next(step) - step

    def went_back(self, step: int) -> None:
        """Takes the steps after `step` as new ones."""
        self.timer.went_back(step)


def often(steps: int | None, default: int, clock: Callable[[], float] = time.monotonic) -> Every:
    """Every `steps` exactly; None = every `default` steps, or less often where that would take more than `SHARE` of the time."""
    return Every(default, clock=clock, share=SHARE) if steps is None else Every(steps, clock=clock)
