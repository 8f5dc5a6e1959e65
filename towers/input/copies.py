"""Operations of the graph made again, from their definitions: of datasets, and of what these use and can't cross to another machine."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from towers import upstream

STUCK = (tf.resource, tf.variant)  # types that do not cross to another machine
_COPIED = re.compile(r'(Dataset(V\d+)?|SeedGenerator|MemoryCache|Identity)$')  # what each pipeline may have for itself
_TABLE = re.compile(r'HashTable(V\d+)?')  # whose content an operation of its own sets


def node(operation: tf.Operation, definition: tf.GraphDef) -> Any:
    """An operation in a graph of its own, where it has no device: a pass is made inside a function, which has one as a whole."""
    made = definition.node.add()
    made.CopyFrom(operation.node_def)
    made.device = ''
    made.attr.pop('_class', None)
    return made


def read(tensor: tf.Tensor, nodes: Mapping[str, tf.Operation], given: dict[str, tf.Tensor]) -> str:
    """What the copy of a node reads in place of `tensor`: another copy, or something given."""
    if tensor.op.name in nodes:
        return tensor.name
    name = f'given_{len(given)}'
    given[name] = tensor
    return name


def behind(tensors: Iterable[tf.Tensor]) -> dict[str, tf.Operation]:
    """The operations that make some tensors, as far as what goes between them can't cross to another machine."""
    return upstream.of([tensor.op for tensor in tensors], lambda op: [tensor.op for tensor in op.inputs if tensor.dtype in STUCK])


def again(tensors: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The same tensors, which are of `STUCK` types, on the current device; a lookup table is filled where the graph's tables are.

    Raises:
      ValueError: one comes from something that exists once only, such as a queue.
    """
    nodes = behind(tensors.values())
    filled = _filled(nodes)
    tables = {operation.inputs[0].op.name for operation in filled}
    if alone := [each for each in nodes.values() if not _COPIED.search(each.type) and each.name not in tables]:
        raise ValueError(
            f'The dataset uses {alone[0].name!r} ({alone[0].type}), which is in one place only; expected operations that each '
            'pipeline can have for itself. Leave it out of the dataset, or use it in the model.'
        )
    nodes.update((operation.name, operation) for operation in filled)
    outside: dict[str, tf.Tensor] = {}
    definition = tf.GraphDef(versions=next(iter(tensors.values())).graph.graph_def_versions)
    for each in nodes.values():
        node(each, definition).input[:] = [read(tensor, nodes, outside) for tensor in each.inputs]
    inputs = {f'{name}:0': tensor for name, tensor in outside.items()}
    wanted = [*(tensor.name for tensor in tensors.values()), *(operation.name for operation in filled)]
    made = tf.import_graph_def(definition, inputs, wanted, name='again')
    for operation in made[len(tensors) :]:
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, operation)
    return dict(zip(tensors, made, strict=False))


def _filled(nodes: Mapping[str, tf.Operation]) -> list[tf.Operation]:
    """The operations that fill the tables among some."""
    tables = {each.name for each in nodes.values() if _TABLE.fullmatch(each.type)}
    return [each for each in tf.get_collection(tf.GraphKeys.TABLE_INITIALIZERS) if each.inputs and each.inputs[0].op.name in tables]
