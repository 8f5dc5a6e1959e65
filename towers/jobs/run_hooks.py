"""The hooks of a training, and what else looks after its steps, each made from a program and what was asked."""

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
from towers.run import bundle, rescue, session, watchdog, writers

_LOG_STEPS, _SUMMARY_STEPS = 20, 100


@dataclasses.dataclass(frozen=True)
class Around:
    """What goes on around the steps of a training.

    Attributes:
      stop: ends the steps when set.
      inside: evaluates between the steps.
      seen: the steps that are looked at.
    """

    stop: threading.Event | None = None
    inside: inside_lib.Inside | None = None
    seen: looks.Looks = dataclasses.field(default_factory=looks.Looks)

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


def stopping(made: program.Program, config: config_lib.Config, stop_event: threading.Event) -> list[tf.train.SessionRunHook]:
    """What ends a training."""
    step = made.step
    hooks: list[tf.train.SessionRunHook] = [weightless.WeightlessHook(step.report, (step.global_step, step.saved[starting.COUNTER]))]
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
        step.report, last_step=made.total_steps, secs=config.train_secs, when=every.often(config.log_steps, _LOG_STEPS, clock)
    )
    closing.callback(shown.close)
    return [
        start.StartHook(step.global_step, start=reports.start, graph=reports.events.graph),
        shown,
        scalars.ScalarsHook(step, when=every.often(config.log_steps, _LOG_STEPS, clock), rows=reports.row, events=reports.scalars),
        summary.SummaryHook(
            step, when=every.often(config.summary_steps, _SUMMARY_STEPS, clock), write=reports.events.summary, seen=around.seen
        ),
        *[network.NetworkHook(step.step, when=every.often(config.summary_steps, _SUMMARY_STEPS, clock), write=reports.events.scalars)]
        * bool(made.site.target),
        *_serving(made, config, closing),
    ]


def timed(hooks: Sequence[tf.train.SessionRunHook], seen: looks.Looks) -> list[every.TimedHook]:
    """Those with a timer, by which a step is looked at."""
    found = [hook for hook in hooks if isinstance(hook, every.TimedHook)]
    seen.at(*[hook.timer for hook in found])
    return found


def _serving(made: program.Program, config: config_lib.Config, closing: contextlib.ExitStack) -> list[tf.train.SessionRunHook]:
    if not config.serve_snapshots:
        return []
    served = publisher.Publisher(made.step.saved, str(config.model_dir))
    closing.callback(served.close)
    return [serving.ServeHook(served, config.serve_snapshots, step=made.step.step)]


def rescuing(
    stop: threading.Event | None, watching: watchdog.Watchdog, master: session.MasterSession, keeper: saver.Saver, step: structs.TrainStep
) -> contextlib.AbstractContextManager[Any]:
    """Ends the process, saved, where the input gives nothing after a signal."""
    if stop is None:
        return contextlib.nullcontext()

    def waits() -> bool:
        return marks.Reader(master.raw_session(), step.marks).waits_for_input(watching.in_flight)

    return rescue.Rescue(stop, waits=waits, reached=lambda: watching.step, save=keeper.rescue)
