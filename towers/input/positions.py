"""The input's position: the state of its iterators as one string, which a checkpoint carries."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging as absl_logging

from towers import errors, structs

_STATEFUL = re.compile(r'(\w+) is stateful')
_REMEDIES = (
    (r'PyFunc', 'A generator or Python function can only start anew: make it of TensorFlow operations'),
    (r'Random|Multinomial|Uniform|Normal', 'Draw with tf.random.stateless_uniform, or in the model with towers.random_uniform'),
    (r'', 'Leave it out of the dataset'),
)


def make(iterators: Sequence[tf.data.Iterator]) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Operation]]:
    """The iterators' state as one string scalar, and the function that sets them to it."""
    with _without_deprecation_notice():
        saveables = [tf.data.experimental.make_saveable_from_iterator(iterator) for iterator in iterators]
    states = [tf.io.serialize_tensor(saveable.specs[0].tensor) for saveable in saveables]
    position = tf.io.serialize_tensor(tf.stack(states))

    def restore(saved: tf.Tensor) -> tf.Operation:
        parts = tf.ensure_shape(tf.io.parse_tensor(saved, tf.string), [len(saveables)])
        variants = [tf.io.parse_tensor(part, tf.variant) for part in tf.unstack(parts)]
        return tf.group(*[saveable.restore([variant], None) for saveable, variant in zip(saveables, variants, strict=True)])

    return position, restore


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
