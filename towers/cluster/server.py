"""A task's server: TensorFlow's own, on a port that is free, with a card that says what it is."""

import contextlib
import errno
import importlib.metadata
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers.cluster import board, spec

_OWN_SECS, _FOREIGN_SECS = 30.0, 5.0  # for a server to answer its own process, at an address of this machine or another
_COMPARED = ('tensorflow', 'towers')


# A server can't be stopped, so a later run of the same process takes the one that is there.
_started: dict[str, tuple[tf.train.Server, dict[str, Any]]] = {}


def start(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto) -> tuple[tf.train.Server, dict[str, Any]]:
    """Starts this process's server, which ends with the process only; a second call returns the same.

    Args:
      cluster: all tasks.
      task: the one that this process is.
      proto: its devices, memory and threads; those of sessions don't count.

    Returns:
      (the server, its card)

    Raises:
      ValueError: the port is taken, or the address is not this machine's.
    """
    key = repr((cluster, task))
    if key not in _started:
        _started[key] = _start(cluster, task, proto)
    return _started[key]


def is_started() -> bool:
    """Whether this process has a server."""
    return bool(_started)


def _start(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto) -> tuple[tf.train.Server, dict[str, Any]]:
    is_own = check_port(task)
    logging.warning(
        "%s: TensorFlow's server listens on port %d of every address of this machine, whatever host it is given, asks for no "
        'password and runs any graph it is sent; let only the machines of this run reach it.',
        task, task.port,
    )  # fmt: skip
    try:
        server = tf.train.Server(tf.train.ClusterSpec(cluster.jobs()), job_name=task.job, task_index=task.index, config=proto)
    except tf.errors.OpError as error:
        raise ValueError(
            f'{task} could not be started ({error.message.splitlines()[0]}); is {task.address} free and of this machine?'
        ) from None
    made = card(cluster, task, proto)
    try:
        with board.Board(task, target=server.target, timeout_secs=_OWN_SECS if is_own else _FOREIGN_SECS) as own:
            own.write(board.CARD, made)
            own.write(board.ORDERS, {})
    except tf.errors.OpError as error:
        raise ValueError(
            f'{task} is not reached by its own process ({type(error).__name__}); is {task.host} this machine? Start it there, or give '
            'an address of this machine (--master_host for that of the training).'
        ) from None
    return server, made


def card(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto) -> dict[str, Any]:
    """What a server says of itself, as JSON values."""
    return {
        'task': str(task),
        'token': cluster.token,
        'tensorflow': tf.__version__,
        'towers': _version(),
        'gpus': proto.device_count['GPU'] if 'GPU' in proto.device_count else len(tf.config.list_physical_devices('GPU')),
        'cpus': proto.device_count['CPU'],
        'pid': os.getpid(),
        'life': uuid.uuid4().hex,  # another one after each start
        'started': time.time(),
    }


def problem(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why a server with the card `other` can't be of the run whose master has the card `own`; None = it can."""
    if other['token'] != own['token']:
        return (
            'it is of another run: its --worker_hosts, --ps_hosts, --master_host or --run_token are not those given here; '
            'use the same, or other ports'
        )
    differing = [f'{name} {other.get(name)}, here {own[name]}' for name in _COMPARED if other.get(name) != own[name]]
    return f'it has {" and ".join(differing)}; install the same versions on all machines' if differing else None


def check_port(task: spec.Task) -> bool:
    """Makes sure that a task's port is free, without a wait; whether its address is one of this machine's.

    Raises:
      ValueError: it is taken, or the host's name is unknown.
    """
    try:
        found = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f'The host of {task} is not known here ({error}); correct its name or give its address.') from None
    family, kind, _, _, address = found[0]
    everywhere, is_own = '::' if family == socket.AF_INET6 else '0.0.0.0', True
    for place in dict.fromkeys((str(address[0]), everywhere)):
        with contextlib.closing(socket.socket(family, kind)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((place, task.port))
            except OSError as error:
                _explain(task, error, place)
                is_own = False
    return is_own


def _explain(task: spec.Task, error: OSError, place: str) -> None:
    if error.errno == errno.EADDRINUSE:
        raise ValueError(
            f'The port of {task} is taken ({task.address}): another process listens there, perhaps of an earlier run; '
            'end it, or give other ports.'
        ) from None
    if error.errno == errno.EADDRNOTAVAIL and not ipaddress.ip_address(place).is_unspecified:
        logging.warning('%s: %s is not an address of this machine; others reach it only where something forwards it.', task, place)
        return
    raise ValueError(f'{task} can not listen there ({error.strerror}); give another port.') from None


def _version() -> str:
    try:
        return importlib.metadata.version('towers-tf')
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'
