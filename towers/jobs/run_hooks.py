"""The hooks of a training, and what else looks after its steps, each made from a program and what was asked."""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.checkpoint import saver
from towers.evaluators import inside as inside_lib
from towers.evaluators import results as results_lib
from towers.graph import marks
from towers.hooks import every, looks, nan, network, progress, scalars, serving, start, stop, summary, weightless
from towers.jobs import program, starting
from towers.live import publisher
from towers.run import bundle, looping, rescue, session, watchdog, writers

_LOG_STEPS, _SUMMARY_STEPS = 20, 100


@dataclasses.dataclass(frozen=True)
class Around:
    """What goes on around the steps of a training.

    Attributes:
      stop: ends the steps when set.
      inside: evaluates between the steps.
      seen: the steps that are looked at.
      told: is given what saves.
    """

    stop: threading.Event | None = None
    inside: inside_lib.Inside | None = None
    seen: looks.Looks = dataclasses.field(default_factory=looks.Looks)
    told: Callable[[saver.Saver], None] = lambda _: None

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds of training, evaluations left out."""
        return time.monotonic if self.inside is None else self.inside.clock

    def hooks(
        self, made: program.Program, watch: watchdog.Watchdog, check: Callable[[], None], final: Callable[[], bool]
    ) -> list[tf.train.SessionRunHook]:
        """What evaluates, with the arguments of `Inside.hook`; nothing where nothing does."""
        return [] if self.inside is None else [self.inside.hook(made, watch, check=check, final=final)]


def not_finite(made: program.Program, config: config_lib.Config, rollback: Callable[[tf.Session], int]) -> list[tf.train.SessionRunHook]:
    """What looks after steps that are not finite; nothing where none is looked for."""
    if made.recorder is None:
        return []
    explain = bundle.explainer(made.recorder, config)
    back = rollback if config.nan_policy == 'rollback' else None
    counters = made.step.saved[starting.COUNTER], made.step.global_step
    return [nan.NanHook(made.step.report, counters, config, explain=explain, rollback=back)]


def going_back(
    wait: Callable[[], object],
    starter: starting.Starter,
    reports: writers.Reports,
    reporting: Sequence[tf.train.SessionRunHook],
    runs: looping.Runs | None,
) -> Callable[[tf.Session], int]:
    """A function that sets a session back to the newest checkpoint, tells all that count steps, and returns its step.

    Args:
      wait: for a checkpoint that is being written.
      starter: what restores.
      reports: where they are written.
      reporting: the hooks that do so.
      runs: calls of several steps; None = each makes one.
    """

    def rollback(raw: tf.Session) -> int:
        wait()
        number = starter.go_back(raw)
        reports.start(number)
        reports.counts['rollbacks'] += 1
        for hook in reporting:
            if isinstance(hook, every.TimedHook | summary.SummaryHook):
                hook.went_back(number)
        if runs is not None:
            runs.went_back()
        return number

    return rollback


def stopping(
    made: program.Program, config: config_lib.Config, stop_event: threading.Event, runs: looping.Runs | None = None
) -> list[tf.train.SessionRunHook]:
    """What ends a training, whose calls make several steps with `runs`."""
    step = made.step
    held_back = (lambda: False) if runs is None else (lambda: runs.was_held_back)
    counters = (step.global_step, step.saved[starting.COUNTER])
    hooks: list[tf.train.SessionRunHook] = [weightless.WeightlessHook(step.report, counters, held_back=held_back)]
    if made.total_steps is not None:
        hooks.append(stop.StopAtStep(made.total_steps, step=step.step, global_step=step.global_step))
    if config.train_secs is not None:
        hooks.append(stop.StopAfterSecs(config.train_secs))
    if config.early_stop is not None:
        hooks.append(stop.StopEarly(functools.partial(results_lib.enough, config)))
    hooks.append(stop.StopWhen(stop_event))  # last: a signal in the run's last step finds it done
    return hooks


def reporting(
    made: program.Program,
    config: config_lib.Config,
    reports: writers.Reports,
    closing: contextlib.ExitStack,
    around: Around,
) -> list[tf.train.SessionRunHook]:
    """What reports of the steps that are looked at; rates are those of the clock of `around`."""
    step, clock = made.step, around.clock
    shown = progress.ProgressHook(
        {**step.report, **({} if step.waited is None else {'waited': step.waited})},
        last_step=made.total_steps,
        secs=config.train_secs,
        when=every.often(config.log_steps, _LOG_STEPS, clock),
    )
    closing.callback(shown.close)
    return [
        start.StartHook(step.global_step, start=reports.start, graph=reports.events.graph),
        shown,
        scalars.ScalarsHook(
            step,
            when=every.often(config.log_steps, _LOG_STEPS, clock),
            rows=reports.row,
            events=reports.scalars,
            unwritten=functools.partial(_unwritten, made, reports),
        ),
        summary.SummaryHook(
            step, when=every.often(config.summary_steps, _SUMMARY_STEPS, clock), write=reports.events.summary, seen=around.seen
        ),
        *([_network(made, config, reports, clock)] if made.site.target else []),
        *_serving(made, config, closing),
    ]


def _unwritten(made: program.Program, reports: writers.Reports, raw: tf.Session) -> dict[str, float]:
    """What the tasks of a cluster know of the step that a session begins behind, where it has no row yet."""
    found = {} if made.noted is None else made.noted.reported(raw)
    return {} if found.get('step') == reports.rows.last_step() else found


def _network(made: program.Program, config: config_lib.Config, reports: writers.Reports, clock: Callable[[], float]) -> network.NetworkHook:
    towers = collections.Counter(network.task_of(tower.host) for tower in made.placement.towers)
    each = config.examples_per_step(towers.total()) / towers.total()
    return network.NetworkHook(
        made.step.step,
        when=every.often(config.summary_steps, _SUMMARY_STEPS, clock),
        write=reports.events.scalars,
        examples={task: count * each for task, count in towers.items()},
    )


def timed(hooks: Sequence[tf.train.SessionRunHook], seen: looks.Looks) -> None:
    """Makes the steps be looked at at which one with a timer acts."""
    seen.at(*[hook.timer for hook in hooks if isinstance(hook, every.TimedHook)])


def _serving(made: program.Program, config: config_lib.Config, closing: contextlib.ExitStack) -> list[tf.train.SessionRunHook]:
    if not config.serve_snapshots:
        return []
    served = publisher.Publisher(made.step.saved, str(config.model_dir))
    closing.callback(served.close)
    return [serving.ServeHook(served, config.serve_snapshots, step=made.step.step)]


def several(step: structs.TrainStep, config: config_lib.Config) -> looping.Runs | None:
    """What plans calls of several steps; None where each makes one."""
    return looping.Runs(step, marks.whole(step), config.steps_per_run) if config.steps_per_run > 1 else None


def watching(
    made: program.Program, config: config_lib.Config, runs: looping.Runs | None, raw: Callable[[], tf.Session]
) -> watchdog.Watchdog:
    """The watch over the calls of the session that `raw` returns."""

    def late(done: int) -> str:
        return marks.Reader(raw(), made.step.marks).late(done if runs is None else runs.done())

    def close() -> None:
        session = raw()
        if session is not None:  # else it is closed by now
            session.close()

    return watchdog.Watchdog(made.site.watched(config), folder=str(config.model_dir), late=late, close=close)


def rescuing(
    stop: threading.Event | None,
    watching: watchdog.Watchdog,
    master: session.MasterSession,
    keeper: saver.Saver,
    made: tuple[structs.TrainStep, looping.Runs | None],
) -> contextlib.AbstractContextManager[Any]:
    """Ends the process, saved, where the input gives nothing after a signal, and a loop behind its step in flight.

    Args:
      stop: set by the signal; None = nobody sets it.
      watching: the watch over the calls.
      master: the session.
      keeper: what saves.
      made: the step, and the calls of several steps.
    """
    step, runs = made
    if stop is None:
        return contextlib.nullcontext()

    def waits() -> bool:
        raw, done = master.raw_session(), watching.in_flight  # the session before anything that takes time
        if done is not None and runs is not None:
            done = runs.done()
        return marks.Reader(raw, step.marks).waits_for_input(done)

    def reached() -> int:
        return watching.step if runs is None else runs.reached()

    return rescue.Rescue(stop, waits=waits, reached=reached, save=keeper.rescue, begin=(lambda: None) if runs is None else runs.stop)
