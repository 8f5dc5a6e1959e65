"""The part of the commands that has to do with several machines: which task a process is, and serving."""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Literal

import tensorflow.compat.v1 as tf
from absl import flags

from scripts import _environment, _flags, _main
from towers import config as config_lib
from towers.jobs import serving
from towers.run import signals

Job = Literal['worker', 'ps']
_FAKES = 16  # CPU devices cost nothing, so a server without GPUs offers enough for any rehearsal


def define() -> flags.FlagValues:
    """The flags of a training and which task this is; those that a server has no use for are let be."""
    values = _flags.define()
    job = _flags.Option('job_name', 'worker', 'worker, or ps for one of --ps_hosts', kind=Job)
    index = _flags.Option('task_index', None, 'which of the hosts this is, from 0 on', kind=int)
    _flags.add(values, 'Task: which process of the cluster this is.', job, index)
    return values


def found(values: flags.FlagValues, config: config_lib.Config) -> tuple[config_lib.Config, _environment.Found | None]:
    """The configuration with its cluster, from --hosts_file or else from the environment where no flag names one.

    Returns:
      (the configuration, which task this process is by the environment; None = it says nothing)

    Raises:
      ValueError: the file or the environment says what can't be right.
    """
    if values.hosts_file and config.worker_hosts:
        raise ValueError(f'--hosts_file={values.hosts_file} and --worker_hosts are two ways to say one thing; give one.')
    named = _environment.sources(os.environ)
    given = '--hosts_file' if values.hosts_file else '--worker_hosts' if config.worker_hosts else None
    if given is not None:
        if named:
            _tell(f'The cluster is that of {given}', named)
        hosts = tuple(_environment.hosts_file(values.hosts_file)) if values.hosts_file else config.worker_hosts
        return dataclasses.replace(config, worker_hosts=hosts), None
    around = _environment.read(os.environ)
    if around is None:
        if named:
            _tell(f'{named[0]} names one machine', named[1:])
        return config, None
    _tell(f'{around.source} names {len(around.flags["worker_hosts"])} machines; this is {around.job} {around.index}', named[1:])
    flags_of_it = {name: tuple(value) if isinstance(value, list) else value for name, value in around.flags.items()}
    return dataclasses.replace(config, **flags_of_it), around


def _tell(what: str, ignored: Sequence[str]) -> None:
    """Says whose cluster is taken, and what else speaks of one."""
    logging.getLogger('absl').info('%s%s.', what, f'; not looked at: {", ".join(ignored)}' if ignored else '')


def offering(values: flags.FlagValues, config: config_lib.Config) -> config_lib.Config:
    """The configuration of a server: all that its machine has, where --num_gpus does not say how much."""
    if not values['num_gpus'].using_default_value:
        return config
    gpus = 0 if config.device == 'cpu' else len(tf.config.list_physical_devices('GPU'))
    return dataclasses.replace(config, num_gpus=gpus * config.towers_per_gpu or _FAKES)


def serve(config: config_lib.Config, job: str, index: int) -> int:
    """Serves a task; returns the exit code. Where the master was lost the process begins anew, on the same port."""
    ended = signals.run_in_worker(functools.partial(serving.serve, config, job, index), grace_secs=config.grace_secs)
    if ended in (serving.Ended.LOST, serving.Ended.BROKEN):
        _begin_anew()
    return _main.DONE if ended is serving.Ended.OVER else _main.STOPPED


def _begin_anew() -> None:
    """Replaces this process by a fresh one of the same command: a server can't be stopped, nor can what it holds be dropped."""
    logging.getLogger('absl').info('Beginning anew, to wait for the next master.')
    _flush()
    arguments = sys.orig_argv[1:] if sys.argv[0] in sys.orig_argv else sys.argv  # the latter where something forked for this command
    os.execv(sys.executable, [sys.executable, *arguments])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
