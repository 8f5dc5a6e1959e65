"""The training input in shards: each machine reads its own, and the position says of each shard how far it was read.

The shards are cut once and for all; which machine reads which is decided anew at each start, for the rest of a pass that was
under way by what is left of each shard. A machine reads its shards one after the other, so that few are ever begun and not ended.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config, structs
from towers.input import cutting, inputs, passes, positions, schedule, splitting

_nest = tf.nest


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where the input begins, fed to its initializer; at the start of the first pass if it is not.

    Attributes:
      number: int64 scalar, the pass.
      batch: int64 scalar, batches of this pass that were before.
      taken: int64 [S], examples of each shard in those.
      owner: int64 [S], machine that reads each shard in the rest of this pass.
    """

    number: tf.Tensor
    batch: tf.Tensor
    taken: tf.Tensor
    owner: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Machine:
    """The pipeline of one machine.

    Attributes:
      cut: the dataset, for this machine.
      index: 0-based number of the machine.
      spare: a shard of its own that has examples.
    """

    cut: cutting.Cut
    index: int
    spare: int


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What holds for all machines.

    Attributes:
      start: where the input begins.
      owner: the machine of each shard, in whole passes.
      size: examples of a global batch.
      seed: of the order of the shards; None = they are read in their own.
    """

    start: _Start
    owner: tuple[int, ...]
    size: int
    seed: int | None

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return max(self.owner) + 1


def training(cut: cutting.Cut, section: config.InputConfig, towers: Sequence[structs.Tower], *, seed: int) -> structs.Input:
    """The training input over the shards of a dataset, each machine's read and batched on its own CPU.

    Args:
      cut: the dataset.
      section: batch size, passes, prefetching.
      towers: where the batches go.
      seed: of the order in which shards are read, where the dataset shuffles.
    """
    size = section.examples_per_step(len(towers))
    hosts = list(dict.fromkeys(tower.host for tower in towers))
    owner = schedule.owners(cut.examples, len(hosts))
    logging.info('Of the %d shards %s.', len(owner), ', '.join(f'{owner.count(index)} go to {host}' for index, host in enumerate(hosts)))
    with tf.device(towers[0].host), tf.name_scope(inputs.SCOPE):
        layout = _Layout(_start(owner), owner, size, seed if cut.passes.seeds else None)
        iterators, found = [], []
        for index, host in enumerate(hosts):
            with tf.device(host):
                filled = [shard for shard, machine in enumerate(owner) if machine == index and cut.examples[shard]]
                machine = _Machine(cut.again(here=not index), index, filled[0])
                dataset = inputs.prefetched(_repeated(machine, layout, section.train_epochs), section.prefetch)
                iterators.append(tf.data.make_initializable_iterator(dataset))
                found.append(iterators[-1].get_next())
        made = _input(iterators, found, towers, layout, cut)
    if section.train_epochs is None:
        made = dataclasses.replace(made, ended=())
    if not section.exact_resume:
        made = dataclasses.replace(made, position=None, restore_position=None, taken=None, go_to=None)
    facts = (*cut.passes.kinds, repr(dataset.element_spec), cut.examples, size, section.train_epochs is None)
    return dataclasses.replace(made, fingerprint=f'{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}/shards')


def _start(owner: Sequence[int]) -> _Start:
    def given(value: Any, name: str) -> tf.Tensor:
        return tf.placeholder_with_default(tf.constant(value, tf.int64), [len(owner)] if isinstance(value, tuple) else [], name=name)

    nothing = (0,) * len(owner)
    return _Start(given(0, 'first_pass'), given(0, 'first_batch'), given(nothing, 'first_taken'), given(tuple(owner), 'first_owner'))


def _input(
    iterators: Sequence[tf.data.Iterator],
    found: Sequence[Any],
    towers: Sequence[structs.Tower],
    layout: _Layout,
    cut: cutting.Cut,
) -> structs.Input:
    """The towers' batches and the position, from what the machines' iterators gave."""
    batches: list[structs.TowerBatch] = []
    n = len(towers) // len(iterators)
    for machine, ((_, rows, first, _), features) in enumerate(found):
        with tf.device(towers[machine * n].host):
            own = splitting.by_number(features, rows, n, range(n))
            batches += [dataclasses.replace(batch, first=first + batch.first) for batch in own]
    places = [place for (place, _, _, _), _ in found]
    with tf.control_dependencies(places[1:]):
        place = tf.identity(places[0])
    position, restore = positions.make(iterators)
    made = structs.Input(
        batches=tuple(batches),
        examples=found[0][0][3],
        initializer=tf.group(*[iterator.initializer for iterator in iterators]),
        ended=inputs.asked(iterators),
        position=position,
        restore_position=restore,
        fingerprint='',
        epoch_examples=sum(cut.examples),
        place_only=True,
        shards=cut.examples,
    )
    return positions.counted(made, place, functools.partial(_begin, layout, cut.examples))


def _begin(layout: _Layout, examples: Sequence[int], wanted: Sequence[int]) -> tuple[dict[tf.Tensor, Any], Sequence[int]]:
    """What to feed to the initializer so that the input begins behind a place, and that place."""
    number, batch, *taken = wanted
    if len(taken) != len(examples):
        raise ValueError(f'the place has {len(taken)} shards, expected {len(examples)}')
    rest = [count - gone for count, gone in zip(examples, taken, strict=True)]
    start, owner = layout.start, schedule.owners(rest, layout.machines)
    return {start.number: number, start.batch: batch, start.taken: taken, start.owner: owner}, wanted


def _repeated(machine: _Machine, layout: _Layout, count: int | None) -> tf.data.Dataset:
    """The passes, as ((place, rows, first row in the global batch, examples in it), features) of each step."""

    @passes.as_it_is
    def one(number: tf.Tensor) -> tf.data.Dataset:
        begins = tf.equal(number, layout.start.number)
        taken = tf.where(begins, layout.start.taken, tf.zeros_like(layout.start.taken))
        owner = tf.where(begins, layout.start.owner, tf.constant(layout.owner, tf.int64))
        rest = tf.constant(machine.cut.examples, tf.int64) - taken
        made = schedule.made(rest, owner, _order(layout, number), size=layout.size, machines=layout.machines)
        batch = tf.where(begins, layout.start.batch, tf.zeros_like(layout.start.batch))
        steps = _steps(made, machine.index, tf.concat([[number, batch], taken], 0))
        return tf.data.Dataset.zip((steps, _batches(machine, made, taken, number, layout.size)))

    made = tf.data.Dataset.range(layout.start.number, tf.int64.max if count is None else count).flat_map(one)
    return made.with_options(machine.cut.passes.options)


def _order(layout: _Layout, number: tf.Tensor) -> tf.Tensor:
    shards = tf.range(len(layout.owner), dtype=tf.int64)
    if layout.seed is None:
        return shards
    key = tf.stack([tf.constant(layout.seed, tf.int64), number])
    return tf.random.experimental.index_shuffle(shards, key, tf.constant(len(layout.owner) - 1, tf.int64))


def _steps(made: schedule.Schedule, machine: int, begin: tf.Tensor) -> tf.data.Dataset:
    """(place, rows of the machine, first of them in the global batch, examples in it) for each step from the place `begin` on."""
    before, rows = made.before(), made.rows
    numbers = tf.range(1, tf.shape(rows, out_type=tf.int64)[0] + 1)
    each = (numbers, made.given, rows[:, machine], tf.reduce_sum(rows[:, :machine], 1), tf.reduce_sum(rows, 1))

    def placed(step: tf.Tensor, given: tf.Tensor, *sizes: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return begin + tf.concat([[0, step], schedule.taken(made, before, given)], 0), *sizes

    return tf.data.Dataset.from_tensor_slices(each).map(passes.as_it_is(placed))


def _batches(machine: _Machine, made: schedule.Schedule, taken: tf.Tensor, number: tf.Tensor, size: int) -> tf.data.Dataset:
    """The machine's rows of each step; where it has none, a row that stands in."""
    rows = made.rows[:, machine.index]

    @passes.as_it_is
    def shard(index: tf.Tensor) -> tf.data.Dataset:
        return machine.cut.shard(index, number).skip(tf.gather(taken, index))

    examples = tf.data.Dataset.from_tensor_slices(made.own(machine.index)).flat_map(shard)
    batches = _sized(examples, tf.boolean_mask(rows, rows > 0), size)
    first = inputs.batched(machine.cut.shard(tf.constant(machine.spare, tf.int64), number).take(1), 1, drop_remainder=False)
    spare = first.flat_map(passes.as_it_is(_for_ever(first)))
    which = tf.data.Dataset.from_tensor_slices(tf.cast(tf.equal(rows, 0), tf.int64))
    return tf.data.Dataset.choose_from_datasets([batches, spare], which)


def _for_ever(like: tf.data.Dataset) -> Any:
    """A function from an element, as a dataset of the structure `like` hands it over, to the dataset that repeats it."""
    unpacked = type(like.element_spec) is tuple
    return lambda *element: tf.data.Dataset.from_tensors(element if unpacked else element[0]).repeat()


def _sized(examples: tf.data.Dataset, sizes: tf.Tensor, most: int) -> tf.data.Dataset:
    """Batches of the given sizes (int64 [any], each above 0 and at most `most`)."""
    specs = _nest.flatten(examples.element_spec)
    if all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs):
        sizes = tf.concat([sizes, [1]], 0)  # there must be one
        return examples.batch(tf.reduce_max(sizes)).rebatch(sizes)
    # What is padded, or not dense, can't be cut once it is batched.
    steps = tf.data.Dataset.from_tensor_slices((tf.range(tf.size(sizes, out_type=tf.int64), dtype=tf.int64), sizes))
    keys = steps.flat_map(passes.as_it_is(lambda step, count: tf.data.Dataset.from_tensors(step).repeat(count)))
    keyed = tf.data.Dataset.zip((keys, examples))
    return keyed.group_by_window(
        key_func=passes.as_it_is(lambda step, example: step),
        reduce_func=passes.as_it_is(lambda step, window: inputs.batched(window.map(_example), most, drop_remainder=False)),
        window_size_func=passes.as_it_is(lambda step: tf.gather(sizes, step)),
    )


@passes.as_it_is
def _example(step: tf.Tensor, example: Any) -> Any:
    del step
    return example
