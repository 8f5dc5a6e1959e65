"""Where the towers run when there are several machines: the same devices on each, by longer names. Part of the stage `devices`."""

import dataclasses
from collections.abc import Sequence

from towers import config as config_lib
from towers import structs


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine with towers.

    Attributes:
      device: what its devices' names begin with: '/job:worker/task:1'.
      name: for messages: 'worker 1 at host:port'.
      gpus: GPUs that it offers, virtual ones included.
      cpus: CPU devices that it offers.
    """

    device: str
    name: str
    gpus: int
    cpus: int


def place(config: config_lib.DeviceConfig, machines: Sequence[Machine], *, master: str, ps: Sequence[str] = ()) -> structs.Placement:
    """Gives each of `config.num_gpus` towers a machine its device; the variables are on the master's CPU, or on `ps`.

    Towers are numbered machine by machine. `auto` takes GPUs where every machine has some.

    Args:
      config: how many towers on each machine, and on what.
      machines: at least one.
      master: what the names of the master's devices begin with.
      ps: the same of tasks that hold the variables.

    Raises:
      ValueError: a machine offers fewer devices than it should have towers.
    """
    asked = config.num_gpus
    without = [machine.name for machine in machines if not machine.gpus]
    on_gpus = config.device == 'gpu' or (config.device == 'auto' and not without)
    for machine in machines:
        # One CPU device is left to what is not a tower's, but where there is only one.
        offered = machine.gpus if on_gpus else max(machine.cpus - 1, 1)
        if offered < asked:
            what = 'GPUs' if on_gpus else 'CPU devices as fake GPUs'
            raise ValueError(
                f'{asked} {what} asked on each machine, {machine.name} offers {offered}; start its scripts/worker.py with '
                f'--num_gpus={asked}, or use --num_gpus={max(offered, 1)} here.'
            )
    kind, first = ('gpu', 0) if on_gpus else ('cpu', 1 if asked > 1 else 0)
    towers = tuple(
        structs.Tower(index * asked + number, (f'{machine.device}/{kind}:{first + number}',), f'{machine.device}/cpu:0')
        for index, machine in enumerate(machines)
        for number in range(asked)
    )
    reason = '' if on_gpus or config.device == 'cpu' else f': no GPU was found on {", ".join(without)}'
    what = 'GPUs' if on_gpus else 'CPU devices as fake GPUs' if asked > 1 else 'the CPU'
    note = f'{len(towers)} towers on {len(machines)} machines, {asked} on {what} of each{reason}.'
    return structs.Placement(towers, f'{master}/cpu:0', not on_gpus, note, ps=tuple(f'{task}/cpu:0' for task in ps))
