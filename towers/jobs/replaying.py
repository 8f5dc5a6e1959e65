"""A bad step made again from its bundle, on one tower, and the first operation whose result was not finite."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import errors, structs, upstream
from towers.checkpoint import manifest, restore
from towers.graph import chain, devices, train_step
from towers.jobs import program
from towers.run import bundle as bundle_lib
from towers.run import flight, process

_CONCISE_HEALTH = 3  # tensor_debug_mode: (id, size, number of -inf, of inf, of nan)
_FLOATS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


@dataclasses.dataclass(frozen=True)
class Fault:
    """An operation whose result is not finite.

    Attributes:
      name: of the operation in the graph of one tower.
      type: its kind, such as 'Log'.
      line: the user's line that made it, or the one that it is in the gradient of; None where the graph doesn't know.
      forward: the operation in whose gradient it is; None where it is in the model itself.
      outputs: what its results hold, in words.
      inputs: what it was given, in words.
    """

    name: str
    type: str
    line: str | None
    forward: str | None
    outputs: Sequence[str]
    inputs: Sequence[str]

    def rows(self) -> dict[str, str]:
        """The same for a table, without what isn't known."""
        rows = {'operation': f'{self.name} ({self.type})', 'gradient of': self.forward, 'made at': self.line}
        rows.update({f'input {place}': text for place, text in enumerate(self.inputs)})
        rows.update({'result': '; '.join(self.outputs)})
        return {name: text for name, text in rows.items() if text}


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came of a step made again.

    Attributes:
      step: its number.
      tower: whose inputs it was made with.
      loss: of this tower, without the penalty.
      first: the first operation, in the order of the graph, that was not finite and spoiled the loss or a gradient; None
        where all is finite this time, as after random draws that the step doesn't repeat.
      first_nan: the first of them with a result that is no number; None where infinities are all.
      facts: what the training found, in words.
      draws: TensorFlow's own random operations that the step depends on, which draw anew, with the lines that made them.
      bad_tower: the first that was bad by itself in the training; None where it came about between the towers.
    """

    step: int
    tower: int
    loss: float
    first: Fault | None
    first_nan: Fault | None
    facts: Sequence[str] = ()
    draws: Sequence[str] = ()
    bad_tower: int | None = None

    def why_finite(self) -> str:
        """Why the fault of the training is not there again, in a few sentences."""
        reasons = []
        if self.draws:
            reasons.append(
                f'The step depends on {len(self.draws)} random operations of TensorFlow itself, which draw anew ({self.draws[0]}); '
                'towers.dropout and towers.random_uniform draw the same again.'
            )
        if self.bad_tower not in (None, self.tower):
            reasons.append(f'It was tower {self.bad_tower} that was bad, and this is tower {self.tower}.')
        elif self.bad_tower is None:
            reasons.append('No tower was bad by itself: it came about in their sum, or in what is made of it, and one tower has none.')
        if not reasons:
            reasons.append('Model, data or TensorFlow are not those of the training, or another device rounds otherwise.')
        found = '; '.join(self.facts) or 'that the step was not finite'
        return f'Not reproduced: all is finite this time, where the training found: {found}. {" ".join(reasons)}'


def replay(model: structs.Model, dataset: structs.Dataset, bundle: str, *, tower: int | None = None, device: str | None = None) -> Replay:
    """Makes the step of a bundle again on one tower, changing nothing.

    Args:
      model: the one that was trained.
      dataset: the one that was trained on; only the structure of its elements is looked at.
      bundle: folder that the training named.
      tower: whose inputs to take; the first bad one's if not given.
      device: 'cpu', 'gpu' or 'auto'; as in the training if not given.

    Raises:
      ValueError: the folder holds no bundle, or one of another model, dataset or number of towers.
    """
    found = bundle_lib.read(bundle)
    tower = found.tower or 0 if tower is None else tower
    if not 0 <= tower < len(found.towers):
        raise ValueError(f'{bundle} has towers 0 to {len(found.towers) - 1}, got tower {tower}; give one of them.')
    config = _config(found, device)
    placement = devices.place(config)
    proto = process.claim(config, placement)
    proto.graph_options.rewrite_options.disable_meta_optimizer = True  # each operation as it was written
    with tf.Graph().as_default(), tf.device(placement.parameter_device):
        tf.set_random_seed(config.seed)
        count = train_step.counters(placement.parameter_device)
        source, feeds = _source(dataset, found, tower, placement.towers[0].host)
        _, made = program.compute(model, config, source, placement, count.step)
        health = _Health(made, feeds)
        restorer = restore.Restorer({variable.op.name: variable for variable in tf.global_variables()})
        with tf.Session(config=proto) as session:
            session.run(tf.local_variables_initializer())
            restorer.restore(session, _checkpoint(found))
            seen = health.look(session)
            return Replay(found.step, tower, *seen, tuple(found.facts), health.draws, found.tower)


class _Health:
    """Looks at every number that a loss and its gradients are made of, in one run.

    Args:
      made: the step; its graph is complete but for what this adds.
      feeds: placeholder's name -> value.
    """

    def __init__(self, made: program.Computed, feeds: Mapping[str, Any]) -> None:
        own = made.outputs[0].output.loss
        assert own is not None
        whole = chain.with_penalty(made.total.loss, made.penalty)
        graph = own.graph
        self._loss, self._feeds = own, feeds
        self._order = {op.name: place for place, op in enumerate(graph.get_operations())}
        self._last_forward = self._order[own.op.name]
        # What is outside a user's model was made on behalf of the line that asked for all this.
        self._outside = errors.source_line(whole.op)
        gradients = tf.nest.flatten([gradient for gradient in made.total.gradients if gradient is not None], expand_composites=True)
        results = [own, whole, *gradients, *[write.value for write in made.total.state]]
        self._results = [tensor for tensor in results if tensor.dtype in _FLOATS]
        needed = upstream.of([tensor.op for tensor in results]).values()
        self.draws = tuple(f'{op.name} made at {errors.source_line(op) or "an unknown line"}' for op in needed if _draws_anew(op))
        outputs = [tensor for op in needed for tensor in op.outputs]
        self._tensors = [tensor for tensor in outputs if tensor.dtype in _FLOATS and graph.is_fetchable(tensor)]
        with tf.name_scope('health'):
            self._counts = tf.stack([_count(tensor) for tensor in self._tensors])

    def look(self, session: tf.Session) -> tuple[float, Fault | None, Fault | None]:
        """The loss, and the first operations that are not finite, and that hold what is no number."""
        loss, counts = session.run([self._loss, self._counts], self._feeds)
        bad = {tensor.name: row for tensor, row in zip(self._tensors, counts, strict=True) if row[2:].any()}
        guilty = sorted(_behind([t for t in self._results if t.name in bad], bad), key=lambda op: self._order[op.name])
        nans = [op for op in guilty if any(bad[t.name][4] for t in op.outputs if t.name in bad)]
        first, first_nan = [self._fault(ops[0], session) if ops else None for ops in (guilty, nans)]
        return float(loss), first, first_nan

    def _fault(self, op: tf.Operation, session: tf.Session) -> Fault:
        forward = self._forward(op)
        line = errors.source_line(forward or op)
        known = [tensor for tensor in (*op.outputs, *op.inputs) if tensor.dtype.is_numpy_compatible and tensor.dtype != tf.string]
        values = session.run({tensor.name: tensor for tensor in known if tensor.graph.is_fetchable(tensor)}, self._feeds)
        return Fault(
            name=op.name,
            type=op.type,
            line=None if line == self._outside else line,
            forward=None if forward is None else forward.name,
            outputs=tuple(problem for t in op.outputs if t.name in values and (problem := flight.not_finite(values[t.name]))),
            inputs=tuple(f'{t.op.name}: {_range(values[t.name])}' for t in op.inputs if t.name in values),
        )

    def _forward(self, op: tf.Operation) -> tf.Operation | None:
        """The operation whose gradient `op` belongs to; TensorFlow puts the two on one device, and says so in the graph."""
        if self._order[op.name] <= self._last_forward:
            return None
        names = [group.decode().removeprefix('loc:@') for group in op.colocation_groups()]
        made = [name for name in names if self._order.get(name, self._last_forward + 1) <= self._last_forward]
        return op.graph.get_operation_by_name(made[0]) if made else None


def _config(found: bundle_lib.Bundle, device: str | None) -> config_lib.Config:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.config.items()}
    one: dict[str, Any] = {'num_gpus': 1, 'batch_size': None, 'global_batch_size': None, 'device': device or fields.get('device', 'auto')}
    if device == 'cpu':  # in the place of GPUs, whose options mean nothing there
        one.update({name: getattr(config_lib.Config, name) for name in config_lib.GPUS_ALONE})
    try:
        return config_lib.Config(**{**fields, **one})
    except TypeError as error:
        raise ValueError(f'{found.folder} was written by another version ({error}); replay it with that one.') from None


def _source(dataset: structs.Dataset, found: bundle_lib.Bundle, tower: int, host: str) -> tuple[structs.Input, dict[str, Any]]:
    """An input of placeholders for one tower's batch, and what to feed to them."""
    values = found.values(flight.BATCH)
    with tf.device(host), tf.name_scope('batch/'):
        spec = dataset().batch(1).element_spec
        parts = list(flight.leaves(spec))
        recorded = [tf.as_dtype(leaf['dtype']) for leaf in found.towers[tower]]
        if [part.dtype for _, part in parts] != recorded:
            raise ValueError(
                f'{found.folder} was written with inputs of types {[dtype.name for dtype in recorded]}, the dataset has '
                f'{[part.dtype.name for _, part in parts]}; give the dataset of the training.'
            )
        named = zip(parts, found.towers[tower], strict=True)
        holders = [tf.placeholder(part.dtype, leaf['shape'], name=_identifier(path)) for (path, part), leaf in named]
        examples, first = [tf.constant(values[f'{tower}/{name}'], tf.int64) for name in ('examples', 'first')]
        total = tf.constant(values['examples'], tf.int64)
        features = tf.nest.pack_sequence_as(spec, holders, expand_composites=True)
    batch = structs.TowerBatch(features, examples, first)
    none = tf.no_op()
    source = structs.Input((batch,), total, none, (), None, None, '')
    return source, {holder.name: values[f'{tower}/{place}'] for place, holder in enumerate(holders)}


def _identifier(path: str) -> str:
    return re.sub(r'[^A-Za-z0-9]+', '_', path).strip('_') or 'input'


def _checkpoint(found: bundle_lib.Bundle) -> manifest.Checkpoint:
    facts = manifest.Manifest(step=found.step, examples=0, files={})
    return manifest.Checkpoint(found.step, os.path.join(found.folder, flight.VARIABLES), facts)


def _draws_anew(op: tf.Operation) -> bool:
    return op.op_def.is_stateful and all(name in op.node_def.attr for name in ('seed', 'seed2'))


def _behind(results: Sequence[tf.Tensor], bad: Mapping[str, Any]) -> list[tf.Operation]:
    """The operations that spoiled some results, followed from input to input through what is bad itself."""
    found = upstream.of([tensor.op for tensor in results], lambda op: [tensor.op for tensor in op.inputs if tensor.name in bad])
    return list(found.values())


def _count(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.raw_ops.DebugNumericSummaryV2(input=tensor, output_dtype=tf.float64, tensor_debug_mode=_CONCISE_HEALTH)


def _range(values: Any) -> str:
    """An array's shape and the range of its finite values, in words."""
    array = np.asarray(values).astype(np.float64)
    finite = array[np.isfinite(array)]
    span = f'from {finite.min():g} to {finite.max():g}' if finite.size else 'no finite value'
    problem = flight.not_finite(array)
    return f'{list(array.shape)} {span}' + (f', {problem}' if problem else '')
