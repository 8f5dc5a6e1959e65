"""Two notes on every server that others read and write through TensorFlow's own runtime: its card and its orders.

A server of TensorFlow says nothing of itself but its devices. So each process puts two string variables on its own server,
in a container of their own, which no training touches: a card (what it is, versions, which run) that it writes once, and
orders that the master writes every second or two, by which a worker knows that there is a master.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from towers.cluster import spec

CARD, ORDERS = 'card', 'orders'
_CONTAINER = 'towers_board'


class Board(contextlib.AbstractContextManager):
    """The notes of one task's server, over a connection of their own that involves no other task.

    Args:
      task: whose.
      target: of the server; None = its address over gRPC.
      timeout_secs: limit of each read and write, the connection included.
    """

    def __init__(self, task: spec.Task, *, target: str | None = None, timeout_secs: float):
        self._target = target or f'grpc://{task.address}'
        self._proto = proto = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * timeout_secs)), device_filters=[task.device])
        proto.rpc_options.use_rpc_for_inprocess_master = True  # no limit holds otherwise
        self._read, self._write = {}, {}
        with tf.Graph().as_default() as self._graph, tf.device(f'{task.device}/cpu:0'):
            self._text = tf.placeholder(tf.string, [])
            for name in (CARD, ORDERS):
                note = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=name, container=_CONTAINER)
                self._write[name] = tf.raw_ops.AssignVariableOp(resource=note, value=self._text)
                self._read[name] = tf.raw_ops.ReadVariableOp(resource=note, dtype=tf.string)
        self._session = self._connected()

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(tf.errors.OpError):
            self._session.close()

    def connect_anew(self) -> None:
        """For the server may be another one by now, and a connection outlives none."""
        self.__exit__()
        self._session = self._connected()

    def _connected(self) -> tf.Session:
        return tf.Session(self._target, graph=self._graph, config=self._proto)

    def read(self, name: str) -> dict[str, Any]:
        """A note.

        Raises:
          tf.errors.OpError: the server does not answer in time, is no such task, or has no such note.
        """
        return json.loads(self._session.run(self._read[name]))

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Replaces a note.

        Raises:
          tf.errors.OpError: the server does not answer in time, or is no such task.
        """
        self._session.run(self._write[name], {self._text: json.dumps(dict(values))})
