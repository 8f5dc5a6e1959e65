"""A training's side: a consistent copy of its variables, taken between two steps and handed to a server of this process.

The server has two buffers. Version n is written to buffer n modulo 2: first `begun` becomes n, then the buffer is written, then
`version` becomes n. So the buffer of the newest version is left alone until the version after the next begins, which a reader can see.
"""

import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import identity, listening, shadows
from towers.live import naming

_LIMIT_MS = 60_000  # for anything that is asked of the server
_CLOSE_SECS = 60.0
_servers: list[tf.distribute.Server] = []  # a server can't be stopped, so a later run of the same process takes the one that is there


def _serve() -> tf.distribute.Server:
    """A server for this machine alone."""
    # It makes devices of its own: one CPU, and no GPU, which the training has.
    options = tf.ConfigProto(device_count={'CPU': 1, 'GPU': 0}, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)

    def make(port: int) -> tf.distribute.Server:
        return tf.distribute.Server({'localhost': [f'localhost:{port}']}, config=options, start=False)  # it answers nothing yet

    server, error = listening.kept_to(listening.LOOPBACK, 0, make)
    if error is not None:
        logging.warning(
            "TensorFlow's server of --serve_snapshots listens on port %d of every address of this machine, as it can not be kept to the "
            'loopback here (%s), and runs any graph it is sent; let nobody else reach it.',
            _port(server), error,
        )  # fmt: skip
    server.start()
    return server


def _port(server: tf.distribute.Server) -> int:
    return int(server.target.rpartition(':')[2])


class Publisher:
    """Serves the variables of a session; a failure is a WARNING, and the training goes on.

    Args:
      variables: name -> variable.
      model_dir: the run directory, whose `sessions/` says where the server is.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], model_dir: str) -> None:
        self._variables = dict(variables)
        self._model_dir = model_dir
        self._token = secrets.token_hex(16)
        self._version = 0
        self._take: Any = None
        self._fetch: Any = None
        self._drop: Any = None
        self._writes: list[Any] = []
        self._session: Any = None
        self._thread: threading.Thread | None = None
        self._failed = False

    def build(self) -> None:
        """Adds the shadows to the current graph."""
        with tf.name_scope('live/'), tf.device('/cpu:0'):
            values = [shadows.value_of(variable) for variable in self._variables.values()]
            shadow = shadows.Shadow(values, device='/cpu:0', name='live_shadow')
            self._operations = shadow.keep(), shadow.held, shadow.drop()

    def begin(self, session: tf.Session) -> None:
        """Makes ready for a session whose variables are set, and says where they are served."""
        take, held, drop = self._operations
        self._take = session.make_callable(take)
        self._fetch = session.make_callable(held, accept_options=True)
        self._drop = session.make_callable(drop, accept_options=True)
        try:
            port = self._connect()
            pid = os.getpid()
            place = naming.Place(port, self._token, pid, identity.start_of(pid), identity.machine())
            naming.write(self._model_dir, place)
        except (OSError, tf.errors.OpError) as error:
            self._warn(error)
            return
        logging.info('Variables are served on port %d of the loopback (--serve_snapshots).', port)

    def offer(self, step: int) -> None:
        """Serves the variables of this moment, between two steps, unless the last ones are still being handed over."""
        if self._failed or (self._thread is not None and self._thread.is_alive()):
            return
        self._take()
        self._thread = threading.Thread(target=self._hand_over, args=(step,), name='towers-live', daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being handed over, for a minute at most."""
        if self._thread is not None:
            self._thread.join(_CLOSE_SECS)

    def close(self) -> None:
        """Serves no more."""
        self.wait()
        naming.remove(self._model_dir, os.getpid())
        session, self._session = self._session, None
        if session is not None:
            try:
                session.run(self._forget)
                session.close()
            except (tf.errors.OpError, RuntimeError) as error:
                self._warn(error)

    def _connect(self) -> int:
        """Makes the server and what writes to it; returns its port."""
        if not _servers:
            _servers.append(_serve())
        [server] = _servers
        with tf.Graph().as_default() as graph:
            self._session = tf.Session(server.target, graph=graph, config=tf.ConfigProto(operation_timeout_in_ms=_LIMIT_MS))
            counts = {name: naming.variable(self._token, name, tf.int64, []) for name in ('begun', 'version')}
            number, step = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [])
            given = [tf.placeholder(each.dtype.base_dtype, each.shape) for each in self._variables.values()]
            made = [self._written(place, counts, (number, step), given) for place in range(naming.BUFFERS)]
            zero = [tf.raw_ops.AssignVariableOp(resource=count, value=tf.zeros([], tf.int64)) for count in counts.values()]
            handles = [*counts.values(), *[handle for _, all_of_it in made for handle in all_of_it]]
            self._forget = tf.group(*[tf.raw_ops.DestroyResourceOp(resource=handle) for handle in handles])
            graph.finalize()
        self._session.run(zero)
        self._writes = [self._session.make_callable(operation, [number, step, *given]) for operation, _ in made]
        return _port(server)

    def _written(
        self, place: int, counts: Mapping[str, tf.Tensor], numbers: tuple[tf.Tensor, tf.Tensor], given: list[tf.Tensor]
    ) -> tuple[tf.Operation, list[tf.Tensor]]:
        """The operation that writes a version to a buffer, and the buffer's variables."""
        number, step = numbers
        values = {'step': step, **{f'values/{name}': value for name, value in zip(self._variables, given, strict=True)}}
        handles = [naming.variable(self._token, naming.buffered(place, name), value.dtype, value.shape) for name, value in values.items()]
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=counts['begun'], value=number)]):
            done = [tf.raw_ops.AssignVariableOp(resource=h, value=tf.identity(v)) for h, v in zip(handles, values.values(), strict=True)]
        with tf.control_dependencies(done):
            return tf.raw_ops.AssignVariableOp(resource=counts['version'], value=number), handles

    def _hand_over(self, step: int) -> None:
        """From the shadows to the server, in a thread beside the training's steps."""
        here = tf.RunOptions(inter_op_thread_pool=-1)  # in this thread: the training keeps its own
        try:
            values = self._fetch(options=here)
            self._drop(options=here)
            self._version += 1
            self._writes[self._version % naming.BUFFERS](self._version, step, *values)
        except (tf.errors.OpError, RuntimeError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._failed:
            logging.warning('Variables are not served any more, and the training goes on: %s.', ' '.join(str(error).split())[:300])
        self._failed = True
        naming.remove(self._model_dir, os.getpid())  # so that nobody waits for the next version
