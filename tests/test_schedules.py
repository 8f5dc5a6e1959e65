"""Learning rates against formulas written out in Python."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import config
from towers.graph import schedules

STEPS = (0, 1, 2, 4, 5, 9, 10, 24, 25, 26, 49, 50, 99, 100, 101, 1000, 10**6, 10**9 - 1, 10**9)


def rates(steps, *, steps_per_epoch=25.0, examples_per_step=40, total_steps=100, **options):
    """The rates of one schedule at many steps, in one graph."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.int64, [])
        rate = schedules.make(
            config.OptimizerConfig(**options),
            step,
            steps_per_epoch=steps_per_epoch,
            examples_per_step=examples_per_step,
            total_steps=total_steps,
        )
        assert rate.dtype == tf.float32 and rate.shape.rank == 0
        return [session.run(rate, {step: s}) for s in steps]


def check(got, expected):
    np.testing.assert_allclose(got, np.array(expected, np.float64), rtol=3e-7, atol=1e-38)


TABLES = {
    'constant': ({}, lambda s: 0.1),
    'piecewise': (
        {'schedule': 'piecewise', 'boundaries': (5, 25.5, 100), 'decay_rate': 0.5},
        lambda s: 0.1 * 0.5 ** ((s >= 5) + (s >= 26) + (s >= 100)),
    ),
    'exponential stairs': (
        {'schedule': 'exponential', 'decay_every': 10, 'decay_rate': 0.9999999},
        lambda s: 0.1 * 0.9999999 ** (s // 10),
    ),
    'exponential smooth': (
        {'schedule': 'exponential', 'decay_every': 10, 'decay_rate': 0.97, 'staircase': False},
        lambda s: 0.1 * 0.97 ** (s / 10) if s < 10**4 else 0.0,
    ),
    'polynomial': (
        {'schedule': 'polynomial', 'decay_over': 50, 'power': 2.0, 'end_learning_rate': 0.01},
        lambda s: 0.01 + 0.09 * (1 - min(s / 50, 1)) ** 2,
    ),
    'polynomial to the end': ({'schedule': 'polynomial'}, lambda s: 0.1 * (1 - min(s / 100, 1))),
    'cosine': (
        {'schedule': 'cosine', 'decay_over': 50, 'end_learning_rate': 0.02},
        lambda s: 0.02 + 0.08 * (1 + math.cos(math.pi * min(s / 50, 1))) / 2,
    ),
    'cosine to the end': ({'schedule': 'cosine'}, lambda s: 0.05 * (1 + math.cos(math.pi * min(s / 100, 1)))),
}


@pytest.mark.parametrize('warmup', [0, 1, 5, 26.5])
@pytest.mark.parametrize('table', TABLES)
def test_schedule_is_its_formula_times_the_warmup(table, warmup):
    options, formula = TABLES[table]
    got = rates(STEPS, learning_rate=0.1, warmup=warmup, **options)
    check(got, [formula(s) * (min((s + 1) / warmup, 1) if warmup else 1) for s in STEPS])


@pytest.mark.parametrize('unit, length', [('steps', 25), ('examples', 1000), ('epochs', 1)])
@pytest.mark.parametrize('schedule', ['piecewise', 'exponential'])
def test_law_18_a_boundary_takes_the_global_batch(schedule, unit, length):
    options = {'boundaries': (length, 2 * length)} if schedule == 'piecewise' else {'decay_every': length}
    got = rates((0, 24, 25, 49, 50), learning_rate=0.1, decay_rate=0.1, schedule=schedule, schedule_unit=unit, **options)
    check(got, [0.1, 0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize('unit, length', [('steps', 50), ('examples', 2000), ('epochs', 2)])
@pytest.mark.parametrize('field', ['warmup', 'decay_over'])
def test_every_length_is_in_the_unit(field, unit, length):
    schedule = 'polynomial' if field == 'decay_over' else 'constant'
    got = rates((0, 9, 49, 50, 60), learning_rate=1.0, schedule=schedule, schedule_unit=unit, **{field: length})
    check(got, [0.02, 0.2, 1, 1, 1] if field == 'warmup' else [1, 1 - 9 / 50, 0.02, 0, 0])


@pytest.mark.parametrize('first', [7, 2**24 + 1, 2**24 + 3, 999_999_999, 10**9])
def test_boundaries_are_exact_beyond_fp32(first):
    piecewise = rates((first - 1, first), learning_rate=1.0, schedule='piecewise', boundaries=(first,))
    stairs = rates((first - 1, first), learning_rate=1.0, schedule='exponential', decay_every=first)
    check([piecewise, stairs], [[1, 0.1], [1, 0.1]])


@pytest.mark.parametrize('tenths', range(1, 31))
def test_tenths_of_an_epoch_fall_on_whole_steps(tenths):
    epochs, first = tenths / 10, 7 * tenths  # 0.1 * 70 is 7.000000000000001 in floating point
    options = {'schedule_unit': 'epochs', 'learning_rate': 1.0, 'steps_per_epoch': 70.0}
    check(rates((first - 1, first), schedule='piecewise', boundaries=(epochs,), **options), [1, 0.1])
    check(rates((first - 1, first), schedule='exponential', decay_every=epochs, **options), [1, 0.1])


def test_stairs_of_a_fraction_of_a_step():
    steps = range(60)
    got = rates(steps, learning_rate=1.0, schedule='exponential', decay_rate=0.5, decay_every=1 / 3, schedule_unit='epochs')
    check(got, [0.5 ** (Fraction(s) // Fraction(25, 3)) for s in steps])


@pytest.mark.parametrize('schedule', ['polynomial', 'cosine'])
def test_a_training_without_steps_has_a_finite_rate(schedule):
    check(rates((0, 1), learning_rate=0.0, end_learning_rate=0.5, schedule=schedule, total_steps=0), [0, 0.5])


@pytest.mark.parametrize(
    'options',
    [
        {'schedule': 'piecewise', 'boundaries': (1, 2)},
        {'schedule': 'exponential', 'decay_every': 1},
        {'schedule': 'cosine', 'decay_over': 1},
        {'warmup': 1},
    ],
)
def test_epochs_of_an_unknown_dataset_are_refused(options):
    with pytest.raises(ValueError, match='in epochs needs the number of examples.*unknown size; give .*--schedule_unit=steps'):
        rates((0,), steps_per_epoch=None, schedule_unit='epochs', **options)


def test_epochs_without_a_length_need_no_dataset_size():
    check(rates((50,), steps_per_epoch=None, schedule_unit='epochs', learning_rate=1.0, schedule='polynomial'), [0.5])


@pytest.mark.parametrize('schedule', ['polynomial', 'cosine'])
def test_an_unknown_end_is_refused(schedule):
    with pytest.raises(ValueError, match=f'--schedule={schedule} decays over the whole training.*give --decay_over or --train_steps'):
        rates((0,), total_steps=None, schedule=schedule)
