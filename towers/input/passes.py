"""The passes over a user's dataset: each is made anew from its number, so that what it holds depends on that alone.

Two flaws of TensorFlow's own repetition are mended by that. A shuffle draws the order of its next pass from a state that is
lost where a position is saved after its data has been read and before the batches made of it are used up: the passes
after a restore then have other orders. And `map` of `tf.compat.v1` takes any OutOfRangeError of its function (a closed
queue's) for the end of the data, and forgets how many elements there are.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from towers import upstream
from towers.input import copies

as_it_is = tf.autograph.experimental.do_not_convert
_DATASET = re.compile(r'Dataset(V\d+)?$')
_FOR_ALL_PASSES = ('CacheDataset', 'CacheDatasetV2')  # stay outside, with all that is before them
_VARIES = ('reshuffle_each_iteration', 'rerandomize_each_iteration')
_COPY = '_in_passes'  # the copies of functions must not have the names of the originals
# What has given all elements when its input has none left, and keeps the order of elements.
_HOLD_NOTHING = frozenset(
    f'{name}Dataset{version}'
    for name in ('Map', 'ParallelMap', 'Filter', 'FlatMap', 'Interleave', 'Prefetch', 'Take', 'Skip', 'Zip', 'Options', 'Cache')
    for version in ('', 'V2')
)
_MANY = 1 << 10
_ENDS_EARLY = 'preserve_cardinality'  # False: an OutOfRangeError of the map's function ends the data


@dataclasses.dataclass(frozen=True)
class Passes:
    """A dataset as its graph, to be made again.

    Attributes:
      dataset: the user's, whose tensors and functions the passes use.
      options: its own, which hold for the passes as a whole; else as many threads of their own as there are cores, none that tunes.
      variant: name of the tensor that stands for it, in `definition` or in `given`.
      definition: the operations that make it, with the names of `given` for what comes from outside.
      given: name -> the tensor outside.
      seeds: the names of `given` that are a pair of seeds of something that differs from pass to pass.
    """

    dataset: tf.data.Dataset
    options: tf.data.Options
    variant: str
    definition: tf.GraphDef
    given: Mapping[str, tf.Tensor]
    seeds: tuple[tuple[str, str], ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of the operations and their sizes, as of buffers: datasets must share both to exchange positions."""
        sized = [name for node in self.definition.node for name in (node.input[1:2] if 'Shuffle' in node.op else node.input)]
        whole = [self.given[name] for name in sized if name in self.given and all(name not in pair for pair in self.seeds)]
        sizes = [str(tf.get_static_value(tensor)) for tensor in whole if tensor.dtype == tf.int64 and tensor.shape.rank == 0]
        inside = [node.op for function in self.definition.library.function for node in function.node_def if _DATASET.search(node.op)]
        return (*(node.op for node in self.definition.node), *sizes, *sorted(inside))

    def make(self, number: tf.Tensor | None = None) -> tf.data.Dataset:
        """The dataset in the current graph, in the order of pass `number` (int64 scalar); None = in the order of its own seeds."""
        inputs = {name: tf.identity(tensor) for name, tensor in self.given.items()}
        for pair in self.seeds if number is not None else ():
            folded = tf.random.experimental.stateless_fold_in(tf.stack([inputs[name] for name in pair]), number)
            inputs.update(zip(pair, tf.unstack(folded), strict=True))
        outside = {f'{name}:0': tensor for name, tensor in inputs.items()}
        variant = inputs.get(self.variant)
        if variant is None:
            [variant] = tf.import_graph_def(self.definition, outside, [self.variant], name='pass')
        made = tf.data.experimental.from_variant(variant, self.dataset.element_spec)
        return made.with_options(self.options)

    def again(self, *, here: bool) -> 'Passes':
        """The same for another pipeline on the current device.

        What can't cross to another machine is made again. `here`, where the pipelines share what they can, only a cache is
        whose order is drawn: it would be drawn anew for each of them.

        Raises:
          ValueError: on another machine, where the dataset uses something that exists once only, such as a queue.
        """
        stuck = {name: tensor for name, tensor in self.given.items() if tensor.dtype in copies.STUCK}
        if not stuck or (here and not any(_varies(node.node_def) for node in copies.behind(stuck.values()).values())):
            return self
        return dataclasses.replace(self, given={**self.given, **copies.again(stuck)})

    def repeated(
        self,
        arrange: Callable[[tf.data.Dataset], tf.data.Dataset],
        count: int | None,
        *,
        first: tf.Tensor | int = 0,
        may_be_empty: bool,
    ) -> tf.data.Dataset:
        """The passes one after the other, as pairs of (place, what `arrange` gives).

        A place is a pair of int64 scalars: the number of the pass, and how many elements it has given so far, this one included.

        Args:
          arrange: what is done with each pass by itself, such as batching.
          count: number of passes; None = for ever.
          first: number of the first of them.
          may_be_empty: whether a pass without elements must be looked for; it is an error then, where TensorFlow's own
            `repeat` would look for ever.
        """

        @as_it_is
        def one(number: tf.Tensor) -> tf.data.Dataset:
            made = _placed(arrange(self.make(number)), number)
            return _marked(made) if may_be_empty else made

        made = tf.data.Dataset.range(first, tf.int64.max if count is None else count).flat_map(one)
        return (_checked(made) if may_be_empty else made).with_options(self.options)


def of(dataset: tf.data.Dataset) -> Passes:
    """Takes a dataset of the current graph apart."""
    last = tf.data.experimental.to_variant(dataset).op
    if any(node.type in _FOR_ALL_PASSES for node in _chain(last, ()).values()):
        dataset = _apart(dataset, ()).make()  # also what stays outside of the passes must keep every element
    return _apart(dataset, _FOR_ALL_PASSES)


def unsure(dataset: tf.data.Dataset) -> tf.Operation | None:
    """The operation of a user's dataset that makes its saved position wrong at times; None where there is none.

    A `repeat` of the user's own over a shuffle forgets the order of the next round, where something between the two still
    holds elements of this one. Sampling from datasets of which one has ended hangs when it is restored.
    """
    for operation in _chain(tf.data.experimental.to_variant(dataset).op, ()).values():
        if operation.type == 'RepeatDataset' and _forgets(operation):
            return operation
        if operation.type == 'DirectedInterleaveDataset' and not all(_is_endless(tensor.op) for tensor in operation.inputs[1:]):
            return operation
    return None


def _forgets(repeat: tf.Operation) -> bool:
    waiting = [(tensor.op, False) for tensor in repeat.inputs if tensor.dtype == tf.variant]
    while waiting:
        operation, held = waiting.pop()
        if held and any(operation.node_def.attr[name].b for name in _VARIES if name in operation.node_def.attr):
            return True
        held = held or operation.type not in _HOLD_NOTHING
        waiting += [(tensor.op, held) for tensor in operation.inputs if tensor.dtype == tf.variant]
    return False


def _is_endless(operation: tf.Operation) -> bool:
    if operation.type == 'RepeatDataset':
        return (tf.get_static_value(operation.inputs[1]) or 0) < 0
    before = [tensor.op for tensor in operation.inputs if tensor.dtype == tf.variant][:1]
    is_alike = operation.type in _HOLD_NOTHING or operation.type.startswith('ShuffleDataset')
    return is_alike and bool(before) and _is_endless(before[0])


def _apart(dataset: tf.data.Dataset, outside: Collection[str]) -> Passes:
    variant = tf.data.experimental.to_variant(dataset)
    nodes = _chain(variant.op, outside)
    definition = tf.GraphDef(versions=variant.graph.graph_def_versions)
    given: dict[str, tf.Tensor] = {}
    seeds = []
    for node in nodes.values():
        made = copies.node(node, definition)
        inputs = [copies.read(tensor, nodes, given) for tensor in node.inputs]
        made.input[:] = inputs
        if _varies(made):
            places = [[argument.name for argument in node.op_def.input_arg].index(name) for name in ('seed', 'seed2')]
            seeds.append((inputs[places[0]], inputs[places[1]]))
    library = {function.signature.name: function for function in variant.graph.as_graph_def().library.function}
    _keep_every_element(definition, library)
    with warnings.catch_warnings():  # it says that options hidden in a graph don't show, such as those of a loaded dataset
        warnings.simplefilter('ignore')
        options = dataset.options()
    return Passes(dataset, _defaults(options).merge(options), copies.read(variant, nodes, given), definition, given, tuple(seeds))


def _defaults(given: tf.data.Options) -> tf.data.Options:
    """What holds where the dataset's own options do not say it."""
    options = tf.data.Options()
    if given.threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = 0  # as many as there are cores; those of the session are the towers'
    if given.autotune.enabled is None:
        # Its thread now and then misses that the iterator is closed, and holds up the session, or all of a server's, for up to a minute.
        options.autotune.enabled = False
        options.autotune.initial_parallelism = _MANY  # where AUTOTUNE is asked for, as much as there are threads
    return options


def _varies(node: Any) -> bool:
    """Whether an operation draws anew for each iterator over it."""
    return any(node.attr[name].b for name in _VARIES if name in node.attr)


def _chain(last: tf.Operation, outside: Collection[str]) -> dict[str, tf.Operation]:
    """The operations that make a dataset, `last` being its last, but those of the types in `outside` and all before them."""

    def inside(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
        return [each for each in operations if _DATASET.search(each.type) and each.type not in outside]

    return upstream.of(inside([last]), lambda op: inside(tensor.op for tensor in op.inputs if tensor.dtype == tf.variant))


def _keep_every_element(definition: tf.GraphDef, library: Mapping[str, Any]) -> None:
    """Makes an OutOfRangeError in any map an error, in the functions of `library` too, which come along."""
    functions: dict[str, Any] = {}
    waiting = list(definition.node)
    while waiting:
        node = waiting.pop()
        if _ENDS_EARLY in node.attr:
            node.attr[_ENDS_EARLY].b = True
        for function in _functions(node):
            if function.name in library and function.name not in functions:
                functions[function.name] = definition.library.function.add()
                functions[function.name].CopyFrom(library[function.name])
                waiting += functions[function.name].node_def
    for node in [*definition.node, *[node for function in functions.values() for node in function.node_def]]:
        for function in _functions(node):
            if function.name in functions:
                function.name += _COPY
    for function in functions.values():
        function.signature.name += _COPY


def _functions(node: Any) -> Iterator[Any]:
    for attribute in node.attr.values():
        if attribute.HasField('func'):
            yield attribute.func
        yield from attribute.list.func


def _placed(batches: tf.data.Dataset, number: tf.Tensor) -> tf.data.Dataset:
    """(place, batch) for each batch of pass `number`; without a function of its own, which would cost 20 us a batch."""
    place = tf.data.Dataset.from_tensors(number).repeat(), tf.data.Dataset.range(1, tf.int64.max)
    return tf.data.Dataset.zip((place, batches))


def _marked(batches: tf.data.Dataset) -> tf.data.Dataset:
    """(True, batch) for each, and at the end (False, a blank)."""
    unpacked = type(batches.element_spec) is tuple  # `map` spreads a tuple over the arguments
    marked = batches.map(as_it_is(lambda *batch: (tf.constant(True), batch if unpacked else batch[0])))
    blank = tf.nest.map_structure(_blank, batches.element_spec)
    return marked.concatenate(tf.data.Dataset.from_tensors((tf.constant(False), blank)))


def _checked(marked: tf.data.Dataset) -> tf.data.Dataset:
    """The batches of `_marked` passes without the marks; a pass of a mark alone is an error."""

    def look(some: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        is_batch, batch = element
        message = 'A pass over the dataset gave no example; expected at least one. Check its files and filters.'
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_or(is_batch, some), [message])]):
            return tf.identity(is_batch), (tf.identity(is_batch), batch)

    batches = marked.scan(tf.constant(False), as_it_is(look)).filter(as_it_is(lambda is_batch, batch: is_batch))
    return batches.map(as_it_is(lambda is_batch, batch: batch))


def _blank(spec: Any) -> Any:
    """Something of a type, without rows."""
    shape = [] if spec.shape.rank is None else [size or 0 for size in spec.shape.as_list()]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), tf.constant(shape, tf.int64))
    if isinstance(spec, tf.RaggedTensorSpec):
        rows = tf.zeros(shape, spec.dtype)
        return tf.RaggedTensor.from_tensor(rows, ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype)
    return tf.zeros(shape, spec.dtype)
