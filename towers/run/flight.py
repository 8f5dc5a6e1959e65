"""A flight recorder: what a step that was not finite was made of, and which tower and tensor were to blame.

A step that the gate holds back changes no variable, so the session still has all that it was computed from but for its
batch. That is kept by the step itself, in shadows where the input is and only when it is bad: a good step pays nothing. Fed
with it, the graph makes the same step again, as often as there is something to ask; draws keyed by the step are the same.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import shadows, structs

BATCH, VARIABLES = 'batch', 'variables'  # files of a bundle, in TensorFlow's own checkpoint format


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was not finite in a step.

    Attributes:
      tower: index of the first tower that was bad by itself; None where none was.
      facts: what was seen, from cause to effect, in words.
    """

    tower: int | None
    facts: tuple[str, ...]

    def __str__(self) -> str:
        where = 'in no tower by itself' if self.tower is None else f'on tower {self.tower}'
        return f'{where}: {"; ".join(self.facts) or "made again it is finite"}'


class Recorder:
    """Keeps the batch of the last bad step, and tells what was wrong with it; makes its operations at once.

    To be made when the model's variables are there and the optimizer's are not, which say nothing about the gradient.

    Args:
      source: the input that feeds the towers.
      outputs: the towers'.
      total: what was to be applied.
      also: name -> what else was to be finite, such as the loss with the penalty.
    """

    def __init__(
        self, source: structs.Input, outputs: Sequence[structs.TowerOutput], total: structs.Sum, also: Mapping[str, tf.Tensor]
    ) -> None:
        self._source, self._outputs, self._total, self._also = source, tuple(outputs), total, dict(also)
        self._variables = {variable.op.name: variable for variable in tf.global_variables()}
        # A constant needs no feeding, and nothing here may ask the iterator for a batch.
        fed = {t.name: t for t in _tensors(source) if t.op.type != 'Const'}
        self._shadows: list[shadows.Shadow] = []
        self._held: dict[str, tf.Tensor] = {}  # by the name of what is fed with it
        with tf.name_scope('flight/'):
            for number, (device, names) in enumerate(_together(fed)):  # where they are, since they are sent wherever they may be needed
                shadow = shadows.Shadow([fed[name] for name in names], device=device, name=f'flight/{number}')
                self._shadows.append(shadow)
                self._held.update(zip(names, shadow.held, strict=True))

    def keep(self) -> list[tf.Operation]:
        """Makes the operations that keep this step's batch; they take over its buffers."""
        with tf.name_scope('flight/'):
            return [shadow.keep() for shadow in self._shadows]

    def write(self, session: tf.Session, folder: str) -> None:
        """Writes the kept batch and the variables to the files `BATCH` and `VARIABLES` in a folder."""
        batch = {name: self._held.get(t.name, t) for name, t in _named(self._source).items()}
        for name, tensors in ((BATCH, batch), (VARIABLES, self._variables)):
            _save(os.path.join(os.path.abspath(folder), name), session.run(tensors))

    def describe(self) -> dict[str, Any]:
        """Types and shapes of each tower's inputs, as JSON values; the leaves are numbered as in `BATCH`."""
        return {'towers': [[{'dtype': t.dtype.name, 'shape': _shape(t)} for t in _flat(batch)] for batch in self._source.batches]}

    def find(self, session: tf.Session) -> Finding:
        """Makes the kept step again in parts, changing nothing, and tells what was not finite.

        The first tower whose loss is bad is to blame, else the first one with a bad gradient.
        """
        feeds = session.run(self._held)
        losses = session.run([output.output.loss for output in self._outputs], feeds)
        bad = [index for index, loss in enumerate(losses) if not np.isfinite(loss)]
        gradients: tuple[str, ...] = ()
        tower = bad[0] if bad else None
        for index in bad[:1] or range(len(losses)):
            gradients = self._first_bad('the gradient', self._outputs[index].gradients, session, feeds)
            if gradients:
                tower = index
                break
        causes = itertools.islice(itertools.chain(self._bad_variables(session), self._bad_inputs(feeds, tower)), 3)
        if tower is not None:
            return Finding(tower, (*causes, f'the loss is {losses[tower]:g}', *gradients))
        sums = self._first_bad('the gradient to apply', self._total.gradients, session, feeds)
        others = _bad_tensors(self._also, session.run(self._also, feeds))
        return Finding(None, (*causes, *others, *sums))

    def _first_bad(
        self, what: str, gradients: Sequence[structs.Gradient], session: tf.Session, feeds: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """The first variable whose gradient is not finite, and how many there are."""
        values = {
            variable.op.name: gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            for variable, gradient in zip(self._total.variables, gradients, strict=True)
            if gradient is not None
        }
        found = [(name, problem) for name, value in session.run(values, feeds).items() if (problem := not_finite(value))]
        more = f' (and of {len(found) - 1} more of {len(values)} variables)' if len(found) > 1 else ''
        return tuple(f'{what} of {name} {problem}{more}' for name, problem in found[:1])

    def _bad_variables(self, session: tf.Session) -> Iterator[str]:
        for name, variable in self._variables.items():  # one at a time, since all may be large
            if variable.dtype.is_floating:
                yield from _bad_tensors({f'the variable {name}': None}, {f'the variable {name}': session.run(variable)})

    def _bad_inputs(self, feeds: Mapping[str, Any], tower: int | None) -> Iterator[str]:
        for batch in self._source.batches if tower is None else self._source.batches[tower : tower + 1]:
            for path, leaf in leaves(batch.features):
                if leaf.dtype.is_floating and leaf.name in feeds:
                    yield from _bad_tensors({f'the input{path}': leaf}, {f'the input{path}': feeds[leaf.name]})


def not_finite(values: Any) -> str | None:
    """How many values of an array are not finite, in words; None where all are."""
    array = np.asarray(values).astype(np.float64)
    bad = ~np.isfinite(array)
    if not bad.any():
        return None
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    kinds = ' and '.join(f'{count} {kind}' for count, kind in ((nans, 'nan'), (infs, 'inf')) if count)
    first = f', the first at {np.argwhere(bad)[0].tolist()}' if array.ndim else ''
    return f'holds {kinds} in {array.size} values{first}'


def leaves(structure: structs.Batch, path: str = '') -> Iterator[tuple[str, tf.Tensor]]:
    """The tensors of a batch with their place in it: ' image', ' 0'; the parts of a composite one have the same place."""
    if isinstance(structure, Mapping):
        parts = [(str(key), structure[key]) for key in sorted(structure)]  # the order of tf.nest
    elif isinstance(structure, list | tuple):
        parts = [(str(index), part) for index, part in enumerate(structure)]
    else:
        for tensor in tf.nest.flatten(structure, expand_composites=True):
            yield path, tensor
        return
    for key, part in parts:
        yield from leaves(part, f'{path} {key}')


def _flat(batch: structs.TowerBatch) -> list[tf.Tensor]:
    return tf.nest.flatten(batch.features, expand_composites=True)


def _named(source: structs.Input) -> dict[str, tf.Tensor]:
    """All that an input gives to a step: 'examples', and for tower 1 '1/examples', '1/first', '1/0', '1/1', ..."""
    named = {'examples': source.examples}
    for index, batch in enumerate(source.batches):
        named.update({f'{index}/examples': batch.examples, f'{index}/first': batch.first})
        named.update({f'{index}/{place}': tensor for place, tensor in enumerate(_flat(batch))})
    return named


def _together(tensors: Mapping[str, tf.Tensor]) -> Iterator[tuple[str, list[str]]]:
    """The tensors' names by device; each by itself on other devices than CPUs, where a bundle of them has not been tried."""
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        is_cpu = tf.DeviceSpec.from_string(device).device_type in (None, 'CPU')
        yield from [(device, names)] if is_cpu else [(device, [name]) for name in names]


def _tensors(source: structs.Input) -> list[tf.Tensor]:
    return list(_named(source).values())


def _shape(tensor: tf.Tensor) -> list[int | None] | None:
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def _save(prefix: str, values: Mapping[str, Any]) -> None:
    """Writes arrays by name, in a graph of its own, so that a training's has nothing for it."""
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
        arrays = {name: np.asarray(value) for name, value in values.items()}
        holders = [tf.placeholder(tf.string if array.dtype == object else array.dtype, array.shape) for array in arrays.values()]
        save = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=list(arrays), shape_and_slices=[''] * len(arrays), tensors=holders)
        session.run(save, dict(zip([holder.name for holder in holders], arrays.values(), strict=True)))


def _bad_tensors(names: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f'{name} {problem}' for name in names if (problem := not_finite(values[name])))
