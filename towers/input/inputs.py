"""Datasets of single examples become one global batch a step, split over the towers on the host.

A batch never crosses the end of an epoch. The split is made in the graph, so the input's position does not depend on
the number of towers; `sharded` pipelines slice inside tf.data instead, off the step's path, and read N times as much.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import config, structs
from towers.input import cutting, passes, positions, single, splitting

_nest = tf.nest
SCOPE = 'input/'  # entered again by each part
_ON_DEVICE = 2  # parts of batches that wait on a tower's device: one to be taken, one on its way


@dataclasses.dataclass(frozen=True)
class Source:
    """A user's dataset in the current graph.

    Attributes:
      passes: over single examples of any structure.
      size: examples in one pass; None = unknown or endless.
      endless: whether a pass never ends.
    """

    passes: passes.Passes
    size: int | None
    endless: bool


def open_source(dataset: structs.Dataset, *, host: str, proto: tf.ConfigProto | None = None, target: str = '') -> Source:
    """Makes the user's dataset in the current graph and asks for its size.

    Args:
      dataset: zero-argument function that returns a tf.data.Dataset of single examples.
      host: device string of the CPU that reads it.
      proto: options of the session that asks; the master session's own, since a process keeps the first ones.
      target: of the server that asks; empty = this process alone.

    Raises:
      ValueError: `dataset` does not return a dataset of single examples, or an empty one.
    """
    with tf.device(host), tf.name_scope(SCOPE):
        made = dataset()
        if not isinstance(made, tf.compat.v2.data.Dataset):
            raise ValueError(f'A dataset function must return a tf.data.Dataset of single examples, got {type(made).__name__}.')
        single.require(made)
        source = passes.of(made)
        cardinality = tf.data.experimental.cardinality(source.make())
    graph = tf.get_default_graph()
    with tf.Session(target, graph=graph, config=proto) as session:
        size = int(session.run(cardinality))
    if size == 0:
        raise ValueError('The dataset has no examples; expected at least one. Check its files and filters.')
    endless = size == tf.data.experimental.INFINITE_CARDINALITY
    return Source(source, size if size > 0 else None, endless)


def training(source: Source, section: config.InputConfig, towers: Sequence[structs.Tower]) -> structs.Input:
    """The training input: repeated, batched within epochs, split and prefetched; never shuffled here.

    Raises:
      ValueError: the global batch is smaller than the number of towers, or epochs are asked of an endless dataset.
    """
    size = section.examples_per_step(len(towers))
    if source.endless and section.train_epochs is not None:
        raise ValueError(f'--train_epochs={section.train_epochs} needs a dataset that ends, got an endless one; give --train_steps.')
    whole = source.endless or (source.size is not None and source.size % size == 0)
    sharded = section.input_pipeline == 'sharded'
    with tf.device(towers[0].host), tf.name_scope(SCOPE):
        in_batches = functools.partial(batched, size=size, drop_remainder=whole)
        first = tf.placeholder_with_default(tf.constant(0, tf.int64), [], name='first_pass')
        may_be_empty = source.size is None and not source.endless
        repeated = functools.partial(passes.Passes.repeated, first=first, may_be_empty=may_be_empty)
        dataset = repeated(source.passes, in_batches, section.train_epochs)

        def on(tower: structs.Tower) -> tf.data.Dataset:
            if tower is towers[0]:
                return dataset
            return repeated(source.passes.again(here=tower.host == towers[0].host), in_batches, section.train_epochs)

        pipelines = functools.partial(_sharded, ahead=section.prefetch_to_device) if sharded else _global
        made, place = pipelines(on, section.prefetch, towers)
        if source.endless or section.train_epochs is None:
            made = dataclasses.replace(made, ended=())
    with tf.name_scope(SCOPE):
        # Beside the variables, which may be another machine's.
        made = positions.counted(made, place, lambda wanted: ({first: wanted[0]}, (wanted[0], 0)))
        if (doubtful := passes.unsure(source.passes.dataset)) is not None:
            made = positions.without_state(made, doubtful)
    if not section.exact_resume:
        made = dataclasses.replace(made, position=None, restore_position=None, taken=None, go_to=None)
    # Two inputs with equal facts give the same batches; the number of towers matters only where each has a pipeline.
    form = (*source.passes.kinds, repr(dataset.element_spec))
    facts = (form, source.size, size, section.train_epochs is None)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    fingerprint = f'{digest}/{f"sharded-{len(towers)}" if sharded else "global"}'
    return dataclasses.replace(made, fingerprint=fingerprint, epoch_examples=source.size)


def evaluation(
    source: Source, batch_size: int, towers: Sequence[structs.Tower], *, part: tuple[int, tf.Tensor] | None = None
) -> structs.Input:
    """One pass over the dataset in global batches of `batch_size` for each tower; the last may be smaller.

    Args:
      source: the dataset.
      batch_size: examples for each tower.
      towers: where they go.
      part: number of parts, and an int64 scalar that says which one is read: every so many-th example. None = all.
    """
    if source.endless:
        raise ValueError('Evaluation needs a dataset that ends, got an endless one; use take(n).')
    size = batch_size * len(towers)
    whole = part is None and source.size is not None and source.size % size == 0
    with tf.device(towers[0].host), tf.name_scope(SCOPE):
        # In parts the order must be that of all who read the others.
        examples = source.passes.make() if part is None else cutting.part(source.passes, *part).make(tf.zeros([], tf.int64))
        batches = batched(examples, size, drop_remainder=whole)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(1, tf.int64.max), batches))
        made = _global(lambda tower: numbered, None, towers, saved=False)[0]
    return dataclasses.replace(made, epoch_examples=source.size)


def batched(dataset: tf.data.Dataset, size: int, *, drop_remainder: bool) -> tf.data.Dataset:
    """Batches of examples, padded where their sizes are open.

    Raises:
      ValueError: examples have no known number of axes.
    """
    shapes = [spec.shape for spec in _nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    if any(shape.rank is None for shape in shapes):
        raise ValueError(f'Examples need a known number of axes, got {dataset.element_spec}; give it with tf.ensure_shape in the dataset.')
    if any(not shape.is_fully_defined() for shape in shapes):
        return dataset.padded_batch(size, drop_remainder=drop_remainder)
    return dataset.batch(size, drop_remainder=drop_remainder)


def prefetched(dataset: tf.data.Dataset, prefetch: int | None) -> tf.data.Dataset:
    """The dataset in its order, read so many elements ahead; None = as tf.data chooses."""
    options = tf.data.Options()
    options.deterministic = True
    ahead = tf.data.AUTOTUNE if prefetch is None else prefetch
    return dataset.prefetch(ahead).with_options(options) if ahead else dataset.with_options(options)


def _global(
    on: Callable[[structs.Tower], tf.data.Dataset], prefetch: int | None, towers: Sequence[structs.Tower], *, saved: bool = True
) -> tuple[structs.Input, tf.Tensor]:
    """The same batches on each machine, of which its towers take their rows; a position is right for all of them."""
    iterators, places, totals = [], [], []
    batches: list[structs.TowerBatch] = []
    hosts = {tower.host: tower for tower in reversed(towers)}  # each with its first tower
    for host, first in reversed(hosts.items()):
        with tf.device(host):
            iterator = tf.data.make_initializable_iterator(prefetched(on(first), prefetch))
            place, features = iterator.get_next() if len(hosts) > 1 else _next(iterator)
            own, examples = splitting.split(features, towers, host)
        iterators.append(iterator)
        places.append(place)
        batches.extend(own)
        totals.append(examples)
    position = positions.make(iterators, same=True) if saved else (None, None)
    return _input(iterators, batches, totals[0], position), _of_all(places)


def _input(
    iterators: Sequence[tf.data.Iterator],
    batches: Sequence[structs.TowerBatch],
    examples: tf.Tensor,
    position: tuple[tf.Tensor, Callable[[tf.Tensor], tf.Operation]] | tuple[None, None],
) -> structs.Input:
    """What iterators give the towers; `position` is what saves where they are, and what restores it."""
    return structs.Input(
        batches=tuple(batches),
        examples=examples,
        initializer=tf.group(*[iterator.initializer for iterator in iterators]),
        ended=asked(iterators),
        position=position[0],
        restore_position=position[1],
        fingerprint='',
    )


def asked(iterators: Sequence[tf.data.Iterator]) -> tuple[tf.Tensor, ...]:
    """For each iterator a bool scalar that asks it, in the session, whether it is at its end."""
    made = []
    for iterator in iterators:
        with tf.device(iterator.initializer.device):
            made.append(tf.logical_not(iterator.get_next_as_optional().has_value()))
    return tuple(made)


def _next(iterator: tf.data.Iterator) -> Any:
    """The next element, waited for by the thread that runs the step: `get_next` hands it to another one and back, some 20 us.

    What makes the data has threads of its own, so it can't want for this one.
    """
    parts = _nest.flatten(iterator.element_spec)
    if not all(isinstance(part, tf.TensorSpec) for part in parts):
        return iterator.get_next()
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=iterator.initializer.inputs[1], output_types=[part.dtype for part in parts], output_shapes=[part.shape for part in parts]
    )
    return _nest.pack_sequence_as(iterator.element_spec, tensors)


def _of_all(places: Sequence[Any]) -> tf.Tensor:
    """The first place as one tensor, once every pipeline has given its batch."""
    with tf.control_dependencies([_nest.flatten(place)[0] for place in places[1:]]):
        return tf.stack(_nest.flatten(places[0]))


def _sharded(
    on: Callable[[structs.Tower], tf.data.Dataset], prefetch: int | None, towers: Sequence[structs.Tower], *, ahead: bool
) -> tuple[structs.Input, tf.Tensor]:
    iterators, batches, totals, places = [], [], [], []
    for tower in towers:
        with tf.device(tower.host):
            dataset = on(tower)
            static = _nest.flatten(dataset.element_spec[1])[0].shape.as_list()[0]
            own = prefetched(dataset.map(passes.as_it_is(splitting.slicer(tower.index, len(towers))), num_parallel_calls=1), prefetch)
            if ahead:
                own = own.apply(tf.data.experimental.prefetch_to_device(tower.devices[0], _ON_DEVICE))
        with tf.device(tower.devices[0] if ahead else tower.host):
            iterator = tf.data.make_initializable_iterator(own)
            place, features, count, first, total = iterator.get_next()
        if static is not None:  # Known facts stay constants, as in the other pipeline.
            sizes = splitting.static_sizes(static, len(towers))
            count, first, total = (tf.constant(x, tf.int64) for x in (sizes[tower.index], sum(sizes[: tower.index]), static))
        iterators.append(iterator)
        totals.append(total)
        places.append(place)
        batches.append(structs.TowerBatch(features, count, first))
    position = (None, None) if ahead else positions.make(iterators)
    return _input(iterators, batches, totals[0], position), _of_all(places)
