"""A session's place among the others, from its configuration: what it asks of this machine, and what it is given."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.cluster import spec
from towers.graph import devices, physical
from towers.run import session_config
from towers.sessions import admission, ledger, membership, memory

_ELSEWHERE = structs.Placement((), devices.HOST, fake=True, note='')

Given = TypeVar('Given', bound=config_lib.DeviceConfig)


@dataclasses.dataclass(frozen=True)
class Role:
    """What a session is.

    Attributes:
      name: 'master', 'evaluator', 'exporter', 'predictor' or 'worker'.
      which: of several evaluators.
      model_dir: its run directory.
      beside: name and devices of the sessions that will be started after it.
      remote: its towers run in other processes, which hold the GPUs.
    """

    name: str
    which: str = ''
    model_dir: str | None = None
    beside: tuple[tuple[str, config_lib.DeviceConfig], ...] = ()
    remote: bool = False


@contextlib.contextmanager
def joined(config: Given, role: Role) -> Iterator[tuple[Given, membership.Membership]]:
    """Admits and registers a session for the `with` block, before TensorFlow makes a device.

    Args:
      config: devices, memory and threads; any section that holds those of devices.
      role: what the session is.

    Yields:
      The configuration, with the share of the GPUs that `memory_plan` gave, and the session's place.

    Raises:
      Refused: it does not fit beside the others on this machine.
      ValueError: there are no such devices.
    """
    placement = _ELSEWHERE if role.remote else devices.place(config)
    asked = _entry(config, placement, role)
    reserved, planned = tuple(_coming(role, plan='off')), tuple(_coming(role, plan='auto'))
    machine = dataclasses.replace(_machine(placement), reserved=reserved, planned=planned)
    plan = config.memory_plan == 'auto'
    with membership.Membership(asked, machine, plan=plan) as member:
        if placement.fake and member.entry.gpus and config.gpu_memory_limit_mb is not None:
            text = (
                '--gpu_memory_limit_mb=%d counts as %.2f of a fake GPU: its size is not known, and the main memory, %d MiB, stands for it.'
            )
            logging.info(text, config.gpu_memory_limit_mb, member.entry.share, memory.limit_mb())
        if plan and member.entry.share is not None:
            text = '--memory_plan=auto: this session takes %.2f of each of its GPUs, as --gpu_memory_fraction would say%s.'
            logging.info(text, member.entry.share, '; so does each evaluator on GPUs that names no share' if planned else '')
        yield _given(config, member.entry), member


def master(config: config_lib.Config, evaluators: Sequence[config_lib.Config] = ()) -> Role:
    """The session of a training, with the evaluators that it will start beside it."""
    cluster = spec.of(config)
    remote = cluster is not None and cluster.master not in cluster.workers
    beside = tuple((each.eval_name, config_lib.evaluation_devices(each)) for each in evaluators)
    return Role('master', model_dir=config.model_dir, beside=beside, remote=remote)


def _machine(placement: structs.Placement) -> admission.Machine:
    if placement.fake:
        return admission.Machine(memory.limit_mb())
    return admission.Machine(memory.limit_mb(), physical.shown(len(tf.config.list_physical_devices('GPU'))))


def _coming(role: Role, *, plan: str) -> Iterator[ledger.Entry]:
    """What the sessions to be started with this memory plan will hold; of one whose devices are not there it says so itself."""
    for name, section in role.beside:
        if section.memory_plan == plan:
            placement = _ELSEWHERE
            with contextlib.suppress(ValueError):
                placement = devices.place(section)
            yield dataclasses.replace(_entry(section, placement, Role('evaluator', name, role.model_dir)), is_coming=True)


def _entry(config: config_lib.DeviceConfig, placement: structs.Placement, role: Role) -> ledger.Entry:
    proto = session_config.make(config, placement)
    return ledger.Entry(
        role=role.name,
        name=role.which,
        model_dir=os.path.abspath(role.model_dir) if role.model_dir else '',
        gpus=tuple(number for _, number in placement.gpus),
        fake=placement.fake,
        share=_share(config, placement),
        memory_mb=config.host_memory_mb,
        intra_op_threads=proto.intra_op_parallelism_threads,
        inter_op_threads=proto.inter_op_parallelism_threads,
    )


def _share(config: config_lib.DeviceConfig, placement: structs.Placement) -> float | None:
    """Of each GPU; the whole of a real one where none is named, as TensorFlow takes it, and nothing of a fake one."""
    whole = None if placement.fake else 1.0
    if config.gpu_memory_limit_mb is None:
        return config.gpu_memory_fraction or whole
    sizes: list[int] = [memory.limit_mb()] if placement.fake else _sizes(placement)
    taken = config.gpu_memory_limit_mb * config.towers_per_gpu
    least = min(sizes, default=0)
    return min(taken / least, 1.0) if least else whole


def _sizes(placement: structs.Placement) -> list[int]:
    """MiB of each of the placement's GPUs."""
    known = physical.query()
    return [known[number][1] for _, number in placement.gpus if number < len(known)]


def _given(config: Given, entry: ledger.Entry) -> Given:
    """With the share that a plan gave, which evaluators to come take over where they name none."""
    if config.memory_plan == 'off' or entry.share is None:
        return config
    given: dict[str, Any] = {'gpu_memory_fraction': entry.share, 'gpu_memory_limit_mb': None, 'memory_plan': 'off'}
    return dataclasses.replace(config, **given)
