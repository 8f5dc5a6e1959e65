"""Each tower's copy of the model, and what was recorded while it was built.

This is the one place where TensorFlow's ambient state (collections, name scopes, graph seeds) is read; from here on
it travels in fields. Nothing is found by parsing a name, so tower 1 never matches tower 10.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow.compat.v1 as tf

from towers import metrics, randomness, structs, transfers
from towers.graph import gradients, writes

_PER_TOWER = (tf.GraphKeys.LOSSES, tf.GraphKeys.UPDATE_OPS, tf.GraphKeys.SUMMARIES, tf.GraphKeys.REGULARIZATION_LOSSES)

Scope = Callable[[structs.Tower], AbstractContextManager[Any]]


def training(
    model: structs.Model,
    source: structs.Input,
    towers: Sequence[structs.Tower],
    *,
    scope: Scope,
    draws: Callable[[tf.Tensor], randomness.Draws],
) -> tuple[structs.TowerOutput, ...]:
    """Builds the model in training on every tower, with its gradients.

    Args:
      model: `model(batch, *, training) -> ModelOutput`.
      source: the input whose batches feed the towers.
      towers: where the copies run, tower 0 first.
      scope: the strategy's context for one tower; its value says what the tower has in place of the canonical variables.
      draws: from the index of a tower's first example to the source of its random draws.

    Raises:
      ValueError: the model returns no loss, makes variables that towers can't share, or hides a write.
    """
    shared: list[tf.Tensor] = tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
    outputs: list[structs.TowerOutput] = []
    slopes: list[gradients.Slopes] = []
    with _seed_kept():
        for tower, batch in zip(towers, source.batches, strict=True):
            with _tower(tower, scope, shared) as own, randomness.drawing(draws(batch.first)):
                tf.set_random_seed(randomness.fold(draws(batch.first).seed, 'tower', tower.index))
                output = _checked(model(_brought(batch.features, tower), training=True))
                _refuse_streaming(output)
                canonical = outputs[0].variables if outputs else tuple(map(own.variable, tf.trainable_variables()))
                made, slope = _record(tower, output, source, shared, (canonical, own))
                outputs.append(made)
                slopes.append(slope)
        with tf.name_scope('shared_penalties'):
            first = gradients.through_penalties(slopes, shared, outputs[0])
        outputs[0] = dataclasses.replace(outputs[0], gradients=first)
    _require_gradients(outputs)
    return tuple(outputs)


def survey(
    model: structs.Model,
    source: structs.Input,
    tower: structs.Tower,
    *,
    scope: Scope,
    draws: Callable[[tf.Tensor], randomness.Draws],
) -> None:
    """Builds the model in training for its variables alone, so that all it reads of them is known when the first tower is built.

    Its variables stay, and the penalties that `get_variable` made, where `training` finds them. All else is in no collection,
    and nothing that runs depends on it.

    Args:
      model: as in `training`.
      source: as in `training`.
      tower: the first one.
      scope: as in `training`; it gets a tower that `is_survey`.
      draws: as in `training`.
    """
    shared: list[tf.Tensor] = []
    batch, tower = source.batches[0], dataclasses.replace(tower, is_survey=True)
    with _seed_kept(), _variables_kept():
        with _tower(tower, scope, shared), randomness.drawing(draws(batch.first)):
            tf.set_random_seed(randomness.fold(draws(batch.first).seed, 'tower', tower.index))
            model(_brought(batch.features, tower), training=True)
    tf.get_default_graph().get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)[:] = shared


def inference(
    model: structs.Model, source: structs.Input, towers: Sequence[structs.Tower], *, scope: Scope
) -> tuple[structs.TowerOutput, ...]:
    """Builds the model out of training on every tower, with metrics and predictions and no gradients."""
    outputs = []
    shared: list[tf.Tensor] = []
    for tower, batch in zip(towers, source.batches, strict=True):
        with _tower(tower, scope, shared):
            output = _checked(model(batch.features, training=False), loss=False)
            _refuse_streaming(output)
            outputs.append(_recorded(tower, output, batch, _weight(output, batch.examples)))
    return tuple(outputs)


@contextlib.contextmanager
def _tower(tower: structs.Tower, scope: Scope, shared: list[tf.Tensor]) -> Iterator[Any]:
    """Devices, names and collections of one tower: the model finds what a one-tower program would.

    Args:
      tower: where.
      scope: the strategy's.
      shared: the penalties that `get_variable` made for the towers before, to which this one's are added.
    """
    graph = tf.get_default_graph()
    first = {key: list(graph.get_collection_ref(key)) for key in _PER_TOWER}
    for key in _PER_TOWER:
        graph.get_collection_ref(key)[:] = []
    regularisation = graph.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
    regularisation[:] = shared

    def get(getter: Callable[..., tf.Variable], *args: Any, **kwargs: Any) -> tf.Variable:
        before = len(regularisation)
        variable = getter(*args, **kwargs)
        regularisation[before:] = [tf.convert_to_tensor(penalty) for penalty in regularisation[before:]]
        shared.extend(regularisation[before:])
        return variable

    outer = graph.get_name_scope()
    with tf.name_scope(f'{outer}/{tower.scope}/' if outer else f'{tower.scope}/'), tf.device(tower.devices[0]), scope(tower) as own:
        with tf.variable_scope(tf.get_variable_scope(), custom_getter=get):
            yield own
    if tower.index:  # Hooks that look into the collections see one tower, the first.
        for key in _PER_TOWER:
            graph.get_collection_ref(key)[:] = first[key]


def _brought(features: structs.Batch, tower: structs.Tower) -> structs.Batch:
    """A tower's part of the batch, what it has on the host in one transfer."""
    host, device = transfers.name_of(tower.host), tower.devices[0]
    leaves = tf.nest.flatten(features, expand_composites=True)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.device == host]
    if transfers.are_bundled(host, device):
        with tf.name_scope(f'{tf.get_default_graph().get_name_scope()}/read/'):
            for place, value in zip(places, transfers.brought([leaves[at] for at in places], source=host, target=device), strict=True):
                leaves[place] = value
    return tf.nest.pack_sequence_as(features, leaves, expand_composites=True)


@contextlib.contextmanager
def _variables_kept() -> Iterator[None]:
    """Of what comes into collections inside, the variables stay that are found again: global ones, and all that `get_variable` made."""
    graph = tf.get_default_graph()
    before = {key: graph.get_collection(key) for key in graph.get_all_collection_keys()}
    shared: list[tf.Variable] = []

    def get(getter: Callable[..., tf.Variable], *args: Any, **kwargs: Any) -> tf.Variable:
        shared.append(getter(*args, **kwargs))
        return shared[-1]

    with tf.variable_scope(tf.get_variable_scope(), custom_getter=get):
        yield
    made = set(map(id, [*tf.global_variables(), *shared])) - set(map(id, before.get(tf.GraphKeys.GLOBAL_VARIABLES, ())))
    for key in [key for key in graph.get_all_collection_keys() if isinstance(key, str)]:  # the others are TensorFlow's own stores
        new = [item for item in graph.get_collection(key) if id(item) in made]
        graph.get_collection_ref(key)[:] = [*before.get(key, ()), *new]


@contextlib.contextmanager
def _seed_kept() -> Iterator[None]:
    graph = tf.get_default_graph()
    seed = graph.seed
    yield
    graph.seed = seed


def _checked(output: structs.ModelOutput, *, loss: bool = True) -> structs.ModelOutput:
    if not isinstance(output, structs.ModelOutput):
        raise ValueError(f'A model must return a towers.ModelOutput, got {type(output).__name__}; wrap the loss: ModelOutput(loss).')
    if output.objectives:
        if output.loss is not None:
            raise ValueError('A model returns a loss or objectives, got both; leave ModelOutput.loss out.')
        return dataclasses.replace(output, loss=tf.add_n([tf.cast(o.loss, tf.float32) for o in output.objectives]))
    if output.loss is None:
        if loss:
            raise ValueError('A model in training must return a loss, got None; give ModelOutput(loss=...).')
        return output
    value = tf.convert_to_tensor(output.loss)
    if value.shape.rank != 0:
        raise ValueError(f'The loss must be a scalar mean over the examples, got shape {value.shape}; use tf.reduce_mean.')
    return dataclasses.replace(output, loss=value)


def _refuse_streaming(output: structs.ModelOutput) -> None:
    """Metrics of `tf.metrics` count by themselves in variables of their own, and their (value, update) looks like (value, weight)."""
    made = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
    if not made:
        return
    handles = {variable.handle.op for variable in made}
    ops = {name: [t.op for t in tf.nest.flatten(metric) if isinstance(t, tf.Tensor)] for name, metric in output.metrics.items()}
    names = [name for name, found in ops.items() if handles & writes.ancestors(found)]
    what = f'The metric {", ".join(map(repr, names))}' if names else 'The model'
    raise ValueError(
        f'{what} uses tf.metrics, which counts in variables of its own ({made[0].op.name}) and adds up over no towers; '
        'give a metric of this batch alone: towers.accuracy(labels, logits), towers.mean(values), or a pair (value, weight).'
    )


def _weight(output: structs.ModelOutput, examples: tf.Tensor) -> tf.Tensor:
    weight = examples if output.weight is None else output.weight
    return tf.cast(weight, tf.float32)


def _record(
    tower: structs.Tower,
    output: structs.ModelOutput,
    source: structs.Input,
    shared: Sequence[tf.Tensor],
    trained: tuple[tuple[tf.Variable, ...], gradients.Own],
) -> tuple[structs.TowerOutput, gradients.Slopes]:
    """Everything of one tower in training, `trained` being the canonical variables and what it has for them; called inside its scopes."""
    canonical, own = trained
    variables = tuple(map(own.variable, canonical))
    batch = source.batches[tower.index]
    loss: Any = output.loss
    seen = writes.ancestors([loss.op])
    state = writes.read(tf.get_collection(tf.GraphKeys.UPDATE_OPS), seen)
    output, outside = _penalties(output, seen, batch)
    count = _weight(output, batch.examples)
    if output.weight is not None:
        weight = tf.math.multiply_no_nan(count, tf.cast(batch.examples > 0, tf.float32))
    else:  # A share of the whole batch, so that the sum needs no division afterwards.
        weight = transfers.share(count, source.examples)
    with tf.name_scope('gradients'):
        slopes = gradients.of(output, variables, weight, shared=shared, read=own.read)
    made = _recorded(tower, output, batch, count)
    made = dataclasses.replace(made, weight=weight, gradients=slopes.variables, variables=variables, state=state, penalties=outside)
    return made, slopes


def _recorded(tower: structs.Tower, output: structs.ModelOutput, batch: structs.TowerBatch, count: tf.Tensor) -> structs.TowerOutput:
    """What inference and training have in common."""
    resolved = {name: metrics.resolve(name, metric, count) for name, metric in output.metrics.items()}
    if tf.get_static_value(batch.examples) is None:
        resolved = {name: _unless_empty(metric, batch.examples) for name, metric in resolved.items()}
    loss = None if output.loss is None else tf.cast(output.loss, tf.float32)
    return structs.TowerOutput(
        tower=tower,
        output=dataclasses.replace(output, loss=loss),
        examples=batch.examples,
        weight=count,
        gradients=(),
        variables=(),
        state=(),
        penalties=(),
        metrics=resolved,
        summaries=tuple(tf.get_collection(tf.GraphKeys.SUMMARIES)),
    )


def _unless_empty(metric: structs.Metric, examples: tf.Tensor) -> structs.Metric:
    """The metric of a tower whose only row is a stand-in adds nothing."""
    return structs.Metric(tuple(tf.where(examples > 0, s, tf.zeros_like(s)) for s in metric.sums), metric.result)


def _penalties(
    output: structs.ModelOutput, seen: set[tf.Operation], batch: structs.TowerBatch
) -> tuple[structs.ModelOutput, tuple[tf.Tensor, ...]]:
    """Penalties that the loss does not contain; one that depends on the batch joins the tower's loss instead."""
    data = {leaf.op for leaf in tf.nest.flatten(batch.features, expand_composites=True)}
    loss: Any = output.loss
    outside = []
    for penalty in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES):
        if penalty.op in seen:
            continue
        if data & writes.ancestors([penalty.op]):
            if output.objectives:
                raise ValueError(
                    f'The penalty {penalty.op.name!r} depends on the batch and could be of any objective; add it to the loss of one.'
                )
            loss = loss + tf.cast(penalty, loss.dtype)
        else:
            outside.append(penalty)
    return dataclasses.replace(output, loss=loss), tuple(outside)


def _require_gradients(outputs: Sequence[structs.TowerOutput]) -> None:
    first = outputs[0]
    if not first.variables:
        raise ValueError('The model made no trainable variable; expected at least one tf.get_variable(..., trainable=True).')
    if all(g is None for output in outputs for g in output.gradients):
        loss: Any = first.output.loss
        raise ValueError(f'No gradient of the loss {loss.op.name!r} reaches a trainable variable; it must depend on one.')
