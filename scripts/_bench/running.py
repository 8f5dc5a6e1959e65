"""A training as a user has it, step by step: all hooks, reports and checkpoints, as many numbers fetched as its own loop fetches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow.compat.v1 as tf

import towers
from towers.jobs import program, run_hooks, stepping, training
from towers.run import session


@contextlib.contextmanager
def opened(
    made: program.Program, config: towers.Config, hooks: Sequence[tf.train.SessionRunHook] = ()
) -> Iterator[tuple[session.MasterSession, Callable[[], stepping.Made]]]:
    """The master session of a program, and a function that makes the next step of its training; `hooks` besides its own."""
    seen = stepping.seen(made, config, hooks)
    with training.opened(made, config, hooks=hooks, around=run_hooks.Around(seen=seen)) as master:
        stepper, reached = stepping.Stepper(master, made.step, seen), 0

        def step() -> stepping.Made:
            nonlocal reached
            made = stepper.make(reached)
            reached = made.step
            return made

        yield master, step
