"""Which machine reads which shards, and how many of its examples come in each step of a pass.

A step takes the next examples of the pass, as many as the global batch has, from each machine in proportion to what it has
left. So all machines end a pass in the same step, whatever the sizes of their shards, and a pass has as many steps as without shards.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow.compat.v1 as tf


def owners(examples: Sequence[int], machines: int) -> tuple[int, ...]:
    """The machine that reads each shard: the largest shards go first, each to the machine that has the fewest examples."""
    totals = [(0, 0, machine) for machine in range(machines)]  # examples, shards
    found = [0] * len(examples)
    for shard in sorted(range(len(examples)), key=lambda shard: (-examples[shard], shard)):
        count, shards, machine = min(totals)
        found[shard] = machine
        totals[machine] = (count + examples[shard], shards + 1, machine)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One pass over the shards, or what is left of one; tensors of the current graph.

    Attributes:
      rest: int64 [S], examples left in each shard.
      owner: int64 [S], its machine.
      order: int64 [S], the shards in the order in which each machine reads its own.
      given: int64 [T, M], examples that each machine has given after each step.
    """

    rest: tf.Tensor
    owner: tf.Tensor
    order: tf.Tensor
    given: tf.Tensor

    @property
    def rows(self) -> tf.Tensor:
        """int64 [T, M], examples of each machine in each step."""
        return self.given - tf.concat([tf.zeros_like(self.given[:1]), self.given[:-1]], 0)

    def own(self, machine: int) -> tf.Tensor:
        """int64 [any], the shards of a machine that are not at their end, in their order."""
        mine = tf.logical_and(tf.equal(tf.gather(self.owner, self.order), machine), tf.gather(self.rest, self.order) > 0)
        return tf.boolean_mask(self.order, mine)

    def before(self) -> tf.Tensor:
        """int64 [S], examples that a shard's machine reads before those of the shard."""
        each = tf.one_hot(tf.gather(self.owner, self.order), self.given.shape[1], dtype=tf.int64)  # [S, M], in the order
        earlier = tf.cumsum(each * tf.gather(self.rest, self.order)[:, tf.newaxis], exclusive=True)
        return tf.gather(tf.reduce_sum(earlier * each, 1), tf.math.invert_permutation(self.order))


def made(rest: tf.Tensor, owner: tf.Tensor, order: tf.Tensor, *, size: int, machines: int) -> Schedule:
    """The schedule of a pass in global batches of `size`, the last one smaller; the arguments are those of `Schedule`."""
    held = tf.math.unsorted_segment_sum(rest, owner, machines)  # [M]
    total = tf.reduce_sum(held)
    left = tf.minimum(size * tf.range(1, (total + size - 1) // size + 1), total)  # [T], examples given by the machines from here on
    columns = []
    for machine in range(machines):
        # It grows by one at most where `left` does, so no machine ever takes an example back, and the last has what is left.
        share = (2 * left * held[machine] + total) // tf.maximum(2 * total, 1)
        columns.append(share)
        left, total = left - share, total - held[machine]
    return Schedule(rest, owner, order, tf.stack(columns, 1))


def taken(schedule: Schedule, before: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """int64 [S], what was taken of what was left in each shard once the machines have given so many examples.

    Args:
      schedule: of the pass.
      before: its `before()`.
      given: int64 [M].
    """
    return tf.clip_by_value(tf.gather(given, schedule.owner) - before, tf.zeros_like(schedule.rest), schedule.rest)
