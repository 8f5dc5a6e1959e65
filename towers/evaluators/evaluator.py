"""An evaluator: the model's own inference graph and session, which takes the values of checkpoints."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors, joining, metrics, structs
from towers.checkpoint import manifest, restore
from towers.graph import averages, build, devices, marks, moved, strategies
from towers.graph.reduce import central
from towers.input import inputs
from towers.run import exhausted, process, session, watchdog
from towers.sessions import admission

LOSS = 'loss'
RESERVED = ('step', 'examples', LOSS, 'seconds', 'checkpoint', 'saved')

Totals = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one checkpoint scored.

    Attributes:
      checkpoint: the one evaluated.
      values: step, examples, loss where the model has one, and each metric by its name.
      seconds: time the pass over the data took.
    """

    checkpoint: manifest.Checkpoint
    values: Mapping[str, Any]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sums:
    """What was added up over a dataset, or a part of it.

    Attributes:
      examples: how many there were.
      totals: of each metric's sums, in float64 or int64; None where there was no example.
      seconds: time it took.
    """

    examples: int = 0
    totals: Totals | None = None
    seconds: float = 0.0

    def add(self, other: 'Sums') -> 'Sums':
        """The sums of both."""
        totals = self.totals if other.totals is None else _added(self.totals, other.totals)
        return Sums(self.examples + other.examples, totals, self.seconds + other.seconds)


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
            self._part = tf.placeholder_with_default(tf.zeros([], tf.int64), [])
            split = None if config.eval_parts == 1 else (config.eval_parts, self._part)
            self._input = inputs.evaluation(source, config.eval_batch_size, towers, part=split)
            scope = strategies.parameter_server(parameter_device=device, seed=config.seed).scope
            outputs = build.inference(model, self._input, towers, scope=scope)
            self._metrics = _totals(outputs, device)
            self._marks = marks.make(self._input, [(output.tower, _made(output)) for output in outputs])
            self._restorer = restore.Restorer(averages.restored(tf.global_variables(), averaged=config.use_ema))
            self._tables = tf.tables_initializer()
            self._locals = tf.local_variables_initializer()
        self._graph.finalize()
        moved.check(self._graph, self._proto, section)
        self._config, self.parts = config, config.eval_parts
        self._folder = os.path.join(config.model_dir or '', 'eval', config.eval_name)
        self._open = contextlib.ExitStack()
        self._session: Any = None
        self._watch: Any = None
        self._step: Any = None
        self._fetches: Any = None
        self.loaded: int | None = None  # step of the checkpoint

    def __enter__(self) -> 'Evaluator':
        self._session = tf.Session(graph=self._graph, config=self._proto)
        with contextlib.ExitStack() as undo:
            undo.callback(session.close, self._session)
            late = marks.Reader(self._session, self._marks).late
            watching = watchdog.Watchdog(self._config, folder=self._folder, late=late, close=self._session.close)
            self._watch = undo.enter_context(watching)
            devices.check_devices(self._session, self._placement)
            self._session.run(self._tables)
            sums = {name: metric.sums for name, metric in self._metrics.items()}
            advance = [mark.advance for mark in self._marks]
            self._fetches = (self._input.examples, sums, advance)
            self._step = self._session.make_callable(self._fetches)
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
        finally:
            self._watch.enter(watchdog.Part.IDLE)

    def run(self, checkpoint: manifest.Checkpoint, stop: threading.Event) -> Evaluation | None:
        """One pass over the dataset with the values last loaded, which are those of `checkpoint`; None if `stop` was set.

        Raises:
          RuntimeError: the pass had other examples than the dataset says it has.
          ValueError: it had none.
        """
        made = self.sums(checkpoint, stop)
        return None if made is None else self.result(checkpoint, made)

    def sums(self, checkpoint: manifest.Checkpoint, stop: threading.Event, *, part: int = 0) -> Sums | None:
        """What adds up over the dataset, or over one of its `eval_parts` parts; None if `stop` was set."""
        start = time.monotonic()
        self._watch.enter(watchdog.Part.PASS, checkpoint.step)
        self._session.run(self._locals)
        self._session.run(self._input.initializer, {self._part: part})
        examples, totals = 0, None
        while (made := None if stop.is_set() else self._batch()) is not None:
            examples += int(made[0])
            totals = _added(totals, made[1])
        self._watch.enter(watchdog.Part.IDLE)
        return None if stop.is_set() else Sums(examples, totals, time.monotonic() - start)

    def result(self, checkpoint: manifest.Checkpoint, made: Sums) -> Evaluation:
        """What `checkpoint` scored, from the sums over the whole dataset; raises as `run`."""
        _check_count(made.examples, self._input.epoch_examples)
        values = {name: _plain(value) for name, value in metrics.results(self._metrics, made.totals).items()}
        return Evaluation(checkpoint, {'step': checkpoint.step, 'examples': made.examples, **values}, made.seconds)

    def _batch(self) -> tuple[Any, Mapping[str, Any]] | None:
        """The sums of the next batch; None at the input's own end."""
        self._watch.step_begins(watchdog.Part.BATCH)
        try:
            made = self._step()
            self._watch.step_ends()
            return made
        except tf.errors.OutOfRangeError as error:
            if errors.says_end(error) and self._is_at_end():
                return None
            raise errors.located(error, self._graph) from error
        except tf.errors.OpError as error:
            if exhausted.is_one(error):
                raise exhausted.explained(error, self._graph, self._again, session='evaluator', lower=('--eval_batch_size',)) from error
            raise errors.located(error, self._graph) from error

    def _again(self, options: tf.RunOptions) -> Any:
        return self._session.run(self._fetches, options=options)

    def _is_at_end(self) -> bool:
        try:
            return bool(self._session.run(self._input.ended))
        except tf.errors.OpError:
            logging.exception('The input could not say whether it is at its end; taking the error of the step as a failure.')
            return False


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


def _made(output: structs.TowerOutput) -> list[tf.Tensor | None]:
    """What a tower makes last."""
    return [output.output.loss, *(part for metric in output.metrics.values() for part in metric.sums)]


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


def _totals(outputs: Sequence[structs.TowerOutput], device: str) -> dict[str, structs.Metric]:
    """Loss and metrics of one batch, summed over the towers."""
    parts = [{**_loss(output), **output.metrics} for output in outputs]
    taken = sorted(set(outputs[0].metrics) & set(RESERVED))
    if taken:
        raise ValueError(f'The model calls a metric {taken[0]!r}, which is a name of every evaluation ({", ".join(RESERVED)}); rename it.')
    if not parts[0]:
        raise ValueError('The model returns neither a loss nor metrics, so there is nothing to evaluate; give ModelOutput one of them.')
    with tf.device(device), tf.name_scope('totals'):
        return central.add_metrics(parts)


def _loss(output: structs.TowerOutput) -> dict[str, structs.Metric]:
    """The loss as a mean that counts each example, or each unit of the model's own weight; a stand-in row has none."""
    if output.output.loss is None:
        return {}
    with tf.device(output.tower.devices[0]), tf.name_scope(f'{output.tower.scope}/{LOSS}'):
        weight = tf.where(output.examples > 0, output.weight, tf.zeros_like(output.weight))
        return {LOSS: structs.Metric((tf.math.multiply_no_nan(output.output.loss, weight), weight), metrics.ratio)}


def _added(totals: Totals | None, sums: Mapping[str, Sequence[Any]]) -> Totals:
    """Totals with one more batch, in float64; whole numbers stay whole."""
    new = {name: tuple(_wide(part) for part in parts) for name, parts in sums.items()}
    if totals is None:
        return new
    return {name: tuple(a + b for a, b in zip(totals[name], parts, strict=True)) for name, parts in new.items()}


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    kinds = {'i': np.int64, 'u': np.int64, 'b': np.int64, 'c': np.complex128}
    return array.astype(kinds.get(array.dtype.kind, np.float64))


def _plain(value: Any) -> Any:
    """A Python number where it is one, else an array."""
    array = np.asarray(value)
    return array if array.ndim else array.item()


def _check_count(examples: int, size: int | None) -> None:
    if not examples:
        raise ValueError('The evaluation dataset gave no examples; expected at least one. Check its files and filters.')
    if size is not None and examples != size:
        raise RuntimeError(
            f'{examples} examples were evaluated, the dataset says it has {size}; expected each exactly once. '
            "Check the dataset's filters, or its assert_cardinality."
        )
