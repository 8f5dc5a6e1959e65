"""A pipeline measured alone: the dataset iterated bare, against the same read through the training input of N towers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from scripts import _flags, _measure, _zoo
from towers.graph import devices
from towers.input import inputs
from towers.run import session_config


def measure(values: object, *, rounds: int, steps: int) -> dict[str, str]:
    """Batches per second of both ways and their ratio, as rows of a table.

    Args:
      values: the flags of a training: dataset, batch and towers.
      rounds: slices of each side.
      steps: batches in a slice.
    """
    work = _zoo.load(values)
    config = _flags.to_config(values, work.recipe)
    placement = devices.place(config)
    proto = session_config.make(config, placement)
    size = config.examples_per_step(len(placement.towers))

    def through() -> Any:
        source = inputs.training(inputs.open_source(work.dataset, host=placement.towers[0].host, proto=proto), config, placement.towers)
        return source.initializer, [tensor for batch in source.batches for tensor in tf.nest.flatten(batch.features)]

    def bare() -> Any:
        batches = work.dataset().repeat().batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        iterator = tf.data.make_initializable_iterator(batches)
        return iterator.initializer, tf.nest.flatten(iterator.get_next())

    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(_read(make, proto)) for name, make in (('towers', through), ('bare tf.data', bare))}
        rates = _measure.in_turn(sides, rounds=rounds, steps=steps)
    return {f'batches of {size}, {name}': value for name, value in _measure.table(rates).items()}


@contextlib.contextmanager
def _read(make: Callable[[], Any], proto: tf.ConfigProto) -> Iterator[Callable[[], Any]]:
    """A function that takes one batch and copies nothing of it out of the graph."""
    with tf.Graph().as_default():
        start, tensors = make()
        taken = tf.group(*tensors)
        with tf.Session(config=proto) as session:
            session.run(tf.local_variables_initializer())
            session.run(start)
            yield session.make_callable(taken)
