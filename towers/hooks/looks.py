"""Which steps are looked at: fetched with all that is reported of them, and told to the hooks."""

import time
from collections.abc import Callable

from towers.hooks import every

SECS = 0.2


class Looks:
    """Says before each step whether it is looked at, for the loop and for the hooks.

    What is reported of a step is computed from its own batch and the weights before it: it is had with the step or never. A small
    network spends a third of its time on that and on hooks. So fast steps are looked at only where a hook may act by the number
    of the step, where the step may be the last, and where the last look is `SECS` old, for what goes by time; slower ones always.

    What a step that is looked at takes beyond the others is told the timers for which it is made, so that one with a share of the time
    keeps to it: more is fetched then, by another set of fetches, and that is the larger part of the cost. Of a timer's last two looks
    the cheaper one counts, as TensorFlow may have prepared itself in one.

    Until `next` is asked every step is looked at.

    Args:
      last_step: the step at which training ends; None = not known, so that each may be the last.
      clock: seconds that never go back.
    """

    def __init__(self, last_step: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = True  # whether the step that is about to be made, or just was, is looked at
        self.step: int | None = None  # its number, where it was asked for
        self._last_step, self._clock = last_step, clock
        self._timers: list[every.Every] = []
        self._quiet_before = 0.0  # no hook acts by number at a step below
        self._look_at = 0.0  # the time of the next look
        self._acting: list[int] = []  # the places of those for which the last look was made
        self._cost: dict[int, float] = {}  # seconds of a timer's last look above a usual step, by its place
        self._began, self._fetched = 0.0, 0.0  # when the last look began, and when its step was through
        self._ended = 0, 0.0  # the step after the last look, and its time
        self._usual: float | None = None  # seconds a step between two looks

    def at(self, *timers: every.Every) -> None:
        """A hook acts when one of these says so."""
        self._timers.extend(timers)

    def next(self, step: int) -> bool:
        """Whether the step that comes, `step`, is looked at."""
        now = self._clock()
        went_on, self.step = self.step is not None and self.step < step, step
        if self._last_step is None:
            return True
        if self.now:
            self._end(step, now)
        self.now = now >= self._look_at or step >= self._last_step
        if went_on and step < self._quiet_before and not self.now:
            return False
        coming = [place for place, timer in enumerate(self._timers) if timer.comes(step)]
        self._quiet_before = min([self._last_step, *[timer.next(step) for timer in self._timers]])
        self.now = self.now or bool(coming)
        if self.now:
            self._begin(step, now, coming)
        return self.now

    def quiet(self, step: int, secs: float) -> tuple[int, float]:
        """How many steps from `step` on, which is not looked at, need not be asked for: the most of them, and until when.

        Args:
          step: the one that `next` was asked for last.
          secs: the longest time for which nobody asks.
        """
        return max(1, int(self._quiet_before - step)), min(self._look_at, self._clock() + secs)

    def fetched(self) -> None:
        """Says that the step is through, before any hook is told of it."""
        self._fetched = self._clock()

    def _begin(self, step: int, now: float, acting: list[int]) -> None:
        """A look at a step begins; the time since the one before tells what a usual step takes."""
        self._look_at = now + SECS
        steps = step - self._ended[0]
        if steps > 0:  # else it follows another look at once
            self._usual = (now - self._ended[1]) / steps
        self._acting, self._began = acting, now

    def _end(self, step: int, now: float) -> None:
        """A look has ended with the step before this one; hooks say themselves what they took."""
        self._ended = step, now
        if self._usual is None:
            return
        cost = max(0.0, self._fetched - self._began - self._usual)
        for place in self._acting:
            self._timers[place].took(min(cost, self._cost.get(place, 0.0)))
            self._cost[place] = cost
