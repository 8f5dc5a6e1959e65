"""The steps of a training: what is asked of each, in the loop and in whatever measures it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.graph import marks
from towers.hooks import looks
from towers.jobs import program
from towers.run import session

_QUIET_SECS = 0.01  # of steps that are made before anybody asks whether to stop, unless one takes longer


class Made(NamedTuple):
    """What came of a call.

    Attributes:
      step: global_step after it; where it is the one before, or less, the step was held back.
      steps: that the call made, one that was held back too.
      report: all examples that the run was trained on so far, and the step's loss; None where no step was looked at.
    """

    step: int
    steps: int
    report: tuple[int, float] | None


class Stepper:
    """Makes steps, each with what is asked of its kind.

    Args:
      master: the session, with all its hooks.
      step: what to run.
      seen: which steps are looked at; that of the hooks.
    """

    def __init__(self, master: session.MasterSession, step: structs.TrainStep, seen: looks.Looks) -> None:
        self._master, self._step, self._seen = master, step, seen
        # The same tuple each time, and a flat one, which is the cheapest form.
        self._asked = (*marks.whole(step), step.step, step.report['examples_seen'], step.report['loss'])
        self._bare = bare(step)
        self._quiet: Callable[[int, float], tuple[int, Any]] | None = None

    def make(self, before: int, most: int | None = None) -> Made:
        """The step after `before`, and where it is not looked at some more such steps; `most` of them, if it is given."""
        if self._seen.next(before + 1):
            *_, number, examples, loss = self._master.run(self._asked)
            return Made(int(number), 1, (int(examples), float(loss))) if number > before else self._held_back(1)
        if self._quiet is None:
            self._quiet = self._master.quiet(self._bare)
        steps, until = self._seen.quiet(before + 1, _QUIET_SECS)
        made, changed = self._quiet(steps if most is None else min(steps, most), until)
        if changed is None or changed:  # an operation without an output has no reason to hold a step back
            return Made(before + made, made, None)
        self._master.held_back()
        return self._held_back(made)

    def reached(self) -> tuple[int, int]:
        """The step, and all examples that the run was trained on so far, between two steps."""
        found = self._master.raw_session().run((self._step.global_step, self._step.saved['examples_seen']))
        return int(found[0]), int(found[1])

    def _held_back(self, made: int) -> Made:
        return Made(int(self._master.raw_session().run(self._step.global_step)), made, None)  # the hooks may have gone back


def bare(step: structs.TrainStep) -> tuple[tf.Operation | tf.Tensor, ...]:
    """What makes a step that is not looked at, first of all whether it changed anything."""
    return (*[operation.outputs[0] if operation.outputs else operation for operation in step.ops], *marks.whole(step)[len(step.ops) :])


def seen(made: program.Program, config: config_lib.Config, hooks: Sequence[tf.train.SessionRunHook] = ()) -> looks.Looks:
    """The steps that are looked at: all where any may be the last, and where one more set of fetches costs an optimisation of its own.

    Args:
      made: what runs.
      config: what may end the training.
      hooks: the user's, which may end it too, and are told of every step.
    """
    may_end = config.train_epochs is not None and made.step.input.epoch_examples is None  # before the last step that is known
    is_known = not (hooks or may_end or config.train_secs or config.early_stop or config.steps_per_run > 1)
    is_cheap = made.proto.graph_options.rewrite_options.disable_meta_optimizer and not made.site.target
    return looks.Looks(made.total_steps if is_known and is_cheap else None)
