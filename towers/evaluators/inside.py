"""Evaluations inside a training: between its steps, in its session, on its towers, with the values that are there.

The model is built once more in the training's graph, out of training and after everything else: so no name, no seed and no
batch of the training is another one than without.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors, structs
from towers.evaluators import results as results_lib
from towers.evaluators import scoring, supervisor
from towers.graph import averages, marks, moved, strategies
from towers.hooks import evaluating, every
from towers.input import inputs
from towers.jobs import program
from towers.run import watchdog

_MADE = (tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.TABLE_INITIALIZERS)


class Inside(contextlib.AbstractContextManager):
    """The evaluations of one training, `--eval_every_steps`.

    A failure is a WARNING and leaves its result out; the training goes on. A batch that takes longer than a step may ends the
    run as a step does.

    Args:
      model: as it is trained.
      evaluators: what to evaluate, at least one.
      stop: ends an evaluation, without a result, when set.
    """

    def __init__(self, model: structs.Model, evaluators: Sequence[supervisor.Evaluator], stop: threading.Event):
        self.clock = every.Clock()  # which leaves the evaluations out
        self._model, self._evaluators, self._stop = model, evaluators, stop
        self._results = [results_lib.Results(str(each.config.model_dir), each.name) for each in evaluators]
        self._scorings: list[scoring.Scoring] = []
        self._passes: list[scoring.Passes] = []
        self._session: Any = None
        self._made: Any = None
        self._watch: Any = None
        self._check: Callable[[], None] = lambda: None

    def __exit__(self, *_: Any) -> None:
        for each in self._results:
            each.close()

    def hook(
        self, made: program.Program, watch: watchdog.Watchdog, *, check: Callable[[], None], final: Callable[[], bool]
    ) -> evaluating.EvaluateHook:
        """What evaluates during a session of a program.

        Args:
          made: its graph must not be finalised before the hook's `begin`.
          watch: over the training, which sees nothing of the evaluations.
          check: raises where the run directory may not be written any more.
          final: asked at the end: whether the run is done.
        """
        self._made, self._watch, self._check = made, watch, check
        first = self._evaluators[0].config
        enough = functools.partial(results_lib.enough, first)
        return evaluating.EvaluateHook(self, first.eval_every_steps or 0, step=made.step.step, enough=enough, final=final)

    def build(self) -> None:
        """Adds the evaluations to the program's graph."""
        site, placement = self._made.site, self._made.placement
        with _collections_kept(), tf.device(placement.parameter_device):
            for number, each in enumerate(self._evaluators):
                prefix = f'evaluation/{number}/'
                source = inputs.open_source(each.dataset, host=placement.towers[0].host, proto=site.proto, target=site.target)
                scope = strategies.reading(seed=each.config.seed, prefix=prefix, valued=_valued(each.config))
                with tf.name_scope(prefix):
                    self._scorings.append(scoring.make(self._model, source, each.config, placement, scope=scope))
        if not site.target:
            moved.check(self._made.graph, site.proto, self._evaluators[0].config)

    def begin(self, session: tf.Session, step: int) -> None:
        """Makes ready for a session whose variables are those of `step`; what was found of later steps is void."""
        self._session = session
        self._passes = [scoring.Passes(each, session) for each in self._scorings]
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """What was found of steps after `step` is void."""
        for each in self._results:
            each.go_back(step)

    def evaluate(self, step: int) -> None:
        """Evaluates the variables of `step` by each evaluator that has no result of it."""
        self._watch.enter(watchdog.Part.IDLE)
        with self.clock.stopped():
            for place, known in enumerate(self._results):
                found = None if known.has_step(step) or self._stop.is_set() else self._found(place, step)
                if found is not None:
                    self._check()
                    known.add(found)
        self._watch.saves()

    def _found(self, place: int, step: int) -> scoring.Evaluation | None:
        """What a step scores; None where a signal came, or the evaluation failed."""
        config, passes = self._evaluators[place].config, self._passes[place]
        late = marks.Reader(self._session, self._scorings[place].marks).late
        folder = os.path.join(str(config.model_dir), 'eval', config.eval_name)
        try:
            with watchdog.Watchdog(config, folder=folder, late=late, close=self._session.close) as watch:
                made = passes.sums(step, self._stop, watch)
            return None if made is None else scoring.Evaluation(None, passes.values(step, made), made.seconds)
        except errors.Stalled:
            raise
        except Exception as error:
            text = 'The evaluation %s of step %d failed and the training goes on without its result: %s'
            logging.warning(text, config.eval_name, step, ' '.join(str(error).split()))
            return None


def _valued(config: config_lib.Config) -> Callable[[tf.Variable], tf.Variable]:
    """From a variable to what is evaluated in its place: itself, or its average where it is trained."""
    if not config.use_ema:
        return lambda variable: variable
    there = {variable.op.name: variable for variable in tf.global_variables()}

    def average(variable: tf.Variable) -> tf.Variable:
        found = there.get(averages.name_of(variable)) if variable.trainable else variable
        if found is None or found.dtype.base_dtype != variable.dtype.base_dtype:
            raise ValueError(
                f'--use_ema reads an average of {variable.op.name} of its own type, got none; give --ema_decay, or where the variable is '
                'of half precision leave --eval_every_steps out and --evaluate beside the training.'
            )
        return found

    return average


@contextlib.contextmanager
def _collections_kept() -> Iterator[None]:
    """What hooks and savers find in the current graph's collections stays that of the training."""
    graph = tf.get_default_graph()
    before = {key: list(graph.get_collection_ref(key)) for key in graph.get_all_collection_keys()}
    yield
    for key in set(graph.get_all_collection_keys()) - set(_MADE):
        graph.get_collection_ref(key)[:] = before.get(key, [])
