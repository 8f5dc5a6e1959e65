"""The options that belong to the whole process: its first session fixes them, and a second set is an error.

TensorFlow makes its GPU devices and its pools of threads once in a process, and ignores what later sessions ask for. Whatever is
run eagerly has them made too, with TensorFlow's own options, and so has a dataset that maps functions: so a session comes first.
"""

import contextlib
import gc
import os
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors, structs
from towers.run import session_config

_THREADS = {'intra_op_threads': 'intra_op_parallelism_threads', 'inter_op_threads': 'inter_op_parallelism_threads'}
_GPUS = (
    'towers_per_gpu', 'gpu_allow_growth', 'gpu_memory_fraction', 'gpu_memory_limit_mb', 'gpu_allocator',
    'gpu_thread_mode', 'gpu_thread_count',
)  # fmt: skip


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While a graph is built Python does not look for garbage in cycles.

    A full look goes through all of TensorFlow's modules and all operations that there are, and finds next to nothing: two of them took
    a tenth of the time to the first step of ResNet-50 on 4 towers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Owner:
    """The one owner of the options that a process has only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: tuple[dict[str, Any], dict[str, int], str] | None = None  # asked, as they are, where
        self._gpus: tuple[dict[str, Any], str] | None = None

    def claim(self, config: config_lib.DeviceConfig, placement: structs.Placement) -> tf.ConfigProto:
        """The options of a session that is about to be made; see `claim`."""
        place = _place()
        proto = session_config.make(config, placement)
        with self._lock:
            if not placement.fake:
                self._claim_gpus(config, placement, place)
                os.environ.update(session_config.environment(config, placement))
            self._claim_threads(config, proto, place)
        return proto

    def _claim_gpus(self, config: config_lib.DeviceConfig, placement: structs.Placement, place: str) -> None:
        numbers = tuple(number for _, number in placement.gpus)
        asked = {'visible_gpus': numbers, **{name: getattr(config, name) for name in _GPUS}}
        if self._gpus is None:
            self._gpus = asked, place
        before, where = self._gpus
        common = min(len(numbers), len(before['visible_gpus']))  # a session may take fewer or more, in the same order
        first, second = ({**options, 'visible_gpus': options['visible_gpus'][:common]} for options in (before, asked))
        _require_same(first, second, where, place)

    def _claim_threads(self, config: config_lib.DeviceConfig, proto: tf.ConfigProto, place: str) -> None:
        """Compares what is given; what isn't is set to what the process has, so that the options tell the truth."""
        own = ('inter_op_threads',) if config.per_session_threads else ()
        asked = {name: getattr(config, name) for name in _THREADS if name not in own and getattr(config, name) is not None}
        if self._threads is None:
            self._threads = asked, _made(proto, place), place
        before, real, where = self._threads
        _require_same({name: before[name] for name in asked if name in before}, asked, where, place)
        for name in _THREADS:
            if name in own:
                continue
            if asked.get(name, real[name]) != real[name]:
                logging.warning(
                    "--%s=%d at %s has no effect: this process's threads were made by a session at %s, which left their number open.",
                    name, asked[name], place, where,
                )  # fmt: skip
            setattr(proto, _THREADS[name], real[name])


_owner = Owner()


def claim(config: config_lib.DeviceConfig, placement: structs.Placement) -> tf.ConfigProto:
    """The options of a session or server that is about to be made, the same for all sessions of a process where they must be.

    Args:
      config: what is asked.
      placement: where the towers run.

    Raises:
      ValueError: other GPU options, or other threads, were given for an earlier session of this process; it names both places.
    """
    return _owner.claim(config, placement)


def _made(proto: tf.ConfigProto, place: str) -> dict[str, int]:
    """Has devices and pools made with these options; the threads that there are then, 0 for as many as cores."""
    real = {name: getattr(proto, field) for name, field in _THREADS.items()}
    try:
        tf.config.threading.set_intra_op_parallelism_threads(real['intra_op_threads'])  # what runs eagerly later asks for the same
    except RuntimeError:  # something has run eagerly
        found = tf.config.threading.get_intra_op_parallelism_threads()
        logging.warning(
            'TensorFlow has run something eagerly before %s, which made the threads inside operations: %s, not %d. '
            'Steps may take longer; begin with towers, or give tf.config.threading.set_intra_op_parallelism_threads(%d) first.',
            place, found or 'as many as cores', real['intra_op_threads'], real['intra_op_threads'],
        )  # fmt: skip
        real['intra_op_threads'] = found
    with tf.Session(graph=tf.Graph(), config=proto):
        return real


def _require_same(before: dict[str, Any], asked: dict[str, Any], where: str, place: str) -> None:
    other = [name for name in before if before[name] != asked[name]]
    if other:
        had, has = (', '.join(f'--{name}={_text(values[name])}' for name in other) for values in (before, asked))
        raise ValueError(
            f'This process had its options set at {where}: {had}; {place} asks for {has}. TensorFlow takes them once in a process; '
            'give the same, or use a process of its own.'
        )


def _text(value: Any) -> str:
    return ','.join(map(str, value)) if isinstance(value, tuple) else str(value)


def _place() -> str:
    """The line, outside this library, that asks."""
    return errors.users_line(traceback.extract_stack()) or 'an unknown place'
