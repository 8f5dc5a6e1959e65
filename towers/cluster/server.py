"""A task's server: TensorFlow's own, on a port that is free, with a card that says what it is."""

import importlib.metadata
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import identity, listening
from towers.cluster import address, board, spec

_OWN_SECS, _FOREIGN_SECS = 30.0, 5.0  # for a server to answer its own process, at an address of this machine or another
_EXPOSED = '; it asks for no password and runs any graph it is sent: let only the machines of this run reach it.'
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


def _start(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto) -> tuple[tf.train.Server, dict[str, Any]]:
    found = address.check_port(task)
    try:
        server = _made(cluster, task, proto, found)
        server.start()
    except tf.errors.OpError as error:
        raise ValueError(
            f'{task} could not be started ({error.message.splitlines()[0]}); is {task.address} free and of this machine?'
        ) from None
    made = card(cluster, task, proto)
    try:
        with board.Board(task, target=server.target, timeout_secs=_OWN_SECS if all(found.values()) else _FOREIGN_SECS) as own:
            own.write(board.CARD, made)
            own.write(board.ORDERS, {})
    except tf.errors.OpError as error:
        raise ValueError(
            f'{task} is not reached by its own process ({type(error).__name__}); is {task.host} this machine? Start it there, or give '
            'an address of this machine (--master_host for that of the training).'
        ) from None
    return server, made


def _made(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto, found: Mapping[str, bool]) -> tf.train.Server:
    """A server, not started, that takes connections at its task's addresses alone, where that is possible; says where it does."""

    def make(_: int) -> tf.train.Server:
        return tf.train.Server(
            tf.train.ClusterSpec(cluster.jobs()), job_name=task.job, task_index=task.index, config=proto, start=False
        )  # it listens, and answers nothing yet

    why = address.why_open(cluster, task, found)
    if why is None:
        places = address.allowed(task, found)
        made, error = listening.kept_to(places, task.port, make)
        if error is None:
            is_local = all(listening.plain(place).is_loopback for place in places)
            logging.info('%s: listens at %s only%s', task, ', '.join(places), '.' if is_local else _EXPOSED)
            return made
        why = f'it can not be kept to {task.host} here ({error})'
    else:
        made = make(task.port)
    logging.warning("%s: TensorFlow's server listens on port %d of every address of this machine (%s)%s", task, task.port, why, _EXPOSED)
    return made


def card(cluster: spec.Cluster, task: spec.Task, proto: tf.ConfigProto) -> dict[str, Any]:
    """What a server says of itself, as JSON values."""
    return {
        'task': str(task),
        'token': cluster.token,
        'tensorflow': tf.__version__,
        'towers': _version(),
        'code': identity.code(),
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
    if differing:
        return f'it has {" and ".join(differing)}; install the same versions on all machines'
    if other.get('code') != own['code']:  # two checkouts may have one version
        return f'it has other code of towers ({other.get("code")}) than here ({own["code"]}); install the same on all machines'
    return None


def _version() -> str:
    try:
        return importlib.metadata.version('towers-tf')
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'
