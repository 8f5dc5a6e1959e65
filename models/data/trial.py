"""Reads and decodes every image of some indices once, in a process of its own: python -m models.data.trial GIVEN FOUND."""

import functools
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from . import encoded, splits


def faults(index: encoded.Index, form: encoded.Form) -> dict[int, str]:
    """Number -> what is wrong with the image, for those that can't be used."""
    seen: set[int] = set()
    wrong: dict[int, str | None] = {}
    with tf.Graph().as_default():
        read = encoded.reader(index, form)
        every = tf.data.Dataset.range(len(index)).interleave(
            splits.as_it_is(lambda number: read(number).map(lambda number, image, label: (number, tf.shape(image), label)).ignore_errors()),
            cycle_length=16,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=False,
        )
        iterator = tf.data.make_initializable_iterator(every.batch(1024).prefetch(2))
        batch = iterator.get_next()
        which = tf.placeholder(tf.int64, [])
        alone = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensors(which).flat_map(splits.as_it_is(read)))
        one = alone.get_next()
        with tf.Session() as session:
            session.run(iterator.initializer)
            for number, shape, label in _rows(session, batch):
                seen.add(int(number))
                wrong[int(number)] = encoded.misfit(tuple(shape.tolist()), int(label), form)
            for number in sorted(set(range(len(index))) - seen):
                wrong[number] = _why(
                    functools.partial(session.run, alone.initializer, {which: number}), functools.partial(session.run, one)
                )
    return {number: problem for number, problem in sorted(wrong.items()) if problem}


def _why(*runs: Callable[[], Any]) -> str:
    """Why an image that failed among others fails alone."""
    try:
        for run in runs:
            run()
    except tf.errors.OpError as error:
        return _reason(error)
    return 'it could be read at a second try only'


def _rows(session: tf.Session, batch: tuple[tf.Tensor, ...]) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            values = session.run(batch)
        except tf.errors.OutOfRangeError:
            return
        yield from zip(*values, strict=True)


def _reason(error: tf.errors.OpError) -> str:
    """The line of a message that says what happened."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return 'there is nothing'
    noise = ('Graph execution error', 'Detected at', 'File "', 'Node: ', '[[')
    message = re.sub(r'Error in user-defined function passed to .* with iterator: \S+: ', '', error.message)
    lines = [line.strip() for line in message.splitlines()]
    telling = [line for line in lines if line and not line.startswith(noise)]
    return (telling or [type(error).__name__])[0].rstrip('.')


def main(given: str, found: str) -> None:
    """From pickled (indices, form) to the pickled faults of each."""
    with open(given, 'rb') as file:
        indices, form = pickle.load(file)
    with open(found, 'wb') as file:
        pickle.dump([faults(index, form) for index in indices], file)


if __name__ == '__main__':
    main(*sys.argv[1:])
