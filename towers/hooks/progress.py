"""A line that says how far a training is: a live bar on a terminal, plain lines in a pipe."""

import collections
import shutil
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np
import tensorflow.compat.v1 as tf

from towers.hooks import every

_BAR_WIDTH = 24
_REDRAW_SECS = 0.1
_REDRAWS_AVERAGED = 30

_Mark = collections.namedtuple('_Mark', 'time step examples waited')


class ProgressHook(every.TimedHook):
    """Shows step, loss, examples per second, the part of the time in which steps waited for their input, and the time to go.

    Rate and wait are those of the steps since the line before (on a terminal: of the last 3 seconds), without the first step of
    the run, in which TensorFlow prepares itself. On a terminal the line is drawn in place, ten times a second at most.
    """

    def __init__(
        self,
        report: Mapping[str, tf.Tensor],
        *,
        last_step: int | None,
        when: every.Every,
        secs: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Shows the values of each step's `report`: step, loss, examples_seen and, where it is measured, waited.

        Args:
          report: what is fetched with each step; `waited` is that of a TrainStep.
          last_step: where training ends; None = not known.
          when: of the lines in a pipe; it also gives the clock.
          secs: after which training ends, counted from `begin`; None = any. Where no end is known no time to go is shown.
          stream: where to write; None = standard output.
        """
        names = ('step', 'loss', 'examples_seen', *['waited'] * ('waited' in report))
        self.steady_request = tf.train.SessionRunArgs(tuple(report[name] for name in names))
        self._waited = np.zeros(2)  # seconds for batches and in all, of all steps
        self._last_step = last_step
        self._secs = secs
        self._ends_at = float('inf')
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._clock = when.clock
        self.timer = every.Every(secs=_REDRAW_SECS, clock=when.clock) if self._live else when
        self._first: _Mark | None = None
        self._marks: collections.deque[_Mark] = collections.deque(maxlen=_REDRAWS_AVERAGED if self._live else 1)
        self._values: tuple[Any, ...] | None = None
        self._open_line = False

    def begin(self) -> None:
        """Starts the time."""
        if self._secs is not None:
            self._ends_at = self._clock() + self._secs

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Shows the first step and those that are due."""
        self._values = run_values.results
        self._waited = self._waited + (self._values[3] if len(self._values) > 3 else 0.0)
        if self.timer.due(int(run_values.results[0])) or self._first is None:
            began = self._clock()
            self._show()
            self.timer.took(self._clock() - began)

    def end(self, session: tf.Session) -> None:
        """Shows the last step."""
        if self._values is not None and self._marks[-1].step != self._values[0]:
            self._show()
        self.close()

    def close(self) -> None:
        """Ends the live line, so that what is written next begins a new one; for a training that failed."""
        if self._open_line:
            self._write('\n')
        self._open_line = False

    def _show(self) -> None:
        step, loss, examples = self._values[:3]  # type: ignore[index]
        now = _Mark(self._clock(), int(step), int(examples), self._waited)
        self._first = self._first or now
        text = f'loss {loss:.4f}' + self._rates(now)
        of_last = f'{now.step}/{self._last_step}' if self._last_step else f'{now.step}'
        self._marks.append(now)
        self._write(self._bar(now.step, f'{of_last}  {text}') if self._live else f'step {of_last}  {text}\n')
        self._open_line = self._live

    def _rates(self, now: _Mark) -> str:
        """The examples per second, the wait for the input and the time to go, as far as they are known."""
        text = ''
        if self._marks and now.time > self._marks[0].time:
            text += f'  {(now.examples - self._marks[0].examples) / (now.time - self._marks[0].time):.0f} examples/s'
            waited, secs = now.waited - self._marks[0].waited
            text += f'  input {waited / secs:.0%}' if secs > 0 else ''
        left = self._ends_at - now.time
        if self._first and self._last_step and now.step > self._first.step:
            secs_a_step = (now.time - self._first.time) / (now.step - self._first.step)
            left = min(left, (self._last_step - now.step) * secs_a_step)
        return text + f'  ETA {duration(left)}' if left < float('inf') else text

    def _bar(self, step: int, text: str) -> str:
        done = min(_BAR_WIDTH, _BAR_WIDTH * step // self._last_step) if self._last_step else 0
        bar = f'[{"#" * done}{"-" * (_BAR_WIDTH - done)}] ' if self._last_step else ''
        width = shutil.get_terminal_size().columns - 1
        return '\r' + f'{bar}{text}'[:width].ljust(width)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self.timer = every.Every()  # nobody reads it any more, which is no reason to stop


def duration(secs: float) -> str:
    """Seconds as hours, minutes and seconds: '1:02:03', '2:03'."""
    minutes, seconds = divmod(max(0, round(secs)), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'
