"""The input's position: the state of its iterators as one string, which a checkpoint carries."""

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf
from absl import logging as absl_logging

from towers import errors, reads, structs

_SAY_SECS = 10.0
_STATEFUL = re.compile(r'(\w+) is stateful')
_REMEDIES = (
    (r'PyFunc', 'A generator or Python function can only start anew: make it of TensorFlow operations'),
    (r'Random|Multinomial|Uniform|Normal', 'Draw with tf.random.stateless_uniform, or in the model with towers.random_uniform'),
    (r'', 'Leave it out of the dataset'),
)


def make(iterators: Sequence[tf.data.Iterator], *, same: bool = False) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Operation]]:
    """The iterators' state as one string scalar, and the function that sets them to it.

    Args:
      iterators: of all pipelines, each on its own device.
      same: whether they are at the same place of the same batches, so that the state of the first is that of all.
    """
    with _without_deprecation_notice():
        saveables = [tf.data.experimental.make_saveable_from_iterator(iterator) for iterator in iterators]
    devices = [iterator.initializer.device for iterator in iterators]
    states = []
    for saveable, device in list(zip(saveables, devices, strict=True))[: 1 if same else None]:
        with tf.device(device):
            states.append(tf.io.serialize_tensor(saveable.specs[0].tensor))
    position = tf.io.serialize_tensor(tf.stack(states))

    def restore(saved: tf.Tensor) -> tf.Operation:
        parts = tf.unstack(tf.ensure_shape(tf.io.parse_tensor(saved, tf.string), [len(states)]))
        made = []
        for saveable, device, part in zip(saveables, devices, parts * len(iterators) if same else parts, strict=True):
            with tf.device(device):  # the state itself does not cross to another device
                made.append(saveable.restore([tf.io.parse_tensor(part, tf.variant)], None))
        return tf.group(*made)

    return position, restore


Begin: TypeAlias = Callable[[Sequence[int]], tuple[Mapping[tf.Tensor, Any], Sequence[int]]]


def counted(source: structs.Input, place: tf.Tensor, begin: Begin) -> structs.Input:
    """The input with its places: a mark that counts the batches, and a variable with the place of the one that the last step took.

    The count goes up first: whoever has read the place, and then finds that no more batches have come, knows that no
    step had begun to change anything.

    Args:
      source: the input.
      place: int64 [2 or more], the number of a batch's pass, how many batches of it there were so far, and what else says where it is.
      begin: from a place to what the initializer is fed so that the input begins at it or before, and where that is.
    """
    with tf.name_scope('marks'):
        count, taken = _local('input', []), _local('taken', place.shape.as_list())
        with tf.control_dependencies([place]):  # it comes with the batch
            counted = reads.count(count)
        with tf.control_dependencies([counted]):
            advance = taken.assign(place, read_value=False)
        given = tf.placeholder(tf.int64, place.shape)
        take = taken.assign(given, read_value=False)

    def go_to(session: tf.Session, wanted: Sequence[int], start: Sequence[int] | None) -> None:
        if start is None or tuple(start) > tuple(wanted):
            feeds, start = begin(wanted)
            session.run(source.initializer, feeds)
        _read_on(session, place, tuple(start), tuple(wanted))
        session.run(take, {given: wanted})

    mark = structs.Mark('the input', advance, count.read_value())
    return dataclasses.replace(source, taken=taken, go_to=go_to, mark=mark)


def without_state(source: structs.Input, cause: tf.Operation) -> structs.Input:
    """The input whose position is its place alone, so that a resume reads its pass again; `cause` is why."""
    absl_logging.warning(
        'The state of the %s made at %s can not be relied on; a resume is exact, but reads the pass again up to where it was. '
        "Leave a dataset's own repeat() out (Towers repeats), or sample from endless ones, to go on at once.",
        cause.type,
        errors.source_line(cause) or 'an unknown line',
    )
    return dataclasses.replace(source, place_only=True)


def _local(name: str, shape: Sequence[int]) -> tf.Variable:
    """A variable that is set with all others, and in no checkpoint by itself."""
    zeros = tf.zeros(shape, tf.int64)
    return tf.Variable(zeros, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name=name, use_resource=True)


def _read_on(session: tf.Session, place: tf.Tensor, now: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Reads batches up to that of a place, and says every ten seconds how far it has come."""
    said = time.monotonic()
    batches = 0
    while now < wanted:
        now = tuple(int(number) for number in session.run(place))
        batches += 1
        if time.monotonic() - said > _SAY_SECS:
            said = time.monotonic()
            absl_logging.info('Reading on to batch %d of pass %d: batch %d of pass %d.', wanted[1], wanted[0], now[1], now[0])
    if now != wanted:
        raise ValueError(f'pass {wanted[0]} of the data has no batch {wanted[1]}, its next one is batch {now[1]} of pass {now[0]}')
    if batches:
        absl_logging.info('Read %d batches that the run has trained on, to go on behind them.', batches)


def require(session: tf.Session, source: structs.Input) -> None:
    """Makes sure before the first step that checkpoints can hold the input's position, where they shall.

    Args:
      session: the training's, with the input initialised.
      source: the input.

    Raises:
      ValueError: they can't, for the reason that the message says, and it names the user's line.
    """
    if source.position is None:
        absl_logging.info('Exact resume is off: a run that goes on from a checkpoint starts its epoch anew.')
        return
    try:
        session.run(source.position)
    except tf.errors.OpError as error:
        found = _STATEFUL.search(error.message)
        if found is None:
            raise errors.located(error, session.graph) from error
        remedy = next(remedy for pattern, remedy in _REMEDIES if re.search(pattern, found[1]))
        raise ValueError(
            f"The input's position can't be saved: {found[1]} in {_place(session.graph, found[1])} has a state of its own. {remedy}; "
            'or give --noexact_resume: then a run that is resumed starts its epoch anew.'
        ) from error


def _place(graph: tf.Graph, kind: str) -> str:
    """The user's line that made the dataset whose function holds an operation of type `kind`."""
    library = {function.signature.name: function for function in graph.as_graph_def().library.function}
    for operation in graph.get_operations():
        line = errors.source_line(operation)
        if line and 'Dataset' in operation.type and _holds(operation.node_def, kind, library, set()):
            return f'the {operation.type} made at {line}'
    return 'the dataset'


def _holds(node: Any, kind: str, library: Mapping[str, Any], seen: set[str]) -> bool:
    names = [function.name for attribute in node.attr.values() for function in (attribute.func, *attribute.list.func)]
    new = [name for name in names if name in library and name not in seen]
    seen.update(new)
    return node.op == kind or any(_holds(inner, kind, library, seen) for name in new for inner in library[name].node_def)


@contextlib.contextmanager
def _without_deprecation_notice() -> Iterator[None]:
    """make_saveable_from_iterator is the public way to an iterator's state, and says at each call that it is old."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
