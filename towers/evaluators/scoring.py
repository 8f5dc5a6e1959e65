"""What a model scores over a dataset: the part of a graph that says it, and passes over the data in a session.

One code for evaluators with a graph of their own, which take the values of checkpoints, and for evaluations inside a training.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import errors, metrics, structs
from towers.checkpoint import manifest
from towers.config import evaluation as eval_config
from towers.evaluators import pace
from towers.graph import build, devices, marks, strategies
from towers.graph.reduce import central
from towers.input import inputs
from towers.run import ending, exhausted, process, watchdog

LOSS = 'loss'
RESERVED = (LOSS, *eval_config.NO_METRICS)

Totals = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What the values of one step scored.

    Attributes:
      checkpoint: the one evaluated; None = the values were in the session.
      values: step, examples, loss where the model has one, and each metric by its name.
      seconds: time the pass over the data took.
    """

    checkpoint: manifest.Checkpoint | None
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


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The part of a graph that evaluates.

    Attributes:
      input: one pass over the dataset, or over the part that `part` says.
      part: int64 scalar placeholder.
      metrics: name -> Metric of one batch, summed over the towers; the loss is one of them.
      marks: of the input and the towers.
      tables: operation that makes its lookup tables, once in a session.
      anew: operation that sets its local variables, before each pass.
    """

    input: structs.Input
    part: tf.Tensor
    metrics: Mapping[str, structs.Metric]
    marks: tuple[structs.Mark, ...]
    tables: tf.Operation
    anew: tf.Operation


def make(
    model: structs.Model, source: inputs.Source, config: config_lib.EvalConfig, placement: structs.Placement, *, scope: build.Scope
) -> Scoring:
    """Builds the model out of training on each tower in the current graph and name scope, with its totals.

    Args:
      model: `model(batch, *, training) -> ModelOutput`.
      source: the dataset, which ends.
      config: `eval_batch_size` and `eval_parts`.
      placement: where the towers run.
      scope: the context of one tower.

    Raises:
      ValueError: the model can't be evaluated.
    """
    graph = tf.get_default_graph()
    tables, local = (list(graph.get_collection_ref(key)) for key in (tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.LOCAL_VARIABLES))
    part = tf.placeholder_with_default(tf.zeros([], tf.int64), [])
    split = None if config.eval_parts == 1 else (config.eval_parts, part)
    read = inputs.evaluation(source, config.eval_batch_size, placement.towers, part=split)
    outputs = build.inference(model, read, placement.towers, scope=scope)
    totals = _totals(outputs, placement.parameter_device)
    made = marks.make(read, [(output.tower, _made(output)) for output in outputs])
    return Scoring(
        read,
        part,
        totals,
        made,
        tf.group(*graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)[len(tables) :]),
        tf.group(*[variable.initializer for variable in tf.local_variables()[len(local) :]]),
    )


def names(model: structs.Model, dataset: structs.Dataset, config: config_lib.Config) -> set[str]:
    """What an evaluation of the model reports, by building it for one tower on the CPU in a graph of its own."""
    section = config_lib.DeviceConfig(device='cpu')
    placement = devices.place(section)
    with tf.Graph().as_default(), tf.device(placement.parameter_device):
        tf.train.get_or_create_global_step()
        source = inputs.open_source(dataset, host=placement.towers[0].host, proto=process.claim(section, placement))
        scope = strategies.parameter_server(parameter_device=placement.parameter_device, seed=config.seed).scope
        return set(make(model, source, config, placement, scope=scope).metrics)


class Passes:
    """Passes over the data of a `Scoring` with the values that are in a session.

    Args:
      scoring: of the session's graph.
      session: its graph may be finalised.
    """

    def __init__(self, scoring: Scoring, session: tf.Session):
        self._scoring, self._session = scoring, session
        sums = {name: metric.sums for name, metric in scoring.metrics.items()}
        self._fetches = (scoring.input.examples, sums, [mark.advance for mark in scoring.marks])
        session.run(scoring.tables)
        self._step = session.make_callable(self._fetches)

    def sums(
        self, step: int, stop: threading.Event, watch: watchdog.Watchdog, *, part: int = 0, yielder: pace.Yielder | None = None
    ) -> Sums | None:
        """What adds up over the dataset, or a part of it; None if `stop` was set.

        Args:
          step: that the values are of.
          stop: ends it after the batch in flight.
          watch: is told of each batch.
          part: which one, where the dataset is split.
          yielder: waits before each batch, for a training that must not become slow.
        """
        start = time.monotonic()
        watch.enter(watchdog.Part.PASS, step)
        self._session.run(self._scoring.anew)
        self._session.run(self._scoring.input.initializer, {self._scoring.part: part})
        examples, totals = 0, None
        if yielder is not None:
            yielder.begin()
        while (made := self._next(stop, watch, yielder, examples)) is not None:
            examples += int(made[0])
            totals = _added(totals, made[1])
        watch.enter(watchdog.Part.IDLE)
        return None if stop.is_set() else Sums(examples, totals, time.monotonic() - start)

    def values(self, step: int, made: Sums) -> dict[str, Any]:
        """The scores of a step, from the sums over the whole dataset.

        Raises:
          RuntimeError: the pass had other examples than the dataset says it has.
          ValueError: it had none.
        """
        _check_count(made.examples, self._scoring.input.epoch_examples)
        values = {name: _plain(value) for name, value in metrics.results(self._scoring.metrics, made.totals).items()}
        return {'step': step, 'examples': made.examples, **values}

    def _next(self, stop: threading.Event, watch: watchdog.Watchdog, yielder: pace.Yielder | None, examples: int) -> Any:
        """As `_batch`, when it is time for it; None if `stop` was set."""
        if yielder is not None:
            watch.enter(watchdog.Part.IDLE)
            yielder.between(stop)
        return None if stop.is_set() else self._batch(watch, examples)

    def _batch(self, watch: watchdog.Watchdog, examples: int) -> tuple[Any, Mapping[str, Any]] | None:
        """The sums of the next batch, behind so many examples; None at the input's own end."""
        watch.step_begins(watchdog.Part.BATCH)
        graph = self._session.graph
        try:
            made = self._step()
            watch.step_ends()
            return made
        except tf.errors.OutOfRangeError as error:
            read, is_whole = self._scoring.input, examples == self._scoring.input.epoch_examples  # an iterator of the model may end too
            if ending.is_end(error, self._session, read.ended) or (is_whole and errors.says_end(error)):
                return None
            raise errors.located(error, graph) from error
        except tf.errors.OpError as error:
            if exhausted.is_one(error):
                raise exhausted.explained(error, graph, self._again, session='evaluator', lower=('--eval_batch_size',)) from error
            raise errors.located(error, graph) from error

    def _again(self, options: tf.RunOptions) -> Any:
        return self._session.run(self._fetches, options=options)


def _made(output: structs.TowerOutput) -> list[tf.Tensor | None]:
    """What a tower makes last."""
    return [output.output.loss, *(part for metric in output.metrics.values() for part in metric.sums)]


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
