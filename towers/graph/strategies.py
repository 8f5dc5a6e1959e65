"""Replication strategies: where variables live, how the towers' results become one Sum, and where it is applied."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import reads, variables
from towers.graph.reduce import central, packing

Statistics = Literal['mean', 'first']


def parameter_server(*, parameter_device: str, seed: int, statistics: Statistics = 'mean', ps: Sequence[str] = ()) -> structs.Strategy:
    """Variables on the parameter device, read once a step for all towers; one update of one Sum.

    Args:
      parameter_device: device string, the CPU by default.
      ps: devices that share the variables by bytes, in place of the parameter device.
      seed: of the initial weights.
      statistics: how the towers' moving statistics become one.
    """
    bring = reads.once()
    place = variables.by_bytes(ps or [parameter_device])

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[variables.Localise]:
        def read(variable: tf.Variable) -> tf.Tensor:
            return bring(variable, variable.device if packing.same_machine(tower.host, variable.device) else tower.host)

        def look(variable: tf.Variable) -> tf.Variable:
            return variables.view(variable, tower.devices[0], scope=f'{tower.scope}/read', read=read)

        with variables.seen_as(look) as localise:
            with _model_scope(tower, place, seed, localise):
                yield variables.original

    def spread(total: structs.Sum, outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        return [structs.Update(parameter_device, variables.rooted, total.gradients, total.variables, total.state)]

    def reduce(outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Sum]:
        return [central.total(outputs, device=parameter_device, statistics=statistics, beside=True)]

    return structs.Strategy('parameter_server', scope, reduce, spread)


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

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[variables.Localise]:
        def place(kwargs: Mapping[str, Any]) -> str:
            return tower.devices[0] if variables.is_trainable(kwargs) else parameter_device

        copies = {v.ref(): variables.copy(v, tower.index, tower.devices[0]) for v in tf.trainable_variables()} if tower.index else {}

        def own(variable: tf.Variable) -> tf.Variable:
            return copies.get(variable.ref(), variable)

        with variables.seen_as(lambda v: variables.view(own(v), tower.devices[0], scope=f'{tower.scope}/read', name=v.name)) as localise:
            with _model_scope(tower, place, seed, localise):
                yield lambda variable: own(variables.original(variable))

    bring = reads.once()

    def spread(total: structs.Sum, outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Update]:
        return [
            structs.Update(
                output.tower.devices[0],
                variables.local if output.tower.index else variables.rooted,
                tuple(_brought(gradient, output.tower.host, bring) for gradient in total.gradients),
                output.variables,
                () if output.tower.index else total.state,
            )
            for output in outputs
        ]

    def reduce(outputs: Sequence[structs.TowerOutput]) -> Sequence[structs.Sum]:
        return [central.total(outputs, device=outputs[0].tower.host, statistics=statistics)]  # beside the canonical copies

    return structs.Strategy('mirrored', scope, reduce, spread)


def reading(*, seed: int, prefix: str, valued: Callable[[tf.Variable], tf.Variable]) -> Callable[[structs.Tower], Any]:
    """The context of towers that are built out of training in a graph that trains: they read its variables and make none but local ones.

    Args:
      seed: of the local variables' initial values.
      prefix: of the names of local variables, which are the readers' own; it ends with a slash.
      valued: from a canonical trainable variable to the one whose values are read.
    """
    penalised: set[Any] = set()

    @contextlib.contextmanager
    def scope(tower: structs.Tower) -> Iterator[variables.Localise]:
        def look(variable: tf.Variable) -> tf.Variable:
            return variables.view(valued(variable), tower.devices[0], scope=f'{prefix}{tower.scope}/read', name=variable.name)

        def get(getter: Callable[..., tf.Variable], name: str, *args: Any, **kwargs: Any) -> tf.Variable:
            is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
            variable = getter(f'{prefix}{name}' if is_local else name, *args, **kwargs)
            if kwargs.get('regularizer') is not None and name not in penalised:  # TensorFlow makes it with the variable only
                penalised.add(name)
                tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, kwargs['regularizer'](variable))
            return variable

        with variables.seen_as(look) as localise, _model_scope(tower, lambda _: tower.host, seed, localise, made=True):
            with tf.variable_scope(tf.get_variable_scope(), custom_getter=get):
                yield variables.original

    return scope


def _brought(gradient: structs.Gradient, host: str, bring: Callable[..., tf.Tensor]) -> structs.Gradient:
    """The gradient on a machine's CPU, where it is another machine's."""
    if gradient is None or packing.same_machine(host, gradient.device):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(bring(gradient.values, host), bring(gradient.indices, host), gradient.dense_shape)
    return bring(gradient, host)


STRATEGIES: dict[str, Callable[..., structs.Strategy]] = {'parameter_server': parameter_server, 'mirrored': mirrored}


@contextlib.contextmanager
def _model_scope(
    tower: structs.Tower, place: variables.Place, seed: int, localise: variables.Localise, *, made: bool = False
) -> Iterator[None]:
    first = tower.index == 0 and not made
    reuse = None if first else tf.AUTO_REUSE
    getter = variables.getter(seed=seed, localise=localise)
    with variables.creating(place=place, prefix=f'{tower.scope}/', first=first):
        with tf.variable_scope(tf.get_variable_scope(), reuse=reuse, custom_getter=getter):
            yield
