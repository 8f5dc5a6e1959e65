"""Which steps are looked at: fetched with all that is reported of them, and told to the hooks."""

import time
from collections.abc import Callable

from towers.hooks import every

SECS = 0.1


class Looks:
    """Says before each step whether it is looked at, for the loop and for the hooks.

    What is reported of a step is computed from its own batch and the weights before it: it is had with the step or never. A small
    network spends a third of its time on that and on hooks. So fast steps are looked at only where a hook may act by the number
    of the step, where the step may be the last, and where the last look is `SECS` old, for what goes by time; slower ones always.

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

    def at(self, *timers: every.Every) -> None:
        """A hook acts when one of these says so."""
        self._timers.extend(timers)

    def next(self, step: int) -> bool:
        """Whether the step that comes, `step`, is looked at."""
        went_on = self.step is not None and step > self.step
        self.step = step
        if self._last_step is None:
            return True
        now = self._clock()
        self.now = now >= self._look_at or step >= self._last_step
        if went_on and step < self._quiet_before and not self.now:
            return False
        coming = [timer.comes(step) for timer in self._timers]
        self._quiet_before = min([self._last_step, *[timer.next(step) for timer in self._timers]])
        self.now = self.now or any(coming)
        if self.now:
            self._look_at = now + SECS
        return self.now
