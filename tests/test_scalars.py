"""Rows of numbers: what they hold, which rates, and the row of a step whose session did not live to write it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import test_hooks

from towers.hooks import every, scalars


def rows_of(*, log_steps=3, steps=7, secs=0.5, unwritten=None, **about):
    clock, rows, events = test_hooks.Clock(), [], []

    def hooks(made):
        return [
            scalars.ScalarsHook(
                made,
                when=every.Every(steps=log_steps, clock=clock),
                rows=rows.append,
                events=lambda step, values: events.append((step, values)),
                unwritten=lambda session: dict(unwritten or {}),
            ),
            test_hooks.Ticks(clock, secs),
        ]

    test_hooks.run(hooks, steps=steps, **about)
    return rows, events


def test_rows_hold_the_report_the_rates_and_the_metrics():
    rows, events = rows_of()
    assert [row['step'] for row in rows] == [3, 6, 7]
    counts = rows[1].pop('counts')
    assert rows[1] == {
        'step': 6,
        'loss': pytest.approx(1 / 6),
        'penalty': 0.5,
        'total_loss': pytest.approx(0.5 + 1 / 6),
        'learning_rate': pytest.approx(0.1),
        'examples': 48,
        'examples_per_sec': pytest.approx(16.0),
        'step_ms': pytest.approx(500.0),
        'accuracy': 0.5,
    }
    np.testing.assert_array_equal(counts, [6.0, 6.0])
    step, values = events[1]
    assert step == 6
    assert {**values, 'examples': 48, 'step': 6}.keys() - {'counts', 'examples_seen'} == rows[1].keys()
    assert values['examples_seen'] == 48 and 'examples' not in values and 'step' not in values


@pytest.mark.parametrize(('log_steps', 'expected'), [(1, [10500.0, 500.0, 500.0]), (2, [500.0, 500.0]), (5, [500.0])])
def test_the_first_step_counts_only_in_a_row_of_its_own(log_steps, expected):
    rows, _ = rows_of(log_steps=log_steps, steps=3)
    assert [row['step_ms'] for row in rows] == pytest.approx(expected)
    assert [row['examples_per_sec'] for row in rows] == pytest.approx([8000.0 / value for value in expected])


def test_several_steps_a_call_count_as_several():
    rows, _ = rows_of(log_steps=8, steps=5, stride=4)
    assert [row['step'] for row in rows] == [8, 16, 20]
    assert {row['step_ms'] for row in rows} == {125.0} and {row['examples_per_sec'] for row in rows} == {64.0}


def test_a_metric_may_not_take_a_name_of_the_report():
    with tf.Graph().as_default():
        made, _ = test_hooks.train_step()
        made.metrics['step_ms'] = made.metrics.pop('accuracy')
        with pytest.raises(ValueError, match="another name than the report's values, got step_ms; rename it"):
            scalars.ScalarsHook(made, when=every.Every(steps=1), rows=print, events=print)


@pytest.mark.parametrize(
    ('first', 'steps', 'expected'),
    [
        (3, 2, [3, 5]),  # due
        (4, 2, [6]),  # not due
        (3, 0, [3]),
        (4, 0, [4]),  # the last one of the run
    ],
)
def test_a_step_that_has_no_row_gets_one_where_it_is_due_or_the_last(first, steps, expected):
    known = {'step': first, 'loss': 0.5, 'skipped': 1, 'examples_seen': 8 * first}
    rows, events = rows_of(steps=steps, first=first, unwritten=known)
    assert [row['step'] for row in rows] == [step for step, _ in events] == expected
    if first in expected:
        assert rows[0] == {'step': first, 'loss': 0.5, 'skipped': 1, 'examples': 8 * first}
        assert events[0] == (first, {'loss': 0.5, 'skipped': 1, 'examples_seen': 8 * first})
    for row in rows[first in expected :]:
        assert row['examples_per_sec'] == pytest.approx(8000 / row['step_ms']) and 'accuracy' in row
