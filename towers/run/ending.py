"""Whether an error of a step is the end of the data.

An iterator says of itself whether it has ended. But one whose `get_next` was cancelled, since another operation of the run
failed, is broken from then on: it may claim to have ended, or answer with an error. So the error must come from the end of
an iterator of the input too, and from nowhere else.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf
from absl import logging

from towers import errors

_TAKES = 'IteratorGetNext'  # what the types of operations that take an element begin with


def is_end(error: tf.errors.OpError, session: tf.Session, ended: Sequence[tf.Tensor]) -> bool:
    """Whether a step failed since the input is at its end.

    Args:
      error: as the session raised it.
      session: the one that raised it.
      ended: of `structs.Input`.
    """
    own = {consumer.name for each in ended for consumer in _handle(each).consumers() if consumer.type.startswith(_TAKES)}
    if not errors.says_end(error) or not own.issuperset(errors.named(error, session.graph)):
        return False
    return any(_answers(session, each) for each in ended)


def _handle(ended: tf.Tensor) -> tf.Tensor:
    """The iterator that is asked."""
    while not ended.op.type.startswith(_TAKES):
        ended = ended.op.inputs[0]
    return ended.op.inputs[0]


def _answers(session: tf.Session, ended: tf.Tensor) -> bool:
    try:
        return bool(session.run(ended))
    except tf.errors.OpError as error:
        logging.info('An iterator of the input could not say whether it is at its end: %s', ' '.join(error.message.split()))
        return False
