"""Replication strategies: where variables live, how the towers' results become one Sum, and where it is applied."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs, transfers
from towers.graph import gradients, making, variables, weights
from towers.graph.reduce import central, collective, packing

Statistics = Literal['mean', 'first']


def parameter_server(*, parameter_device: str, seed: int, statistics: Statistics = 'mean', ps: Sequence[str] = ()) -> structs.Strategy:
    """Variables on the parameter device, read once a step for all towers; one update of one Sum.

    Args:
      parameter_device: device string, the CPU by default.
      ps: devices that share the variables by bytes, in place of the parameter device.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
    """
    return _shared('parameter_server', variables.by_bytes(ps or [parameter_device]), parameter_device, seed, statistics)


def balanced(
    *, parameter_device: str, seed: int, statistics: Statistics = 'mean', ps: Sequence[str] = (), among: Sequence[str]
) -> structs.Strategy:
    """As `parameter_server`, but the trainable variables are on the towers' own devices, shared by bytes.

    Args:
      parameter_device: device string of the variables that aren't trainable.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
      ps: there may be none.
      among: the towers' devices.

    Raises:
      ValueError: there are parameter tasks, which would hold nothing.
    """
    if ps:
        raise ValueError('--ps_hosts hold the variables of --strategy=parameter_server, got balanced, which has them on the towers.')
    least = variables.by_bytes(among)

    def place(kwargs: Mapping[str, Any]) -> str:
        return least(kwargs) if variables.is_trainable(kwargs) else parameter_device

    return _shared('balanced', place, parameter_device, seed, statistics)


def _shared(name: str, place: variables.Place, parameter_device: str, seed: int, statistics: Statistics) -> structs.Strategy:
    """Variables that all towers read, each where `place` says; one update of one Sum."""
    carrier, maker = weights.Carrier(), making.Maker(seed)

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[gradients.Own]:
        def look(variable: tf.Variable) -> tf.Variable:
            read = functools.partial(carrier.value, tower)
            return variables.view(variable, tower.devices[0], scope=f'{tower.scope}/read', read=read)

        with variables.seen_as(look) as localise:
            with maker.scope(tower, place, localise):
                yield gradients.Own(variables.original, lambda variable: variables.value_of(localise(variables.original(variable))))

    def spread(totals: Sequence[structs.Sum], outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        [total] = totals
        return [structs.Update(parameter_device, variables.rooted, total.gradients, total.variables, total.state)]

    def reduce(outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Sum]:
        return [central.total(outputs, device=parameter_device, statistics=statistics, beside=True)]

    return structs.Strategy(name, scope, reduce, spread)


def mirrored(*, parameter_device: str, seed: int, statistics: Statistics = 'mean', ps: Sequence[str] = ()) -> structs.Strategy:
    """A copy of the trainable variables on each tower; every copy gets the same update of the same Sum.

    Tower 0's copy is the canonical one, which checkpoints hold; the others are local variables. Variables that aren't
    trainable stay single, on the parameter device.

    Args:
      parameter_device: device string of the variables that aren't trainable.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
      ps: there may be none.

    Raises:
      ValueError: there are some, which would hold nothing.
    """
    if ps:
        raise ValueError('--ps_hosts hold the variables of --strategy=parameter_server, got mirrored, which has copies on the towers.')
    carrier, maker = weights.Carrier(), making.Maker(seed)

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[gradients.Own]:
        def place(kwargs: Mapping[str, Any]) -> str:
            return tower.devices[0] if variables.is_trainable(kwargs) else parameter_device

        copies = {v.ref(): variables.copy(v, tower.index, tower.devices[0]) for v in tf.trainable_variables()} if tower.index else {}

        def own(variable: tf.Variable) -> tf.Variable:
            return copies.get(variable.ref(), variable)

        def look(variable: tf.Variable) -> tf.Variable:
            read = None if variable.trainable else functools.partial(carrier.value, tower)
            return variables.view(own(variable), tower.devices[0], scope=f'{tower.scope}/read', name=variable.name, read=read)

        with variables.seen_as(look) as localise:
            with maker.scope(tower, place, localise):
                yield gradients.Own(lambda variable: own(variables.original(variable)))

    def spread(totals: Sequence[structs.Sum], outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        [total] = totals
        brought = {host: _brought(total.gradients, host) for host in dict.fromkeys(output.tower.host for output in outputs)}
        return [
            structs.Update(
                output.tower.devices[0],
                variables.local if output.tower.index else variables.rooted,
                brought[output.tower.host],
                output.variables,
                () if output.tower.index else total.state,
            )
            for output in outputs
        ]

    def reduce(outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Sum]:
        return [central.total(outputs, device=outputs[0].tower.host, statistics=statistics)]  # beside the canonical copies

    return structs.Strategy('mirrored', scope, reduce, spread)


def collective_copies(
    *, parameter_device: str, seed: int, statistics: Statistics = 'mean', ps: Sequence[str] = (), wire: collective.Wire
) -> structs.Strategy:
    """As `mirrored`, but the towers add the dense gradients themselves, and each applies the sum that it has.

    Args:
      parameter_device: as in `mirrored`.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
      ps: there may be none.
      wire: how the towers reach each other.

    Raises:
      ValueError: there are several machines.
    """
    copies = mirrored(parameter_device=parameter_device, seed=seed, statistics=statistics, ps=())

    def spread(totals: Sequence[structs.Sum], outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        updates = copies.spread(totals[:1], outputs)
        if len(totals) == 1:  # what a user's links made of the first tower's sum goes to the others
            return updates
        return [dataclasses.replace(update, gradients=total.gradients) for update, total in zip(updates, totals, strict=True)]

    def reduce(outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Sum]:
        hosts = {output.tower.host for output in outputs}
        if ps or len(hosts) > 1 or not transfers.same_machine(parameter_device, '/cpu:0'):
            raise ValueError('--strategy=collective is for the towers of one machine, got several tasks; use parameter_server or mirrored.')
        return collective.totals(outputs, device=outputs[0].tower.host, wire=wire, statistics=statistics)

    return structs.Strategy('collective', copies.scope, reduce, spread)


def make(config: config_lib.Config, placement: structs.Placement) -> structs.Strategy:
    """The strategy that a run asks for, where its towers are."""
    more: dict[str, Any] = {}
    if config.strategy == 'balanced':
        more['among'] = [tower.devices[0] for tower in placement.towers]
    if config.strategy == 'collective':
        # Two ranks of NCCL can't be on one GPU. The first step may take ten times as long as others, and a tower wait for it.
        alone = not placement.fake and len(placement.gpus) == len(placement.towers)
        secs = collective.Wire.timeout_secs if config.step_timeout_secs is None else 10 * config.step_timeout_secs
        more['wire'] = collective.Wire('nccl' if alone else 'ring', secs)
    return STRATEGIES[config.strategy](
        parameter_device=placement.parameter_device, seed=config.seed, statistics=config.batch_norm, ps=placement.ps, **more
    )


def are_surveyed(config: config_lib.StrategyConfig, placement: structs.Placement) -> bool:
    """Whether models are to be built once before all towers: variables may be on other machines than tower 0, and come to it together."""
    places = list(placement.ps or [placement.parameter_device])
    if config.strategy == 'balanced':
        places += [tower.devices[0] for tower in placement.towers]
    return any(not transfers.same_machine(place, placement.towers[0].host) for place in places)


def reading(*, seed: int, prefix: str, valued: Callable[[tf.Variable], tf.Variable]) -> Callable[[structs.Tower], Any]:
    """The context of towers that are built out of training in a graph that trains: they read its variables and make none but local ones.

    Args:
      seed: of the local variables' initial values.
      prefix: of the names of local variables, which are the readers' own; it ends with a slash.
      valued: from a canonical trainable variable to the one whose values are read.
    """
    penalised: set[Any] = set()
    maker = making.Maker(seed, is_done=True)

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[gradients.Own]:
        def look(variable: tf.Variable) -> tf.Variable:
            return variables.view(valued(variable), tower.devices[0], scope=f'{prefix}{tower.scope}/read', name=variable.name)

        def get(getter: Callable[..., tf.Variable], name: str, *args: Any, **kwargs: Any) -> tf.Variable:
            is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
            variable = getter(f'{prefix}{name}' if is_local else name, *args, **kwargs)
            if kwargs.get('regularizer') is not None and name not in penalised:  # TensorFlow makes it with the variable only
                penalised.add(name)
                tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, kwargs['regularizer'](variable))
            return variable

        with variables.seen_as(look) as localise, maker.scope(tower, lambda _: tower.host, localise):
            with tf.variable_scope(tf.get_variable_scope(), custom_getter=get):
                yield gradients.Own(variables.original)

    return scope


def _brought(sums: Sequence[structs.Gradient], host: str) -> tuple[structs.Gradient, ...]:
    """Gradients on a machine's CPU, the small ones as one tensor from each device, where they are another machine's."""
    found = list(sums)
    crossing = {
        at: gradient for at, gradient in enumerate(sums) if gradient is not None and not transfers.same_machine(host, gradient.device)
    }
    groups: dict[tuple[str, str], list[int]] = {}
    for at, gradient in crossing.items():
        alone = '' if packing.is_small(gradient) else str(at)
        groups.setdefault((gradient.device, gradient.dtype.name + alone), []).append(at)
    with tf.name_scope('read/sums/'):
        for (device, _), places in groups.items():
            pieces: Any = packing.brought([sums[at] for at in places], host=device, device=host)
            with tf.device(host):
                moved = pieces if len(places) > 1 else [_same(pieces[0])]
            for at, piece in zip(places, moved, strict=True):
                found[at] = piece
    return tuple(found)


def _same(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """A gradient on the current device."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), gradient.dense_shape)
    return tf.identity(gradient)


STRATEGIES: dict[str, Callable[..., structs.Strategy]] = {
    'parameter_server': parameter_server,
    'balanced': balanced,
    'mirrored': mirrored,
    'collective': collective_copies,
}
