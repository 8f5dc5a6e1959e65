"""The rows of a batch that each tower gets."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from towers import structs

_nest = tf.nest


def bounds(examples: tf.Tensor, towers: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows of each tower: counts of examples [N], and first rows [N]; the first towers get one more.

    An empty tower's first row is row 0, which stands in with weight 0.
    """
    index = tf.range(towers, dtype=tf.int64)
    counts = examples // towers + tf.cast(index < examples % towers, tf.int64)
    first = tf.where(counts > 0, tf.cumsum(counts, exclusive=True), tf.zeros_like(counts))
    return counts, first


def by_number(features: structs.Batch, rows: tf.Tensor, towers: int, own: Sequence[int]) -> tuple[structs.TowerBatch, ...]:
    """The parts of a batch of `rows` examples (int64 scalar; 0 = one row that stands in) for `own` of so many towers."""
    counts, first = (tf.unstack(x, towers) for x in bounds(rows, towers))
    lengths = [tf.maximum(count, 1) for count in counts]
    return tuple(
        structs.TowerBatch(_nest.map_structure(lambda x, lo=first[i], size=lengths[i]: _slice(x, lo, size), features), counts[i], first[i])
        for i in own
    )


def slicer(tower: int, towers: int) -> Callable[[Any, structs.Batch], tuple[Any, ...]]:
    """A map from a place and a global batch to (place, the tower's rows, their number, the first one's index, the global batch's size)."""

    def pick(place: Any, features: structs.Batch) -> tuple[Any, ...]:
        static, total = _rows(features)
        if static is not None:
            sizes = static_sizes(static, towers)
            n, lo = sizes[tower], sum(sizes[:tower])
            part = _nest.map_structure(lambda x: _slice(x, lo, n), features)
            return place, part, tf.constant(n, tf.int64), tf.constant(lo, tf.int64), total
        counts, firsts = bounds(total, towers)
        count, first = counts[tower], firsts[tower]
        return place, _nest.map_structure(lambda x: _slice(x, first, tf.maximum(count, 1)), features), count, first, total

    return pick


def split(features: structs.Batch, towers: Sequence[structs.Tower], host: str) -> tuple[tuple[structs.TowerBatch, ...], tf.Tensor]:
    """The rows of the global batch of each tower of a machine, and the number of examples in all."""
    static, rows = _rows(features)
    n = len(towers)
    own = [place for place, tower in enumerate(towers) if tower.host == host]
    examples = tf.constant(static, tf.int64) if static is not None else rows
    if n == 1:
        return (structs.TowerBatch(features, examples, tf.constant(0, tf.int64)),), examples
    if static is not None:
        sizes = static_sizes(static, n)
        firsts = [sum(sizes[:i]) for i in range(n)]
        kept = [sizes[i] for i in own]
        if len(own) < n:  # of a machine's copy of the batch only its own rows are looked at
            features = _nest.map_structure(lambda x: _slice(x, firsts[own[0]], sum(kept)), features)
        flat = [tf.split(x, kept) if isinstance(x, tf.Tensor) else _pieces(x, kept) for x in _nest.flatten(features)]
        batches = [
            structs.TowerBatch(
                _nest.pack_sequence_as(features, [pieces[place] for pieces in flat]),
                tf.constant(sizes[i], tf.int64),
                tf.constant(firsts[i], tf.int64),
            )
            for place, i in enumerate(own)
        ]
        return tuple(batches), examples
    return by_number(features, rows, n, own), examples


def static_sizes(rows: int, towers: int) -> list[int]:
    """How many of so many rows each tower gets."""
    return [rows // towers + (i < rows % towers) for i in range(towers)]


def _rows(features: structs.Batch) -> tuple[int | None, tf.Tensor]:
    """Examples of a batch: the static number, if known, and an int64 scalar."""
    leaf = _nest.flatten(features)[0]
    if isinstance(leaf, tf.SparseTensor):
        return None, leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return None, tf.cast(leaf.nrows(), tf.int64)
    return leaf.shape.as_list()[0], tf.shape(leaf, out_type=tf.int64)[0]


def _slice(x: tf.Tensor, lo: tf.Tensor | int, size: tf.Tensor | int) -> tf.Tensor:
    if isinstance(x, tf.SparseTensor):
        rest = x.dense_shape[1:]
        first, rows = tf.cast([lo], tf.int64), tf.cast([size], tf.int64)
        return tf.sparse.slice(x, tf.concat([first, tf.zeros_like(rest)], 0), tf.concat([rows, rest], 0))
    return x[lo : lo + size]


def _pieces(x: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(x, lo, n) for lo, n in zip(starts, sizes, strict=True)]
