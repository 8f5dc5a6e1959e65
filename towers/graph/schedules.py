"""Learning rates as a function of the step, counted in steps, examples or epochs.

All arithmetic is in int64 and float64 and only the result is fp32, so a boundary falls on its exact step as far as
step 1e9 (fp32 counts to 1.6e7). A rate is never scaled by the number of towers.
"""

import math
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from towers import config as config_lib

# A quantity in steps is taken this much smaller, so that 0.1 epochs of 70 steps (7.000000000000001) is 7 steps. It can't
# move the boundary of a whole number of steps below 1e11.
_ROUNDING = 1e-12


def make(
    config: config_lib.OptimizerConfig,
    step: tf.Tensor,
    *,
    steps_per_epoch: float | None,
    examples_per_step: int,
    total_steps: int | None,
) -> tf.Tensor:
    """The learning rate at `step`.

    Schedules, where s is the step and every length is in steps:
      constant: learning_rate.
      piecewise: learning_rate * decay_rate^(number of boundaries <= s).
      exponential: learning_rate * decay_rate^(s / decay_every), the exponent rounded down with `staircase`.
      polynomial: end + (learning_rate - end) * (1 - s / decay_over)^power, and end after decay_over.
      cosine: end + (learning_rate - end) * (1 + cos(pi * s / decay_over)) / 2, and end after decay_over (Loshchilov and
        Hutter, SGDR, without restarts).
    Warm-up multiplies whichever schedule by (s + 1) / warmup while s + 1 < warmup: the first step already learns, and
    step warmup - 1 is the first at the full rate. It does not shift the schedule.

    Args:
      config: the schedule and the unit of its lengths.
      step: int64 scalar, steps made before this one.
      steps_per_epoch: steps in one pass over the data; None where the number of examples is unknown.
      examples_per_step: size of the global batch.
      total_steps: length of the whole training, for polynomial and cosine without `decay_over`; None where unknown.

    Returns:
      float32 scalar.

    Raises:
      ValueError: a length is in epochs and `steps_per_epoch` is None, or the schedule needs an unknown length.
    """
    if config.schedule == 'constant' and not config.warmup:
        return tf.constant(config.learning_rate, tf.float32, name='learning_rate')
    to_steps = _converter(config, steps_per_epoch, examples_per_step)
    if config.schedule == 'constant':
        rate = tf.constant(config.learning_rate, tf.float64)
    elif config.schedule == 'piecewise':
        rate = _piecewise(config, step, [to_steps('boundaries', value) for value in config.boundaries])
    elif config.schedule == 'exponential':
        rate = _exponential(config, step, to_steps('decay_every', config.decay_every or 0.0))
    else:
        over = _decay_over(config, to_steps, total_steps)
        rate = (_polynomial if config.schedule == 'polynomial' else _cosine)(config, step, over)
    if config.warmup:
        made = tf.cast(step + 1, tf.float64)
        rate *= tf.minimum(made / to_steps('warmup', config.warmup), 1.0)
    return tf.cast(rate, tf.float32, name='learning_rate')


def _converter(config: config_lib.OptimizerConfig, steps_per_epoch: float | None, examples_per_step: int) -> Callable[[str, float], float]:
    """Function (field's name, value in the schedule's unit) -> the value in steps."""

    def to_steps(name: str, value: float) -> float:
        if config.schedule_unit == 'epochs' and steps_per_epoch is None:
            raise ValueError(
                f'--{name} in epochs needs the number of examples of the dataset, got a dataset of unknown size; '
                f'give --{name} with --schedule_unit=steps or examples.'
            )
        unit = {'steps': 1.0, 'examples': 1.0 / examples_per_step, 'epochs': steps_per_epoch or 0.0}[config.schedule_unit]
        return value * unit * (1 - _ROUNDING)

    return to_steps


def _decay_over(config: config_lib.OptimizerConfig, to_steps: Callable[[str, float], float], total_steps: int | None) -> float:
    if config.decay_over is not None:
        return to_steps('decay_over', config.decay_over)
    if total_steps is None:
        raise ValueError(
            f'--schedule={config.schedule} decays over the whole training, got a training of unknown length; '
            'give --decay_over or --train_steps.'
        )
    return float(max(total_steps, 1))


def _piecewise(config: config_lib.OptimizerConfig, step: tf.Tensor, boundaries: list[float]) -> tf.Tensor:
    # tf.train.piecewise_constant changes one step late (it compares with <=) and builds two nested conditionals.
    firsts = tf.constant([math.ceil(boundary) for boundary in boundaries], tf.int64)
    rates = tf.constant([config.learning_rate * config.decay_rate**k for k in range(len(boundaries) + 1)], tf.float64)
    return tf.gather(rates, tf.reduce_sum(tf.cast(step >= firsts, tf.int32)))


def _exponential(config: config_lib.OptimizerConfig, step: tf.Tensor, every: float) -> tf.Tensor:
    # TensorFlow makes fp32 of a Python number even where the rate is float64, hence the constants.
    rate, length, factor = (tf.constant(value, tf.float64) for value in (config.learning_rate, every, config.decay_rate))
    return tf.train.exponential_decay(rate, step, length, factor, staircase=config.staircase)


def _polynomial(config: config_lib.OptimizerConfig, step: tf.Tensor, over: float) -> tf.Tensor:
    rate, length, end, power = (
        tf.constant(value, tf.float64) for value in (config.learning_rate, over, config.end_learning_rate, config.power)
    )
    return tf.train.polynomial_decay(rate, step, length, end, power)


def _cosine(config: config_lib.OptimizerConfig, step: tf.Tensor, over: float) -> tf.Tensor:
    # tf.train.cosine_decay is fp32 only, and its alpha = end / learning_rate is undefined at rate 0.
    done = tf.minimum(tf.cast(step, tf.float64) / over, 1.0)
    return config.end_learning_rate + (config.learning_rate - config.end_learning_rate) * (1 + tf.cos(math.pi * done)) / 2
