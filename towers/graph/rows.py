"""Optimizers whose sparse update is made of gathers and scatters of whole rows, in parts that run side by side.

TensorFlow's own sparse updates go through the rows one after the other on one core. The numbers are the same: each row is in one
part, and repeated rows are summed first.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf

from towers import identity

_MOST_PARTS = 8
Rule: TypeAlias = Callable[[tf.Variable, tf.Tensor, tf.Tensor], tf.Operation]  # variable, rows' numbers, their gradients


def apply(rule: Rule, variable: tf.Variable, gradient: tf.Tensor, indices: tf.Tensor) -> tf.Operation:
    """Updates the rows of a variable that have a gradient.

    Args:
      rule: updates some rows, each number once.
      variable: [rows, ...], and the slots that go with it.
      gradient: [n, ...].
      indices: [n], rows' numbers, which may repeat.
    """
    parts = min(_MOST_PARTS, identity.cores())
    if parts == 1 or 'CPU' not in variable.device.upper():
        return rule(variable, *summed(gradient, indices))
    part = tf.cast(indices % parts, tf.int32)
    split = zip(tf.dynamic_partition(gradient, part, parts), tf.dynamic_partition(indices, part, parts), strict=True)
    return tf.group(*[rule(variable, *summed(values, numbers)) for values, numbers in split])


def summed(gradient: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The numbers of the rows, each once, and the sum of the gradients of each."""
    numbers, places = tf.unique(indices)
    return numbers, tf.math.unsorted_segment_sum(gradient, places, tf.size(numbers))


class Momentum(tf.train.MomentumOptimizer):
    """tf.train.MomentumOptimizer: momentum <- mu momentum + g; v <- v - rate momentum."""

    def __init__(self, learning_rate: tf.Tensor, momentum: tf.Tensor, use_nesterov: bool = False) -> None:
        """As its base class."""
        super().__init__(learning_rate, momentum, use_nesterov=use_nesterov)
        self._rate, self._mu, self._nesterov = learning_rate, momentum, use_nesterov

    def _resource_apply_sparse_duplicate_indices(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return apply(self._rule, handle, grad, indices)

    def _rule(self, variable: tf.Variable, numbers: tf.Tensor, gradient: tf.Tensor) -> tf.Operation:
        slot = self.get_slot(variable, 'momentum')
        rate, mu = tf.cast(self._rate, gradient.dtype), tf.cast(self._mu, gradient.dtype)
        new = mu * tf.gather(slot, numbers) + gradient
        step = rate * (gradient + mu * new) if self._nesterov else rate * new
        return tf.group(_set(slot, numbers, new), _subtract(variable, numbers, step))


class Adagrad(tf.train.AdagradOptimizer):
    """tf.train.AdagradOptimizer: a <- a + g^2; v <- v - rate g / sqrt(a)."""

    def __init__(self, learning_rate: tf.Tensor) -> None:
        """As its base class."""
        super().__init__(learning_rate)
        self._rate = learning_rate

    def _resource_apply_sparse_duplicate_indices(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return apply(self._rule, handle, grad, indices)

    def _rule(self, variable: tf.Variable, numbers: tf.Tensor, gradient: tf.Tensor) -> tf.Operation:
        slot = self.get_slot(variable, 'accumulator')
        new = tf.gather(slot, numbers) + tf.square(gradient)
        step = tf.cast(self._rate, gradient.dtype) * gradient * tf.math.rsqrt(new)
        return tf.group(_set(slot, numbers, new), _subtract(variable, numbers, step))


class LazyAdam(tf.train.AdamOptimizer):
    """Adam that leaves rows without a gradient as they are, where tf.train.AdamOptimizer moves every row by its moments.

    m <- b1 m + (1 - b1) g; s <- b2 s + (1 - b2) g^2; v <- v - rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(s) + epsilon) for the
    rows that have a gradient, t being the number of all updates. Dense variables are updated as by its base class.
    """

    def __init__(self, learning_rate: tf.Tensor, beta1: float, beta2: float, epsilon: float = 1e-8) -> None:
        """As its base class."""
        super().__init__(learning_rate, beta1, beta2, epsilon)
        self._rate, self._betas, self._tiny = learning_rate, (beta1, beta2), epsilon

    def _resource_apply_sparse_duplicate_indices(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return apply(self._rule, handle, grad, indices)

    def _rule(self, variable: tf.Variable, numbers: tf.Tensor, gradient: tf.Tensor) -> tf.Operation:
        powers = [tf.cast(power, gradient.dtype) for power in self._get_beta_accumulators()]
        rate = tf.cast(self._rate, gradient.dtype) * tf.sqrt(1 - powers[1]) / (1 - powers[0])
        first, second = self.get_slot(variable, 'm'), self.get_slot(variable, 'v')
        mean = self._betas[0] * tf.gather(first, numbers) + (1 - self._betas[0]) * gradient
        square = self._betas[1] * tf.gather(second, numbers) + (1 - self._betas[1]) * tf.square(gradient)
        step = rate * mean / (tf.sqrt(square) + self._tiny)
        return tf.group(_set(first, numbers, mean), _set(second, numbers, square), _subtract(variable, numbers, step))


def _set(variable: tf.Variable, numbers: tf.Tensor, rows: tf.Tensor) -> Any:
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=numbers, updates=rows)


def _subtract(variable: tf.Variable, numbers: tf.Tensor, rows: tf.Tensor) -> Any:
    return tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=numbers, updates=rows)
