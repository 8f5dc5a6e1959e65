"""The variables' values on their way to the towers, together where a transfer costs more than bytes. Part of the stage `strategies`."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf

from towers import reads, structs, transfers
from towers.graph.reduce import packing

_SURVEY = ''  # in place of a machine


class Carrier:
    """Brings the variables' values to the towers, once a step to each."""

    def __init__(self) -> None:
        self._packs, self._bundles = Packs(reads.once()), Bundles()

    def value(self, tower: structs.Tower, variable: tf.Variable) -> tf.Tensor:
        """A variable's value on the device of a tower, or where it comes from to that one alone."""
        if tower.is_survey:
            self._packs.expect(variable)
            return reads.read(variable)
        return self._bundles.on(tower, variable, self._packs.on(tower.host, variable))


class Packs:
    """Brings the variables' values to machines, once to each.

    Small ones come to a machine packed, in few tensors from each device that holds some of them. Which there are is known from a
    survey, or when the towers of a machine have been built: without a survey each comes by itself to the first machine, unless that
    one holds them.
    """

    def __init__(self, bring: Callable[..., tf.Tensor]) -> None:
        self._bring = bring
        self._read: dict[str, dict[str, tf.Variable]] = {}  # by machine, the small ones that its towers read; those of a survey first
        self._packed: dict[str, dict[str, list[tf.Tensor]]] = {}  # by machine, the packs that go to it, by device
        self._pieces: dict[str, dict[str, tf.Tensor]] = {}  # by machine, what came in them

    def expect(self, variable: tf.Variable) -> None:
        """Notes that towers will read a variable; to be called before any does."""
        if packing.is_small(variable):
            self._read.setdefault(_SURVEY, {})[variable.handle.name] = variable

    def on(self, host: str, variable: tf.Variable) -> tf.Tensor:
        """A variable's value on the CPU of a machine, or where the variable is, if that is the same machine."""
        if host not in self._read:
            self._pieces[host], self._packed[host] = _together(next(iter(self._read.values()), {}), host)
            self._read[host] = {}
        if packing.is_small(variable):
            self._read[host][variable.handle.name] = variable
        piece = self._pieces[host].get(variable.handle.name)
        if piece is not None:
            return piece
        if transfers.same_machine(host, variable.device):
            return self._bring(variable, variable.device)
        # Behind the small ones, which most layers need: being packed they would be last, and a network carries one message at a time.
        return self._bring(variable, host, self._packed[host].get(variable.device, ()))


class Bundles:
    """Brings values from a machine's CPU devices to its towers there, to each in groups.

    Which values there are is known when a machine's first tower has been built, so to that one each comes by itself.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, dict[str, tf.Tensor]]] = {}  # by machine, its first tower and what that one read
        self._bundles: dict[tuple[str, str], tf.Tensor] = {}  # by machine and the first value in it
        self._pieces: dict[int, dict[str, tf.Tensor]] = {}  # by tower, what came together

    def on(self, tower: structs.Tower, variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
        """A variable's value on the device of a tower, or `value` where it comes by itself."""
        first, seen = self._first.setdefault(tower.host, (tower.index, {}))
        if tower.index == first:
            seen[variable.handle.name] = value
        elif tower.index not in self._pieces:
            self._pieces[tower.index] = self._brought(seen, tower)
        return self._pieces.get(tower.index, {}).get(variable.handle.name, value)

    def _brought(self, values: Mapping[str, tf.Tensor], tower: structs.Tower) -> dict[str, tf.Tensor]:
        """Values on a tower, those that come to it together from one device."""
        target = transfers.name_of(tower.devices[0])
        found: dict[str, tf.Tensor] = {}
        for source, names in _together_from(values, target):
            own = [values[name] for name in names]
            bundle = self._bundle((tower.host, names[0]), source, own)
            with tf.control_dependencies(None), tf.name_scope(f'{tower.scope}/read/'):
                found.update(zip(names, transfers.unbundled(bundle, own, target), strict=True))
        return found

    def _bundle(self, key: tuple[str, str], source: str, values: Sequence[tf.Tensor]) -> tf.Tensor:
        if key not in self._bundles:
            with tf.control_dependencies(None), tf.name_scope('read/'):
                self._bundles[key] = transfers.bundle(values, source)
        return self._bundles[key]


def _together_from(values: Mapping[str, tf.Tensor], target: str) -> Iterator[tuple[str, list[str]]]:
    """The values that go to `target` together: the device where they are, and their names."""
    for source in dict.fromkeys(value.device for value in values.values()):
        names = [name for name, value in values.items() if value.device == source]
        groups = transfers.groups([values[name] for name in names]) if transfers.are_bundled(source, target) else ()
        yield from ((source, [names[place] for place in places]) for places in groups if len(places) > 1)


def _together(read: Mapping[str, tf.Variable], host: str) -> tuple[dict[str, tf.Tensor], dict[str, list[tf.Tensor]]]:
    """The values of variables on a machine, by the names of their handles, and the packs that bring them, by the device that makes them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, variable in read.items():
        if not transfers.same_machine(host, variable.device):
            groups.setdefault((variable.device, variable.dtype.base_dtype.name), []).append(name)
    found: dict[str, tf.Tensor] = {}
    packs: dict[str, list[tf.Tensor]] = {}
    with tf.control_dependencies(None), tf.name_scope('read/packed/'), tf.device(None):
        for device, names in _parted(read, groups):
            with tf.device(device), tf.control_dependencies(packs.get(device, ())):
                values = [reads.read(read[name]) for name in names]
                flat = packing.packed(values)
            with tf.device(host):
                found.update(zip(names, packing.unpacked(flat, values), strict=True))
            packs.setdefault(device, []).append(flat)
    return found, packs


def _parted(read: Mapping[str, tf.Variable], groups: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """The device and the names of each pack of several variables, those that are needed first before the others."""
    for (device, _), names in groups.items():
        parts = ([names[place] for place in places] for places in packing.groups([read[name] for name in names]))
        yield from ((device, part) for part in parts if len(part) > 1)
