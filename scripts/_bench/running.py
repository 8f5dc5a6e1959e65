"""A training as a user has it, step by step: all hooks, reports and checkpoints, as many numbers fetched as its own loop fetches."""

import contextlib
import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

import towers
from scripts import _flags, _zoo
from towers.directory import run_directory
from towers.jobs import joining, program, run_hooks, stepping, training
from towers.run import session

_NEW = run_directory.Claim()


@contextlib.contextmanager
def opened(
    made: program.Program,
    config: towers.Config,
    hooks: Sequence[tf.train.SessionRunHook] = (),
    *,
    claim: run_directory.Claim = _NEW,
) -> Iterator[tuple[session.MasterSession, Callable[..., stepping.Made]]]:
    """The master session of a program, and a function that makes the next steps of its training; `hooks` besides its own."""
    seen = stepping.seen(made, config, hooks)
    with training.opened(made, config, claim=claim, hooks=hooks, around=run_hooks.Around(seen=seen)) as master:
        stepper, reached = stepping.Stepper(master, made.step, seen), claim.found.step if claim.found else 0

        def make(steps: int = 1) -> stepping.Made:
            nonlocal reached
            while True:
                made = stepper.make(reached, steps)
                steps, reached = steps - made.steps, made.step
                if steps <= 0:
                    return made

        yield master, make


@contextlib.contextmanager
def asked_for(values: Any) -> Iterator[tuple[program.Program, session.MasterSession, Callable[..., stepping.Made]]]:
    """The training that flags ask for, without an end and in a folder of its own: its program, and what `opened` gives."""
    work = _zoo.load(values)
    with tempfile.TemporaryDirectory(prefix='towers-benchmark-') as folder:
        config = dataclasses.replace(_flags.to_config(values, work.recipe), model_dir=folder, train_steps=10**9)
        made = program.make(work.model, work.dataset, config)
        # The progress lines are written, as in a training, to where nobody reads them.
        with open(os.devnull, 'w') as unread, contextlib.redirect_stdout(unread), opened(made, config) as (master, step):
            yield made, master, step


@contextlib.contextmanager
def gone_on(work: _zoo.Work, config: towers.Config) -> Iterator[Callable[[], stepping.Made]]:
    """The training in a run directory, held and registered as any other: a function that makes its next step, from the checkpoint on."""
    functions = {'model': work.model, 'dataset': work.dataset}
    with joining.joined(config, joining.master(config)) as (given, member), run_directory.claimed(given, threading.Event()) as claim:
        made = program.make(work.model, work.dataset, given)
        agreed = run_directory.agreed(claim, made, given, functions=functions)
        with opened(made, given, claim=agreed) as (_, step):
            newest: list[int] = []
            member.follow(lambda: newest[-1] if newest else None)

            def next_step() -> stepping.Made:
                found = step()
                newest[:] = [found.step]
                return found

            yield next_step
