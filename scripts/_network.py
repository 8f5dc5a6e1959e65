"""One training step over many machines as events in time: weights go out, towers compute, gradients come in, the update is made.

Every tensor is an event of its own. It occupies one thing after another: the network of the hub (the task that holds a
variable), the bus between a machine's memory and its GPUs, the hub's memory. Bus and memory serve one at a time, in order of
arrival. The network is shared in equal parts by the machines that are sent to, or that send, as TCP does; to or from each of
them one tensor crosses at a time, and which of those that wait comes next is chance, as it is in gRPC. The links of the
other machines carry less than the hub's and are never waited for. A step begins when the one before has ended, as
`session.run` does.
"""

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence

from scripts import _links

_UPDATE_PASSES = 3  # over the memory, for each variable: read value and slot, write


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable as a tower sees it in time.

    Attributes:
      name: of the variable.
      bytes: its size.
      needed: seconds of the tower's work done before it is read.
      ready: seconds of the tower's work done when its gradient is there.
    """

    name: str
    bytes: float
    needed: float
    ready: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step is made on.

    Attributes:
      machines: how many.
      towers: on each.
      strategy: 'parameter_server' or 'mirrored'.
      ps: tasks that hold the variables of parameter_server, each on a machine of its own; 0 = the master, on the first machine.
      network: bytes a second of each machine's link, in each direction.
      bus: bytes a second between a machine's memory and its GPUs, all together, in each direction.
      memory: bytes a second of a machine's memory.
      message: seconds that one tensor costs whoever sends it, beside its bytes.
      dispatch: seconds that the master needs for each machine and step.
    """

    machines: int
    towers: int
    strategy: str = 'parameter_server'
    ps: int = 0
    network: float = 12.5e9
    bus: float = 12e9
    memory: float = 20e9
    message: float = 50e-6
    dispatch: float = 100e-6


@dataclasses.dataclass(frozen=True)
class Step:
    """What came of a simulated step.

    Attributes:
      secs: its length.
      work: seconds that one tower computes, alone.
      waits: what was waited for -> share of the step, along the way from its begin to what ended last; the towers' work among them.
    """

    secs: float
    work: float
    waits: dict[str, float]

    @property
    def efficiency(self) -> float:
        """Share of the step that a tower computes."""
        return self.work / self.secs

    @property
    def bottleneck(self) -> str:
        """What was waited for longest."""
        return max(self.waits, key=self.waits.__getitem__)


class _Simulation:
    """One step. The towers of a machine do the same at the same time, so one stands for all of them."""

    def __init__(self, weights: Sequence[Weight], work: float, setting: Setting) -> None:
        self._weights, self._work, self._setting = list(weights), work, setting
        self._clock = _links.Clock()
        self._sums: collections.Counter[int] = collections.Counter()
        self._there: list[set[int]] = [set() for _ in range(setting.machines)]
        self._waiting: list[int | None] = [None] * setting.machines
        self._place = [0] * setting.machines
        points = [(weight.needed, 0, at) for at, weight in enumerate(weights)] if not self._is_mirrored else []
        self._points = sorted([*points, *[(weight.ready, 1, at) for at, weight in enumerate(weights)], (work, 2, -1)])
        self._hubs = _spread([weight.bytes for weight in weights], setting.ps)
        self._links: dict[str, _links.Link] = {}
        self._paths: dict[tuple[str, int], _links.Path] = {}
        self._chance = random.Random(0)

    @property
    def _is_mirrored(self) -> bool:
        return self._setting.strategy == 'mirrored'

    def run(self) -> Step:
        self._clock.after(self._setting.dispatch * self._setting.machines, 'the master', self._begin)
        self._clock.run()
        shares: dict[str, float] = collections.defaultdict(float)
        for thing, secs in self._clock.waits().items():
            shares[thing.partition('#')[0]] += secs / self._clock.now
        return Step(self._clock.now, self._work, dict(shares))

    def _begin(self) -> None:
        order = [] if self._is_mirrored else sorted(range(len(self._weights)), key=lambda at: self._weights[at].needed)
        for at in order:
            for machine in range(self._setting.machines):
                self._cross('network out', at, machine, functools.partial(self._to_towers, at, machine))
        for machine in range(self._setting.machines):
            self._advance(machine)

    def _cross(self, way: str, at: int, machine: int, then: Callable[[], None]) -> None:
        """A tensor between the hub and a machine; what stays on the hub's own machine goes through its memory."""
        size, setting = self._weights[at].bytes, self._setting
        if machine == 0 and not setting.ps:
            self._clock.after(size / setting.memory + setting.message, 'memory of the hub', then)
            return
        self._path(f'{way}#{self._hubs[at]}', machine).send(size / setting.network + setting.message, then)

    def _path(self, link: str, machine: int) -> _links.Path:
        if (link, machine) not in self._paths:
            self._paths[link, machine] = _links.Path(self._links.setdefault(link, _links.Link(link, self._clock)), self._chance)
        return self._paths[link, machine]

    def _to_towers(self, at: int, machine: int) -> None:
        secs = self._setting.towers * self._weights[at].bytes / self._setting.bus
        self._clock.occupy(f'bus to the towers#{machine}', secs, functools.partial(self._arrived, at, machine))

    def _arrived(self, at: int, machine: int) -> None:
        self._there[machine].add(at)
        if self._waiting[machine] == at:
            self._waiting[machine] = None
            self._advance(machine)

    def _advance(self, machine: int) -> None:
        """A machine's towers go on to the next point at which they read a weight or have made a gradient."""
        place = self._place[machine]
        before = self._points[place - 1][0] if place else 0.0
        self._clock.after(self._points[place][0] - before, 'towers', functools.partial(self._reach, machine))

    def _reach(self, machine: int) -> None:
        _, kind, at = self._points[self._place[machine]]
        self._place[machine] += 1
        if kind == 0 and at not in self._there[machine]:
            self._waiting[machine] = at
            return
        if kind == 1:
            secs = self._setting.towers * self._weights[at].bytes / self._setting.bus
            self._clock.occupy(f'bus from the towers#{machine}', secs, functools.partial(self._sum, at, machine))
        if self._place[machine] < len(self._points):
            self._advance(machine)

    def _sum(self, at: int, machine: int) -> None:
        """The towers' gradients are added in the machine's memory, and sent."""
        secs = (self._setting.towers + 1) * self._weights[at].bytes / self._setting.memory if self._setting.towers > 1 else 0.0
        self._clock.occupy(f'memory#{machine}', secs, lambda: self._cross('network in', at, machine, functools.partial(self._collect, at)))

    def _collect(self, at: int) -> None:
        self._sums[at] += 1
        if self._sums[at] == self._setting.machines:
            passes = self._setting.machines + (0 if self._is_mirrored else _UPDATE_PASSES)
            hub = f'memory of the hub#{self._hubs[at]}'
            self._clock.occupy(hub, passes * self._weights[at].bytes / self._setting.memory, functools.partial(self._spread_sum, at))

    def _spread_sum(self, at: int) -> None:
        if self._is_mirrored:
            for machine in range(self._setting.machines):
                self._cross('network out', at, machine, functools.partial(self._to_towers, at, machine))


def simulate(weights: Sequence[Weight], work: float, setting: Setting) -> Step:
    """A step of a model on many machines.

    Args:
      weights: in time, as one tower alone reads them and makes their gradients.
      work: seconds that one tower computes.
      setting: machines and links.
    """
    return _Simulation(weights, work, setting).run()


def _spread(sizes: Sequence[float], ps: int) -> list[int]:
    """Which of the tasks holds each variable, as `variables.by_bytes` places them; all are on the only hub without any."""
    held = [0.0] * max(ps, 1)
    places = []
    for size in sizes:
        place = held.index(min(held))
        held[place] += size
        places.append(place)
    return places
