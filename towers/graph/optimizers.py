"""Optimizers by name, and the application of one update: decoupled weight decay, then the optimizer."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.graph import rows

Factory: TypeAlias = Callable[[tf.Tensor], tf.train.Optimizer]  # learning rate -> a fresh optimizer


def _constant(momentum: float) -> tf.Tensor:
    """Made with the optimizer, it is there before the update is let through, which would else wait for it."""
    return tf.constant(momentum, name='momentum')


def _sgd(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return tf.train.GradientDescentOptimizer(rate)


def _momentum(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return rows.Momentum(rate, _constant(config.momentum))


def _nesterov(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return rows.Momentum(rate, _constant(config.momentum), use_nesterov=True)


def _adam(config: config_lib.OptimizerConfig, rate: tf.Tensor, **epsilon: float) -> tf.train.Optimizer:
    return tf.train.AdamOptimizer(rate, config.beta1, config.beta2, **epsilon)


def _lazy_adam(config: config_lib.OptimizerConfig, rate: tf.Tensor, **epsilon: float) -> tf.train.Optimizer:
    return rows.LazyAdam(rate, config.beta1, config.beta2, **epsilon)


def _rmsprop(config: config_lib.OptimizerConfig, rate: tf.Tensor, **epsilon: float) -> tf.train.Optimizer:
    return tf.train.RMSPropOptimizer(rate, config.rho, config.momentum, **epsilon)


def _adagrad(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return rows.Adagrad(rate)


def _adagrad_da(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return tf.train.AdagradDAOptimizer(rate, tf.train.get_or_create_global_step())


def _adadelta(config: config_lib.OptimizerConfig, rate: tf.Tensor, **epsilon: float) -> tf.train.Optimizer:
    return tf.train.AdadeltaOptimizer(rate, config.rho, **epsilon)


def _ftrl(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return tf.train.FtrlOptimizer(rate)


def _proximal_sgd(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return tf.train.ProximalGradientDescentOptimizer(rate)


def _proximal_adagrad(config: config_lib.OptimizerConfig, rate: tf.Tensor, **_: Any) -> tf.train.Optimizer:
    return tf.train.ProximalAdagradOptimizer(rate)


OPTIMIZERS: Mapping[str, Callable[..., tf.train.Optimizer]] = {
    'sgd': _sgd,
    'momentum': _momentum,
    'nesterov': _nesterov,
    'adam': _adam,
    'lazy_adam': _lazy_adam,
    'adamw': _adam,  # the decay is decoupled, so it's `apply`'s
    'rmsprop': _rmsprop,
    'adagrad': _adagrad,
    'adagrad_da': _adagrad_da,
    'adadelta': _adadelta,
    'ftrl': _ftrl,
    'proximal_sgd': _proximal_sgd,
    'proximal_adagrad': _proximal_adagrad,
}


_REMEDY = 'give e.g. optimizer=lambda rate: tf.train.AdamOptimizer(rate).'


def make(config: config_lib.OptimizerConfig) -> Factory:
    """A factory of the optimizer that `config` names.

    The factory makes a new object at each call, since an optimizer keeps the slots of one copy of the variables.
    `adagrad_da` reads the global step of the graph in which the factory is called. `adamw` without weight decay is plain
    Adam: that's allowed and logged, as no default decay is added in silence.
    """
    build, name = OPTIMIZERS[config.optimizer], config.optimizer
    if name == 'adamw' and not config.weight_decay:
        logging.warning('--optimizer=adamw with --weight_decay=0 is adam; give e.g. --weight_decay=0.01, or --optimizer=adam.')
    epsilon = {} if config.epsilon is None else {'epsilon': config.epsilon}
    return lambda learning_rate: build(config, learning_rate, **epsilon)


def require_factory(given: Any) -> None:
    """Refuses what is no function from a learning rate to an optimizer, such as an optimizer.

    Raises:
      ValueError: it can't be called.
    """
    if not callable(given):
        raise ValueError(f'optimizer= wants a function from the learning rate to a tf.train.Optimizer, got {_a(given)}; {_REMEDY}')


def apply(
    factory: Factory,
    update: structs.Update,
    *,
    learning_rate: tf.Tensor,
    weight_decay: float,
    after: Sequence[tf.Operation | tf.Tensor] = (),
) -> tf.Operation:
    """Applies one update: v <- v - learning_rate * weight_decay * v, then the optimizer's step.

    The gradients were taken at the old values, so the result is PyTorch's AdamW and SGDW (Loshchilov and Hutter, Decoupled
    Weight Decay Regularization). Every trainable variable decays, also one that has no gradient. Nothing is written before
    all gradients and all of `after` are there, so nothing that they are made of can see a new value.

    Args:
      factory: makes the `tf.train.Optimizer` of this copy of the variables alone, from `learning_rate`.
      update: gradients in fp32 at least, None to skip a variable; they are cast to the variables' types here. Variables
        that the optimizer makes are made in `update.scope()`, a context of variable creators.
      learning_rate: fp32 scalar.
      weight_decay: 0.0 for none.
      after: readers of the old values, such as the losses and the penalty.

    Returns:
      Operation after which all variables and slots are new.

    Raises:
      ValueError: a user's factory gave something else than an optimizer.
    """
    with tf.device(update.device), tf.name_scope('apply/'):  # one scope for all copies' updates
        optimizer = factory(learning_rate)
        if not isinstance(optimizer, tf.train.Optimizer):
            raise ValueError(f'The function given as optimizer= must return a tf.train.Optimizer, got {_a(optimizer)}; {_REMEDY}')
        pairs = _cast(update)
        parts = [part for gradient, _ in pairs for part in _tensors(gradient)]
        ready = tf.group(*parts, *after, name='ready')
        with tf.control_dependencies([ready]):
            first = [_decay(variable, learning_rate * weight_decay) for variable in update.variables] if weight_decay else [ready]
        with contextlib.ExitStack() as stack:
            with tf.init_scope():  # Inside tf.cond or a loop, TensorFlow makes the slots in the graph around it.
                stack.enter_context(update.scope())
            stack.enter_context(tf.control_dependencies(first))
            return optimizer.apply_gradients(pairs, name='update')


def _a(given: Any) -> str:
    return 'None' if given is None else f'an object of {type(given).__module__}.{type(given).__name__}'


def _cast(update: structs.Update) -> list[tuple[tf.Tensor | tf.IndexedSlices, tf.Variable]]:
    """The gradients that there are, in their variables' types."""
    pairs = []
    for gradient, variable in zip(update.gradients, update.variables, strict=True):
        if gradient is None:
            continue
        dtype = variable.dtype.base_dtype
        with tf.device(variable.device):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
            else:
                gradient = tf.cast(gradient, dtype)
        pairs.append((gradient, variable))
    return pairs


def _tensors(gradient: tf.Tensor | tf.IndexedSlices) -> tuple[tf.Tensor, ...]:
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)


def _decay(variable: tf.Variable, factor: tf.Tensor) -> tf.Operation:
    """v <- v - factor * v, the product in fp32 at least, as a small factor is 0 in half precision."""
    with tf.device(variable.device):
        value = variable.read_value()
        dtype = tf.float64 if value.dtype == tf.float64 else tf.float32
        lost = tf.cast(tf.cast(value, dtype) * tf.cast(factor, dtype), value.dtype)
        return variable.assign_sub(lost, read_value=False)
