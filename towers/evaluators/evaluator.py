"""An evaluator: the model's own inference graph and session, which takes the values of checkpoints."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import manifest, restore
from towers.evaluators import pace, scoring
from towers.graph import averages, devices, marks, moved, strategies
from towers.input import inputs
from towers.jobs import joining
from towers.run import process, session, watchdog
from towers.sessions import admission

_NOTABLE = 0.25  # of a share of the time


class Evaluator(contextlib.AbstractContextManager):
    """One graph and, inside the `with` block, one session for any number of checkpoints.

    Args:
      model: `model(batch, *, training) -> ModelOutput`.
      dataset: zero-argument function that returns a tf.data.Dataset of single examples, which ends.
      config: `model_dir`, `eval_*`, threads and time limits are used.
      section: the devices; those that `config` gives an evaluator if not given.

    Raises:
      ValueError: model, dataset and configuration don't fit together.
    """

    def __init__(
        self, model: structs.Model, dataset: structs.Dataset, config: config_lib.Config, *, section: config_lib.DeviceConfig | None = None
    ):
        section = section or config_lib.evaluation_devices(config)
        self._placement = _place(section)
        self._proto = process.claim(section, self._placement)
        self._graph = tf.Graph()
        device, towers = self._placement.parameter_device, self._placement.towers
        with self._graph.as_default(), tf.device(device):
            tf.train.get_or_create_global_step()  # a model may ask for it, as in training
            tf.set_random_seed(config.seed)  # several processes that split the dataset shuffle it alike
            source = inputs.open_source(dataset, host=towers[0].host, proto=self._proto)
            scope = strategies.parameter_server(parameter_device=device, seed=config.seed).scope
            self._scoring = scoring.make(model, source, config, self._placement, scope=scope)
            self.variables = averages.restored(tf.global_variables(), averaged=config.use_ema)
            self._restorer = restore.Restorer(self.variables)
        self._graph.finalize()
        moved.check(self._graph, self._proto, section)
        self._config, self.parts = config, config.eval_parts
        self._folder = os.path.join(config.model_dir or '', 'eval', config.eval_name)
        self._open = contextlib.ExitStack()
        self._session: Any = None
        self._watch: Any = None
        self._passes: Any = None
        self._yielder = pace.of(config, pace.believed(self._placement, self._proto))
        self._told = 0.0  # share of the time
        self.loaded: int | None = None  # the step of the values

    def __enter__(self) -> 'Evaluator':
        self._session = tf.Session(graph=self._graph, config=self._proto)
        with contextlib.ExitStack() as undo:
            undo.callback(session.close, self._session)
            late = marks.Reader(self._session, self._scoring.marks).late
            watching = watchdog.Watchdog(self._config, folder=self._folder, late=late, close=self._session.close)
            self._watch = undo.enter_context(watching)
            devices.check_devices(self._session, self._placement)
            self._passes = scoring.Passes(self._scoring, self._session)
            self._watch.enter(watchdog.Part.IDLE)
            self._open = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def load(self, checkpoint: manifest.Checkpoint) -> None:
        """Takes the values of `checkpoint`.

        Raises:
          ValueError: a variable of the model is missing in it or has another shape.
        """
        self._watch.enter(watchdog.Part.LOADING)
        try:
            self._restorer.restore(self._session, checkpoint)
            self.loaded = checkpoint.step
        finally:
            self._watch.enter(watchdog.Part.IDLE)

    def run(self, checkpoint: manifest.Checkpoint, stop: threading.Event) -> scoring.Evaluation | None:
        """One pass over the dataset with the values last loaded, which are those of `checkpoint`; None if `stop` was set.

        Raises:
          RuntimeError: the pass had other examples than the dataset says it has.
          ValueError: it had none.
        """
        made = self.sums(checkpoint, stop)
        return None if made is None else self.result(checkpoint, made)

    def sums(self, checkpoint: manifest.Checkpoint, stop: threading.Event, *, part: int = 0) -> scoring.Sums | None:
        """What adds up over the dataset, or over one of its `eval_parts` parts; None if `stop` was set."""
        return self._pass(checkpoint.step, stop, part)

    def evaluate(self, step: int, values: Mapping[str, Any], stop: threading.Event) -> scoring.Evaluation | None:
        """What values of all `variables` by name, which are those of a step, score; None if `stop` was set; raises as `run`."""
        self._watch.enter(watchdog.Part.LOADING)
        self._restorer.set(self._session, values)
        self.loaded = step
        made = self._pass(step, stop)
        return None if made is None else scoring.Evaluation(None, self._passes.values(step, made), made.seconds)

    def _pass(self, step: int, stop: threading.Event, part: int = 0) -> scoring.Sums | None:
        made: scoring.Sums | None = self._passes.sums(step, stop, self._watch, part=part, yielder=self._yielder)
        asked = self._yielder and self._yielder.pace
        if asked and asked.measured and abs(asked.share - self._told) > _NOTABLE * self._told:
            self._told = asked.share
            text = 'The evaluator %s works %.0f %% of the time beside the training (--eval_max_slowdown, %d measurements).'
            logging.info(text, self._config.eval_name, 100 * self._told, asked.measured)
        return made

    def result(self, checkpoint: manifest.Checkpoint, made: scoring.Sums) -> scoring.Evaluation:
        """What `checkpoint` scored, from the sums over the whole dataset; raises as `run`."""
        return scoring.Evaluation(checkpoint, self._passes.values(checkpoint.step, made), made.seconds)


@contextlib.contextmanager
def opened(model: structs.Model, dataset: structs.Dataset, config: config_lib.Config) -> Iterator[Evaluator]:
    """An evaluator in its `with` block, registered among the sessions of the run directory and of this machine.

    Raises:
      Refused: it does not fit beside the others.
    """
    role = joining.Role('evaluator', which=config.eval_name, model_dir=config.model_dir)
    asked = config_lib.evaluation_devices(config)
    _place(asked)
    with contextlib.ExitStack() as closing:
        try:
            section, member = closing.enter_context(joining.joined(asked, role))
        except admission.Refused as error:
            raise admission.Refused(_renamed(str(error)), _renamed(error.screen)) from error
        session = closing.enter_context(Evaluator(model, dataset, config, section=section))
        member.follow(lambda: session.loaded)
        yield session


def _place(section: config_lib.DeviceConfig) -> structs.Placement:
    try:
        return devices.place(section)
    except ValueError as error:
        raise ValueError(_renamed(str(error))) from error


def _renamed(remedy: str) -> str:
    """What names the training's flags, with the evaluator's."""
    for flag in ('num_gpus', 'device', 'gpu_memory_fraction'):
        remedy = remedy.replace(f'--{flag}', f'--eval_{flag}')
    return remedy
