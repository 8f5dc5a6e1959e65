"""Replication strategies: where variables live, how the towers' results become one Sum, and where it is applied."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import variables
from towers.graph.reduce import central

Statistics = Literal['mean', 'first']


def parameter_server(*, parameter_device: str, seed: int, statistics: Statistics = 'mean') -> structs.Strategy:
    """Variables on the parameter device, read once a step by each tower; one update of one Sum.

    Args:
      parameter_device: device string, the CPU by default.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
    """

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[variables.Localise]:
        with variables.seen_as(lambda variable: variables.view(variable, tower.devices[0], scope=f'{tower.scope}/read')) as localise:
            with _model_scope(tower, lambda trainable: parameter_device, seed, localise):
                yield variables.original

    def spread(total: structs.Sum, outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        return [structs.Update(parameter_device, variables.rooted, total.gradients, total.variables, total.state)]

    reduce = _reducer(parameter_device, statistics)
    return structs.Strategy('parameter_server', scope, reduce, spread)


def mirrored(*, parameter_device: str, seed: int, statistics: Statistics = 'mean') -> structs.Strategy:
    """A copy of the trainable variables on each tower; every copy gets the same update of the same Sum.

    Tower 0's copy is the canonical one, which checkpoints hold; the others are local variables. Variables that aren't
    trainable stay single, on the parameter device.

    Args:
      parameter_device: device string where gradients are summed.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
    """

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[variables.Localise]:
        def place(trainable: bool) -> str:
            return tower.devices[0] if trainable else parameter_device

        copies = {v.ref(): variables.copy(v, tower.index, tower.devices[0]) for v in tf.trainable_variables()} if tower.index else {}

        def own(variable: tf.Variable) -> tf.Variable:
            return copies.get(variable.ref(), variable)

        with variables.seen_as(lambda v: variables.view(own(v), tower.devices[0], scope=f'{tower.scope}/read', name=v.name)) as localise:
            with _model_scope(tower, place, seed, localise):
                yield lambda variable: own(variables.original(variable))

    def spread(total: structs.Sum, outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        return [
            structs.Update(
                output.tower.devices[0],
                variables.local if output.tower.index else variables.rooted,
                total.gradients,
                output.variables,
                () if output.tower.index else total.state,
            )
            for output in outputs
        ]

    return structs.Strategy('mirrored', scope, _reducer(parameter_device, statistics), spread)


STRATEGIES: dict[str, Callable[..., structs.Strategy]] = {'parameter_server': parameter_server, 'mirrored': mirrored}


def _reducer(device: str, statistics: Statistics) -> Callable[[Sequence[structs.TowerOutput]], Sequence[structs.Sum]]:
    return lambda outputs: [central.total(outputs, device=device, statistics=statistics)]


@contextlib.contextmanager
def _model_scope(tower: structs.Tower, place: Callable[[bool], str], seed: int, localise: variables.Localise) -> Iterator[None]:
    first = tower.index == 0
    reuse = None if first else tf.AUTO_REUSE
    getter = variables.getter(seed=seed, localise=localise)
    with variables.creating(place=place, prefix=f'{tower.scope}/', first=first):
        with tf.variable_scope(tf.get_variable_scope(), reuse=reuse, custom_getter=getter):
            yield
