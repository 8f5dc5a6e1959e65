"""A model out of training that takes examples from outside, on one tower or several: what exports and predictions are made of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs, upstream
from towers.checkpoint import leases, manifest, restore, retention
from towers.evaluators import evaluation
from towers.graph import averages, build, devices, strategies
from towers.run import process


@dataclasses.dataclass(frozen=True)
class Part:
    """One tower's copy of the model.

    Attributes:
      features: name -> placeholder [examples, ...]; those that the predictions need.
      predictions: name -> tensor whose first axis is the example.
    """

    features: Mapping[str, tf.Tensor]
    predictions: Mapping[str, tf.Tensor]


class Inference:
    """The graph of a model out of training, one part for each tower.

    Args:
      model: `model(batch, *, training) -> ModelOutput` with predictions.
      dataset: whose single examples have the features that the model takes.
      config: `seed` and `use_ema` are used.
      section: devices and threads.

    Raises:
      ValueError: the model returns no predictions, or takes what can't be given from outside.
    """

    def __init__(self, model: structs.Model, dataset: structs.Dataset, config: config_lib.Config, section: config_lib.DeviceConfig) -> None:
        self.placement = devices.place(section)
        self.proto = process.claim(section, self.placement)
        self.graph = tf.Graph()
        device = self.placement.parameter_device
        with self.graph.as_default(), tf.device(device):
            tf.train.get_or_create_global_step()  # a model may ask for it, as in training
            spec = _spec(dataset)
            source = _source(spec, self.placement.towers)
            outputs = build.inference(
                model, source, self.placement.towers, scope=strategies.parameter_server(parameter_device=device, seed=config.seed).scope
            )
            self.parts = [_part(output, batch) for output, batch in zip(outputs, source.batches, strict=True)]
            self._restorer = restore.Restorer(averages.restored(tf.global_variables(), averaged=config.use_ema))
            self._init = tf.group(tf.tables_initializer(), tf.local_variables_initializer())

    def load(self, session: tf.Session, model_dir: str, found: manifest.Checkpoint) -> None:
        """Sets the variables from a checkpoint, which stays in its run directory until they are."""
        with leases.Lease(model_dir, 'inference') as lease:
            lease.narrow(found.step)
            session.run(self._init)
            self._restorer.restore(session, found)

    def run(self, session: tf.Session, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Predictions of some examples, in their order, spread over the towers.

        Args:
          session: with the variables set.
          features: name -> [examples, ...]; all that the parts need.

        Raises:
          ValueError: a feature is missing.
        """
        missing = sorted(set(self.parts[0].features) - set(features))
        if missing:
            raise ValueError(f'The model needs {", ".join(self.parts[0].features)}, got no {", ".join(missing)}; give all of them.')
        count = min(len(values) for values in features.values())
        bounds = np.linspace(0, count, len(self.parts) + 1).astype(int)
        busy = [(part, low, high) for part, low, high in zip(self.parts, bounds, bounds[1:], strict=False) if high > low]
        feeds = {holder: features[name][low:high] for part, low, high in busy for name, holder in part.features.items()}
        made = session.run([dict(part.predictions) for part, _, _ in busy], feeds)
        return {name: np.concatenate([each[name] for each in made]) for name in self.parts[0].predictions}


def checkpoint(config: config_lib.Config, wanted: str | int | None) -> manifest.Checkpoint:
    """A checkpoint of `config.model_dir`.

    Args:
      config: `model_dir`, and `keep_best`, the metric of the best one.
      wanted: None or 'final' = the newest whole one; 'best'; a step; or a prefix.

    Raises:
      ValueError: there is none.
    """
    model_dir = evaluation.run_directory(config)
    if wanted not in (None, 'final', 'best'):
        return evaluation.find(model_dir, wanted or '')
    newest = manifest.newest(model_dir)
    if newest is None:
        raise ValueError(f'There is no checkpoint in {model_dir}; train first, or give the --model_dir of a run.')
    if wanted != 'best':
        return newest
    return _best(model_dir, config.keep_best)


def _best(model_dir: str, metric: str | None) -> manifest.Checkpoint:
    """The best of those that are there; a WARNING tells of a better one that is gone."""
    best, ever = retention.best(model_dir, metric, manifest.all(model_dir)), retention.best(model_dir, metric)
    if best is None:
        gone = f' That of step {ever.step}, {ever.value:.6g}, is gone.' if ever else ''
        raise ValueError(f'No best checkpoint is known in {model_dir} by --keep_best={metric}; evaluate, and name its metric.{gone}')
    if ever is not None and ever.rank > best.rank:
        text = 'The best checkpoint by %s, of step %d with %.6g, is gone; taking that of step %d with %.6g. Train with --keep_best=%s.'
        logging.warning(text, metric, ever.step, ever.value, best.step, best.value, metric)
    return evaluation.find(model_dir, best.step)


def named(structure: Any, alone: str) -> dict[str, Any]:
    """The leaves of a structure by name: keys and places joined by '_', `alone` for one that is the whole of it."""
    if not isinstance(structure, Mapping | tuple | list):
        return {alone: structure}
    items = structure.items() if isinstance(structure, Mapping) else enumerate(structure)
    return {f'{key}{rest}': leaf for key, inner in items for rest, leaf in _suffixed(inner).items()}


def _suffixed(structure: Any) -> dict[str, Any]:
    return {f'_{name}' if name else '': leaf for name, leaf in named(structure, '').items()}


def _spec(dataset: structs.Dataset) -> Any:
    with tf.Graph().as_default():
        spec = dataset().element_spec
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            raise ValueError(f'Examples from outside are dense tensors, the dataset gives {leaf}; make it dense in the model instead.')
    return spec


def _source(spec: Any, towers: Sequence[structs.Tower]) -> structs.Input:
    batches = []
    for tower in towers:
        with tf.device(tower.host), tf.name_scope(f'input_{tower.index}/'):
            features = tf.nest.map_structure(lambda leaf: tf.placeholder(leaf.dtype, [None, *leaf.shape]), spec)
            examples = tf.shape(tf.nest.flatten(features)[0], out_type=tf.int64)[0]
            batches.append(structs.TowerBatch(features, examples, tf.zeros([], tf.int64)))
    return structs.Input(
        tuple(batches),
        examples=tf.add_n([batch.examples for batch in batches]),
        initializer=tf.no_op(),
        ended=(),
        position=None,
        restore_position=None,
        fingerprint='',
    )


def _part(output: structs.TowerOutput, batch: structs.TowerBatch) -> Part:
    predictions = named(output.output.predictions, 'prediction') if output.output.predictions is not None else {}
    if not predictions:
        raise ValueError('The model returns no predictions, so there is nothing to export; give ModelOutput predictions=.')
    needed = upstream.of([tensor.op for tensor in predictions.values()])
    features = {name: holder for name, holder in named(batch.features, 'example').items() if holder.op.name in needed}
    return Part(features, predictions)
