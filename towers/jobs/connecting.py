"""Where a program runs: on this machine, or on the machines of a cluster once they all answer."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import manifest
from towers.cluster import pulse, readiness, server, spec
from towers.graph import devices, machines
from towers.hooks import rejoin
from towers.run import process, remote

_STEP_SECS = 600.0  # where no limit is given
_ANY_SECS = 24 * 3600.0  # where none is wanted
_FIRST_STEPS = 10  # so many of them for what TensorFlow does before the first step
_PATIENCE, _RECOVERY_SECS = 1.5, 30.0
_SESSION_SECS = 10.0  # one attempt to make a session
_CONNECT_SECS = 120.0  # all of them
_ANSWER_SECS = 3.0
_SAVING_SECS = 15.0  # for a session that saves what a lost one has left
_CHANNELS = 4  # connections to each machine: one alone does not fill a fast network


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a program runs.

    Attributes:
      placement: devices of the towers and the variables.
      proto: the session's options.
      target: of the server that the session is made on; empty = this process alone.
      step_secs: limit of a call of the session in the runtime's own count, more for the first; only with a target.
      hooks: what a training here calls at its steps.
    """

    placement: structs.Placement
    proto: tf.ConfigProto
    target: str = ''
    step_secs: float = 0.0
    hooks: tuple[tf.train.SessionRunHook, ...] = ()

    def watched(self, config: config_lib.Config) -> config_lib.Config:
        """The configuration of a watch over the run's calls, which leaves the runtime time to end one by itself."""
        given, steps = config.step_timeout_secs, config.steps_per_run
        if given == 0 or not (self.target or steps > 1):
            return config
        secs = _PATIENCE * self.step_secs + _RECOVERY_SECS if self.target else steps * (_STEP_SECS if given is None else given)
        return dataclasses.replace(config, step_timeout_secs=secs)

    def session(self, graph: tf.Graph) -> tf.Session:
        """A session that runs `graph` here."""
        if self.target:
            return remote.RemoteSession(self.target, graph, self.proto, self.step_secs)
        return tf.Session(graph=graph, config=self.proto)


def local(config: config_lib.DeviceConfig) -> Site:
    """The towers on this machine.

    Raises:
      ValueError: there are fewer devices than are asked for.
    """
    placement = devices.place(config)
    return Site(placement, process.claim(config, placement))


def fixed(config: config_lib.Config) -> config_lib.Config:
    """The configuration with a global batch that stays when machines are lost; as it is where none may be left out.

    Raises:
      ValueError: the learning rate would change with the number of machines.
    """
    if config.min_workers is None:
        return config
    if config.lr_scaling != 'none':
        raise ValueError(
            f'--min_workers={config.min_workers} keeps the numbers when machines are lost, got --lr_scaling={config.lr_scaling}, which '
            'would change them; give the learning rate itself.'
        )
    size = config.examples_per_step(len(config.worker_hosts) * config.num_gpus)
    return dataclasses.replace(config, batch_size=None, global_batch_size=size)


class Link:
    """The master's hold on the other tasks of its cluster.

    Args:
      config: what was asked.
      cluster: all tasks.
      beating: the signs of life that it gives.
      stop: ends waits when set.
    """

    def __init__(self, config: config_lib.Config, cluster: spec.Cluster, beating: pulse.Pulse, stop: threading.Event):
        self._config, self._cluster, self._pulse, self._stop = config, cluster, beating, stop
        self._server, self._card = started(config, cluster, cluster.master)
        self._cards: dict[spec.Task, readiness.Card] = {}
        self._dropped: set[spec.Task] = set()

    def ready(self) -> None:
        """Waits for all tasks, and takes note of which processes they are.

        Raises:
          ClusterError: one is absent.
          ValueError: one is of another run, or has other versions.
        """
        self._cards = readiness.wait(self._cluster.others, self._card, self._config.connect_timeout_secs, self._stop)

    def site(self, config: config_lib.Config) -> Site:
        """The towers on all machines that are there.

        Args:
          config: how many towers on each, and on what; how long a step may take.

        Raises:
          ValueError: a machine has fewer devices than are asked for.
        """
        found = [self._machine(task) for task in self._cluster.workers if task not in self._dropped]
        ps = [task.device for task in self._cluster.ps if config.ps_hosts]
        placement = machines.place(config, found, master=self._cluster.master.device, ps=ps)
        given = config.step_timeout_secs
        step_secs = _STEP_SECS if given is None else given or _ANY_SECS
        proto = self._options(tf.ConfigProto(allow_soft_placement=not placement.fake), max(_FIRST_STEPS, config.steps_per_run) * step_secs)
        back = [rejoin.RejoinHook(self._returned, functools.partial(_saved, str(config.model_dir)))] if self._dropped else []
        return Site(placement, proto, self._server.target, config.steps_per_run * step_secs, tuple(back))

    def lost(self) -> dict[spec.Task, str]:
        """The tasks that don't answer, or are another process than when they were `ready`, and why; empty = none."""
        found, silent = readiness.answers(self._there(), _ANSWER_SECS, self._stop)
        restarted = {task: 'it was started again' for task, card in found.items() if card['life'] != self._cards[task]['life']}
        return {**silent, **restarted}

    def back(self) -> None:
        """Waits until all tasks answer, and a session with all of them can be made.

        Workers that were left out before and are back take part. Those that do not come back within `worker_grace_secs` are left
        out where `min_workers` others are there. It returns early where the run is to stop.

        Raises:
          ClusterError: a task that is needed does not come back.
          ValueError: one is of another run, or has other versions.
        """
        found, silent = readiness.answers(self._there(), self._config.worker_grace_secs, self._stop)
        if self._stop.is_set():
            return
        if returned := [task for task in self._dropped if self._pulse.answers(task)]:
            self._take_in(returned)
        if silent:
            self._drop(silent)
        readiness.require(found, self._card)
        self._cards.update(found)
        if not readiness.retried(functools.partial(self._list, self._options), _CONNECT_SECS, self._stop) and not self._stop.is_set():
            raise spec.ClusterError('All tasks answer, but no session over all of them could be made.')

    def rejoin(self) -> None:
        """Takes the workers in again that were left out and answer now.

        Raises:
          ValueError: one is of another run, or has other versions.
        """
        self._take_in(tuple(self._dropped))

    def _take_in(self, tasks: Sequence[spec.Task]) -> None:
        found, _ = readiness.answers(tasks, _ANSWER_SECS, self._stop)
        readiness.require(found, self._card)
        self._cards.update(found)
        self._dropped -= found.keys()
        logging.warning('Back in the run: %s.', ', '.join(map(str, found)) or 'nobody')

    def _there(self) -> tuple[spec.Task, ...]:
        """The other tasks that take part."""
        return tuple(task for task in self._cluster.others if task not in self._dropped)

    def _returned(self) -> bool:
        return any(self._pulse.answers(task) for task in self._dropped)

    def _drop(self, silent: Mapping[spec.Task, str]) -> None:
        """Leaves tasks out that did not come back, where that is allowed."""
        names = '; '.join(f'{task} ({why})' for task, why in silent.items())
        left = [task for task in self._cluster.workers if task not in silent and task not in self._dropped]
        least = self._config.min_workers
        if least is None or len(left) < least or any(task.job != 'worker' for task in silent):
            rest = '' if least is None else f' --min_workers={least} needs {least} machines with towers, {len(left)} of them there.'
            raise spec.ClusterError(f'Not back within {self._config.worker_grace_secs:g} s (--worker_grace_secs): {names}.{rest}')
        logging.warning('Going on with %d machines, until the others are back: without %s.', len(left), names)
        self._dropped |= silent.keys()

    def session(self, graph: tf.Graph, proto: tf.ConfigProto, holders: Sequence[str]) -> tf.Session:
        """A session of this process and a few tasks, whoever else is there.

        Args:
          graph: to run.
          proto: its options.
          holders: a CPU of each of the tasks.

        Raises:
          tf.errors.OpError: one does not answer.
        """

        def alone(proto: tf.ConfigProto, secs: float) -> tf.ConfigProto:
            made = tf.ConfigProto()
            made.CopyFrom(proto)
            names = (self._cluster.master.device, *[holder.removesuffix('/cpu:0') for holder in holders])
            made.device_filters[:] = dict.fromkeys(names)
            return _remote(made, secs)

        if not readiness.retried(functools.partial(self._list, alone), _SAVING_SECS, threading.Event()):
            raise tf.errors.UnavailableError(None, None, f'no session within {_SAVING_SECS:g} s')
        return remote.RemoteSession(self._server.target, graph, alone(proto, _STEP_SECS), _STEP_SECS)

    def finish(self) -> None:
        """Says that the run is over, so that every server ends."""
        self._pulse.finish()

    def _list(self, options: Callable[[tf.ConfigProto, float], tf.ConfigProto]) -> None:
        with (
            tf.Graph().as_default() as graph,
            tf.Session(self._server.target, graph=graph, config=options(tf.ConfigProto(), _SESSION_SECS)) as session,
        ):
            session.list_devices()

    def _options(self, proto: tf.ConfigProto, secs: float) -> tf.ConfigProto:
        """A session's options; devices, memory and threads are those of the servers."""
        if self._dropped:  # a session is made with all tasks that it may see
            proto.device_filters.extend(task.device for task in (self._cluster.master, *self._there()))
        return _remote(proto, secs)

    def _machine(self, task: spec.Task) -> machines.Machine:
        card = self._card if task == self._cluster.master else self._cards[task]
        return machines.Machine(task.device, str(task), int(card['gpus']), int(card['cpus']))


def started(config: config_lib.DeviceConfig, cluster: spec.Cluster, task: spec.Task) -> tuple[tf.train.Server, Mapping[str, Any]]:
    """This process's server, with the devices that its task needs, and its card.

    Raises:
      ValueError: the port is taken, or there are fewer devices than asked for.
    """
    if task not in cluster.workers:
        config = config_lib.DeviceConfig(
            num_gpus=1, device='cpu', intra_op_threads=config.intra_op_threads, inter_op_threads=config.inter_op_threads
        )
    return server.start(cluster, task, process.claim(config, devices.place(config)))


@contextlib.contextmanager
def connected(config: config_lib.Config, stop: threading.Event) -> Iterator[Link | None]:
    """The cluster that the configuration names, all of whose tasks are there; None where it names none.

    Raises:
      ClusterError: a task is absent.
      ValueError: a port is taken, or a task is of another run, or has other versions.
    """
    cluster = spec.of(config)
    if cluster is None:
        yield None
        return
    with pulse.Pulse(cluster.others) as beating:
        link = Link(config, cluster, beating, stop)
        link.ready()
        beating.start()
        logging.info('All %d other tasks are there.', len(cluster.others))
        yield link


def _saved(model_dir: str) -> int:
    """Step of the newest checkpoint, 0 without any."""
    return max((found.step for found in manifest.all(model_dir)), default=0)


def _remote(proto: tf.ConfigProto, secs: float) -> tf.ConfigProto:
    proto.operation_timeout_in_ms = int(1000 * secs)
    proto.rpc_options.use_rpc_for_inprocess_master = True  # no limit holds otherwise
    proto.rpc_options.num_channels_per_target = _CHANNELS
    return proto
