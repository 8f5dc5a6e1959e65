"""Cutting a dataset into shards, as near to its source as may be, so that whoever reads one shard does not read the others.

A shard holds every so many-th element of the place where the dataset is cut: of the files, where the source gives their names.
All behind that place works on one element at a time, so that the shards together give what the whole gives.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors
from towers.input import passes

Ask = Callable[..., Any]  # runs fetches, with feeds

_SUFFIX = re.compile(r'Dataset(V\d+)?$')
_KEEP_NUMBER = frozenset(('Map', 'ParallelMap', 'Shuffle', 'Prefetch', 'Options', 'AssertCardinality'))
_ONE_BY_ONE = _KEEP_NUMBER | {'Filter', 'ParallelFilter', 'FlatMap', 'Interleave', 'ParallelInterleave', 'IgnoreErrors', 'Unbatch'}
_EACH_ITS_OWN = _KEEP_NUMBER - {'Shuffle'}
_SHARDS, _SHARD, _CUT = 'shards', 'shard', 'cut_into_shards'
_MOST_EXAMPLES = 2**31  # products of two such numbers are int64


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dataset in shards.

    Attributes:
      passes: over one shard, which `shard` chooses.
      examples: in each shard.
    """

    passes: passes.Passes
    examples: tuple[int, ...]

    def shard(self, index: tf.Tensor, number: tf.Tensor) -> tf.data.Dataset:
        """The examples of shard `index` in pass `number` (int64 scalars), in the current graph; another number of them is an error."""
        made = dataclasses.replace(self.passes, given={**self.passes.given, _SHARD: index}).make(number)
        return made.apply(tf.data.experimental.assert_cardinality(tf.gather(tf.constant(self.examples, tf.int64), index)))

    def again(self, *, here: bool) -> 'Cut':
        """The same for another pipeline on the current device; see `Passes.again`."""
        return dataclasses.replace(self, passes=self.passes.again(here=here))


def cut(source: passes.Passes, shards: int, hosts: Sequence[str], *, ask: Ask, known: Sequence[int] | None = None) -> Cut:
    """Cuts a dataset of the current graph at the first place that has an element for each shard.

    Args:
      source: the dataset, which must end.
      shards: how many.
      hosts: device strings of the machines' CPUs, each of which counts its part where examples must be counted.
      ask: runs fetches of the current graph in a session.
      known: examples of each shard, counted earlier; looked at where they can't be told without counting.

    Raises:
      ValueError: there is no such place, or too few shards have examples.
    """
    places = _places(source)
    sizes = [int(size) for size in ask(_cardinalities(source, places))]
    if sizes[-1] == tf.data.experimental.INFINITE_CARDINALITY:
        raise ValueError(f'--input_shards={shards} needs a dataset that ends, got an endless one; use take(n), or leave the flag out.')
    found = [place for place, size in enumerate(sizes) if size >= shards]
    if not found:
        _refuse(shards, max(sizes))
    first = found[0]
    made = _behind(source, places[first], shards)
    examples = [_part(sizes[first], shards, shard) for shard in range(shards)]
    if sizes[-1] != sizes[first]:
        examples = list(known or _counted(made, places[first], hosts, shards, ask))
    _require(examples, len(hosts))
    logging.info(
        'The dataset is cut into %d shards %s, which gives %d elements; all behind it is read by the machine alone that has the shard.',
        shards,
        _described(source, places[first]),
        sizes[first],
    )
    return Cut(made, tuple(examples))


def part(source: passes.Passes, parts: int, index: tf.Tensor) -> passes.Passes:
    """The passes over every so many-th example of a dataset, of which those of the other parts are not made.

    It is cut before all that makes one element of each, in order, as maps do: the part is the same, for its part of the cost.

    Args:
      source: the dataset.
      parts: how many.
      index: int64 scalar, which of them.
    """
    nodes, place = {node.name: node for node in source.definition.node}, source.variant
    while (node := nodes.get(place.partition(':')[0])) is not None and _kind(node) in _EACH_ITS_OWN:
        place = node.input[0]
    made = _behind(source, place, parts)
    return dataclasses.replace(made, given={**made.given, _SHARD: index})


def _refuse(shards: int, most: int) -> None:
    what = f'no place of it has more than {most} elements' if most > 0 else 'of no place is it known how many elements it has'
    remedy = f'give --input_shards={most} or fewer' if most > 1 else 'begin it with from_tensor_slices of file names or of numbers'
    raise ValueError(f'The dataset can not be cut into --input_shards={shards}: {what}; {remedy}, or leave the flag out.')


def _places(source: passes.Passes) -> list[str]:
    """The names of the datasets in a chain between which everything works on one element at a time, the one next to the source first."""
    nodes = {node.name: node for node in source.definition.node}
    places = [source.variant]
    while (node := nodes.get(places[-1].partition(':')[0])) is not None and _kind(node) in _ONE_BY_ONE:
        places.append(node.input[0])
    return places[::-1]


def _kind(node: Any) -> str:
    return _SUFFIX.sub('', node.op)


def _cardinalities(source: passes.Passes, places: Sequence[str]) -> tf.Tensor:
    inputs = {f'{name}:0': tensor for name, tensor in source.given.items()}
    inside = [place for place in places if place not in source.given]
    made = dict(zip(inside, tf.import_graph_def(source.definition, inputs, inside, name='places') if inside else [], strict=True))
    return tf.stack([tf.raw_ops.DatasetCardinality(input_dataset=made.get(place, source.given.get(place))) for place in places])


def _behind(source: passes.Passes, place: str, shards: int) -> passes.Passes:
    """The passes over the shard that the tensor `_SHARD` of what is given says, cut behind a place."""
    definition = tf.GraphDef()
    definition.CopyFrom(source.definition)
    places = _places(source)
    behind = {each.partition(':')[0] for each in places[places.index(place) + 1 :]}
    tail = [node for node in definition.node if node.name in behind]
    # What is promised of the whole does not hold for a part.
    instead = {place: f'{_CUT}:0', **{f'{node.name}:0': node.input[0] for node in tail if _kind(node) == 'AssertCardinality'}}
    for node in tail:
        node.input[0] = _followed(node.input[0], instead)
    node = definition.node.add(name=_CUT, op='ShardDataset', input=[place, _SHARDS, _SHARD])
    types, shapes = _outputs(source, place)
    node.attr['output_types'].list.type[:] = [each.as_datatype_enum for each in types]
    node.attr['output_shapes'].list.shape.extend(shape.as_proto() for shape in shapes)
    given = {**source.given, _SHARDS: tf.constant(shards, tf.int64), _SHARD: tf.constant(0, tf.int64)}
    return dataclasses.replace(source, definition=definition, variant=_followed(source.variant, instead), given=given)


def _followed(name: str, instead: Mapping[str, str]) -> str:
    """What is read in the place of `name`, where what it reads is replaced too."""
    while name in instead:
        name = instead[name]
    return name


def _outputs(source: passes.Passes, place: str) -> tuple[list[tf.DType], list[tf.TensorShape]]:
    """The types and shapes of a place's elements."""
    operation = _operation(source, place)
    names = [attribute.name for attribute in operation.op_def.attr]
    types = 'output_types' if 'output_types' in names else 'Toutput_types'  # as from_tensor_slices has it
    return operation.get_attr(types), [tf.TensorShape(shape) for shape in operation.get_attr('output_shapes')]


def _operation(source: passes.Passes, place: str) -> tf.Operation:
    if place in source.given:
        return source.given[place].op
    return tf.get_default_graph().get_operation_by_name(place.partition(':')[0])


def _described(source: passes.Passes, place: str) -> str:
    operation = _operation(source, place)
    return f'behind the {operation.type} made at {errors.source_line(operation) or "an unknown line"}'


def _part(elements: int, shards: int, shard: int) -> int:
    """How many of so many elements are in a shard."""
    return (elements - shard + shards - 1) // shards


def _counted(made: passes.Passes, place: str, hosts: Sequence[str], shards: int, ask: Ask) -> list[int]:
    """The examples of each shard, read once, without what does not change their number; each machine counts some."""
    logging.info('The examples of %d shards are counted, once for a run.', shards)
    nodes = {node.name: node for node in made.definition.node}
    variant = made.variant
    while _kind(nodes[variant.partition(':')[0]]) in _KEEP_NUMBER:
        variant = nodes[variant.partition(':')[0]].input[0]
    types, shapes = _outputs(made, place if variant.startswith(_CUT) else variant)
    spec = tuple(tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, types, strict=True))
    chosen, counts = [], []
    for host in hosts:
        with tf.device(host):
            chosen.append(tf.placeholder(tf.int64, []))
            own = made.again(here=host == hosts[0])
            given = {f'{name}:0': tf.identity(tensor) for name, tensor in {**own.given, _SHARD: chosen[-1]}.items()}
            [part] = tf.import_graph_def(own.definition, given, [variant], name='counted')
            dataset = tf.data.experimental.from_variant(part, spec)
            counts.append(dataset.reduce(tf.constant(0, tf.int64), passes.as_it_is(lambda count, *element: count + 1)))
    ask(tf.tables_initializer())  # what is counted may use them
    found: list[int] = []
    while len(found) < shards:
        found += ask(counts, {holder: min(len(found) + index, shards - 1) for index, holder in enumerate(chosen)})
    return [int(count) for count in found[:shards]]


def _require(examples: Sequence[int], machines: int) -> None:
    """Refuses shards of which some machine would have no example."""
    filled = sum(count > 0 for count in examples)
    config_lib.require(
        filled >= machines,
        f'--input_shards={len(examples)}: {filled} shards have examples, {machines} machines need one each; give more shards.',
    )
    config_lib.require(
        sum(examples) < _MOST_EXAMPLES, f'--input_shards is for fewer than {_MOST_EXAMPLES} examples, got {sum(examples)}; leave it out.'
    )
