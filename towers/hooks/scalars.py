"""A row of numbers every so many steps, for metrics.jsonl and TensorBoard."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import metrics, structs
from towers.hooks import every

_RATES, _WAIT = ('examples_per_sec', 'step_ms'), 'input_wait'
_Mark = collections.namedtuple('_Mark', 'time step examples waited')


class ScalarsHook(every.TimedHook):
    """Writes a step's report and metrics, the rate and the time of a step; at a clean end also those of the last step.

    A session may begin behind a step whose own session was lost before it wrote its row. That row is then written at the
    beginning, with what is known of the step: without metrics, rate, time and wait.

    A row holds step, loss, penalty, total_loss, learning_rate, examples (all that the run was trained on so far),
    examples_per_sec, step_ms, input_wait (which part of their time the steps waited for their batch, 0 to 1, where it is
    measured) and the model's metrics by name. TensorBoard gets the same, with `examples` under the tag examples_seen. The values
    are those of the row's own step; rate, time and wait are means since the row before, the wait of the steps that were looked at,
    without the first step of this session, in which TensorFlow prepares itself.
    """

    def __init__(
        self,
        train_step: structs.TrainStep,
        *,
        when: every.Every,
        rows: Callable[[Mapping[str, Any]], None],
        events: Callable[[int, Mapping[str, Any]], None],
        unwritten: Callable[[tf.Session], dict[str, Any]] = lambda session: {},
    ) -> None:
        """Writes `train_step.report` and `train_step.metrics`, which are fetched with each step.

        Args:
          train_step: what to report.
          when: of the rows; it also gives the clock.
          rows: takes a row, such as `writers.JsonLines.append`.
          events: takes a step and its scalars, such as `writers.EventWriter.scalars`.
          unwritten: what is known of the report of the step that a session begins behind, where it has no row; else empty.

        Raises:
          ValueError: a metric has the name of a value of the report.
        """
        report = train_step.report
        taken = set(train_step.metrics).intersection([*report, *_RATES, _WAIT])
        if taken:
            raise ValueError(f"A metric must have another name than the report's values, got {', '.join(sorted(taken))}; rename it.")
        self._report_names = tuple(report)
        self._metrics = train_step.metrics
        sums = [tensor for metric in train_step.metrics.values() for tensor in metric.sums]
        self._measures = train_step.waited is not None
        self.steady_request = tf.train.SessionRunArgs((*report.values(), *sums, *[train_step.waited] * self._measures))
        self._waited = np.zeros(2)  # seconds for batches and in all, of all steps
        self._step_place = self._report_names.index('step')
        self.timer = when
        self._rows = rows
        self._events = events
        self._ask_unwritten = unwritten
        self._unwritten: dict[str, Any] = {}
        self._mark: _Mark | None = None  # what the next row's rate counts from
        self._started = 0.0
        self._steps = 1  # of the call
        self._values: tuple[Any, ...] = ()
        self._written: int | None = None

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Writes the step before where that is due, and starts the time of the first one."""
        self._unwritten = self._ask_unwritten(session)
        if self._unwritten and self.timer.due(self._unwritten['step']):
            self._write_before()
        self._started = self.timer.clock()

    def planned(self, step: int, steps: int) -> None:
        """Says that the next call makes so many steps after `step`."""
        self._steps = steps

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Writes a row where it is due."""
        self._values = run_values.results
        if self._measures:
            self._waited = self._waited + self._values[-1]
        due = self.timer.due(int(self._values[self._step_place]))
        if due or self._mark is None:
            self._after_marked_step(due)

    def end(self, session: tf.Session) -> None:
        """Writes the last step where it has no row yet."""
        if self._values and self._written != int(self._values[self._step_place]):
            self._write(self._report())
        elif self._unwritten and not self._values:
            self._write_before()

    def _after_marked_step(self, due: bool) -> None:
        report = self._report()
        if self._mark is None:
            made = self._steps  # of equal size but for one that ends a pass; this rate holds the time of the first anyhow
            self._mark = _Mark(self._started, report['step'] - made, report['examples_seen'] - made * report['examples'], np.zeros(2))
        if due:
            began = self.timer.clock()
            self._write(report)
            self.timer.took(self.timer.clock() - began)
        self._mark = _Mark(self.timer.clock(), report['step'], report['examples_seen'], self._waited)

    def _report(self) -> dict[str, Any]:
        return {name: value.item() for name, value in zip(self._report_names, self._values, strict=False)}

    def _write(self, report: dict[str, Any]) -> None:
        self._put({**report, **self._rates(report), **self._results()})

    def _write_before(self) -> None:
        report, self._unwritten = self._unwritten, {}
        self._put(report)

    def _put(self, values: Mapping[str, Any]) -> None:
        self._written = values['step']
        put(values, self._rows, self._events)

    def _rates(self, report: Mapping[str, Any]) -> dict[str, float]:
        assert self._mark is not None
        secs = self.timer.clock() - self._mark.time
        steps, examples = report['step'] - self._mark.step, report['examples_seen'] - self._mark.examples
        wait = {_WAIT: metrics.ratio(*(self._waited - self._mark.waited))} if self._measures else {}
        if secs <= 0 or steps <= 0:
            return {**dict.fromkeys(_RATES, float('nan')), **wait}
        return {'examples_per_sec': examples / secs, 'step_ms': 1000 * secs / steps, **wait}

    def _results(self) -> dict[str, Any]:
        """The metrics' values from the totals, which stand behind the report in the fetched values."""
        totals = iter(self._values[len(self._report_names) :])
        return metrics.results(self._metrics, {name: [next(totals) for _ in metric.sums] for name, metric in self._metrics.items()})


def put(values: Mapping[str, Any], rows: Callable[[Mapping[str, Any]], None], events: Callable[[int, Mapping[str, Any]], None]) -> None:
    """Writes a step's values, of which 'step' and 'examples_seen' are two, as a row and as scalars; the arguments are those of the hook."""
    row = dict(values)
    step, seen = row.pop('step'), row.pop('examples_seen')
    rows({'step': step, **row, 'examples': seen})
    row.pop('examples', None)  # of the step alone
    events(step, {**row, 'examples_seen': seen})
