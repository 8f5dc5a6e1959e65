"""Where the towers run: real GPUs, or CPU devices that stand in for them."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.graph import physical

HOST = '/cpu:0'


def place(config: config_lib.DeviceConfig, *, gpus: int | None = None) -> structs.Placement:
    """Gives each tower its device.

    `auto` takes GPUs where there is at least one, else CPU devices; several towers on the CPU have `/cpu:1`, `/cpu:2`, ...
    and leave `/cpu:0` to the variables, a single one has `/cpu:0`. With `towers_per_gpu` the GPUs are virtual ones.

    Args:
      config: how many towers and on what.
      gpus: number of GPUs that CUDA shows of this machine; None = ask TensorFlow.

    Raises:
      ValueError: GPUs are wanted and there are fewer than the towers need, or others than `visible_gpus`.
    """
    asked = config.num_gpus
    found = 0 if config.device == 'cpu' else len(tf.config.list_physical_devices('GPU')) if gpus is None else gpus
    if config.device == 'gpu' or found:
        _require_gpus(config, found)
        taken = physical.gpus(config.visible_gpus, config.gpus_needed, shown=physical.shown(found))
        note = f'{_count(asked)} on {_plural(len(taken), "GPU")}: {_numbers(taken)}.'
        return _placement([f'/gpu:{i}' for i in range(asked)], fake=False, note=note, gpus=taken)
    _require_no_gpu_options(config)
    devices = [f'/cpu:{i + 1}' for i in range(asked)] if asked > 1 else [HOST]
    taken = tuple(enumerate(config.visible_gpus or range(config.gpus_needed)))
    what = 'CPU devices as fake GPUs' if asked > 1 else 'the CPU'
    note = f'{_count(asked)} on {what}' + (', as --device=cpu asks' if config.device == 'cpu' else ': no GPU was found')
    note += f'; {_numbers(taken)}.' if config.visible_gpus else '.'
    return _placement(devices, fake=True, note=note, gpus=taken)


def check_devices(session: tf.Session, placement: structs.Placement) -> None:
    """Makes sure that the session has each device that the placement names; soft placement would move a tower silently.

    Raises:
      ValueError: some are missing.
    """
    found = [device.name for device in session.list_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in found]
    wanted = [placement.parameter_device, *(d for tower in placement.towers for d in (*tower.devices, tower.host))]
    missing = [name for name in dict.fromkeys(wanted) if not any(_matches(tf.DeviceSpec.from_string(name), spec) for spec in specs)]
    if missing:
        raise ValueError(
            f'The placement wants {", ".join(missing)}, the session has {", ".join(found)}; '
            "make the session with session_config.make's options, or ask for fewer towers."
        )


def _require_no_gpu_options(config: config_lib.DeviceConfig) -> None:
    """Fake GPUs have shares and places; no kernels, allocator or threads of their own."""
    for name, what in config_lib.GPUS_ALONE.items():
        value = getattr(config, name)
        if value != getattr(config_lib.DeviceConfig, name):
            flag = f'--{"" if value else "no"}{name}' if isinstance(value, bool) else f'--{name}={value}'
            raise ValueError(f'{flag} {what}, got towers on the CPU; leave it out, or use --device=gpu.')


def _require_gpus(config: config_lib.DeviceConfig, found: int) -> None:
    asked = config.gpus_needed
    if found >= asked:
        return
    fewer = f'--num_gpus={found * config.towers_per_gpu}, or ' if found else ''
    why = '' if found else ' (--verbose shows why TensorFlow finds none)'
    fakes = 'fake GPUs' if config.num_gpus > 1 else 'a tower'
    raise ValueError(
        f'{_plural(asked, "GPU")} asked, {found} found{why}; use {fewer}--device=cpu for {fakes} on the CPU.',
    )


def _placement(devices: Sequence[str], *, fake: bool, note: str, gpus: tuple[tuple[int, int], ...]) -> structs.Placement:
    towers = tuple(structs.Tower(index, (device,), HOST) for index, device in enumerate(devices))
    return structs.Placement(towers, HOST, fake, note, gpus)


def _numbers(taken: Sequence[tuple[int, int]]) -> str:
    return ', '.join(f'logical {logical} = physical {number}' for logical, (_, number) in enumerate(taken))


def _matches(wanted: tf.DeviceSpec, found: tf.DeviceSpec) -> bool:
    """Whether `found` has every part that `wanted` names."""
    parts = ('job', 'replica', 'task', 'device_type', 'device_index')
    return all(getattr(wanted, part) in (None, getattr(found, part)) for part in parts)


def _plural(number: int, what: str) -> str:
    return f'{number} {what}' + ('' if number == 1 else 's')


def _count(towers: int) -> str:
    return _plural(towers, 'tower')
