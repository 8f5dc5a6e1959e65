"""A session's place among the others, from its configuration: what it asks of this machine, and what it is given."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.cluster import spec
from towers.config import evaluation as eval_config
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
      coming: sessions that will be started after it and share its GPUs.
      remote: its towers run in other processes, which hold the GPUs.
    """

    name: str
    which: str = ''
    model_dir: str | None = None
    coming: int = 0
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
    machine = _machine(placement)
    divide = 1 + role.coming if config.memory_plan == 'auto' else 0
    with membership.Membership(_entry(config, placement, role), machine, divide=divide) as member:
        yield _given(config, member.entry, role), member


def master(config: config_lib.Config) -> Role:
    """The session of a training."""
    own = [fields.get('eval_device', config.eval_device) for fields in eval_config.specs(config.evaluator).values()]
    beside = [config.eval_device] * config.evaluate + own
    cluster = spec.of(config)
    remote = cluster is not None and cluster.master not in cluster.workers
    return Role('master', model_dir=config.model_dir, coming=sum(device != 'cpu' for device in beside), remote=remote)


def _machine(placement: structs.Placement) -> admission.Machine:
    if placement.fake:
        return admission.Machine(memory.limit_mb())
    return admission.Machine(memory.limit_mb(), physical.shown(len(tf.config.list_physical_devices('GPU'))))


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


def _given(config: Given, entry: ledger.Entry, role: Role) -> Given:
    """With the share that a plan gave; evaluators to come get as much."""
    if config.memory_plan == 'off' or entry.share is None:
        return config
    given: dict[str, Any] = {'gpu_memory_fraction': entry.share, 'gpu_memory_limit_mb': None, 'memory_plan': 'off'}
    if role.coming and getattr(config, 'eval_gpu_memory_fraction', entry.share) is None:
        given['eval_gpu_memory_fraction'] = entry.share
    return dataclasses.replace(config, **given)
