"""What a cluster's traced steps are made into: records that lack something are completed by those of the next steps."""

import pytest

from towers.hooks import every, network

WHOLE = {'a/bytes_in': 8, 'b/bytes_in': 8, 'a/work_ms': 2.0}


@pytest.mark.parametrize(
    ('records', 'written'),
    [
        ([WHOLE, WHOLE], [WHOLE]),
        ([{'a/bytes_in': 3}, WHOLE, {'b/bytes_in': 8}], [WHOLE]),  # a part of one machine, then all, then one machine only
        ([WHOLE, {**WHOLE, 'a/work_ms': 5.0}, {'a/work_ms': 4.0}], [{**WHOLE, 'a/work_ms': 5.0}, {**WHOLE, 'a/work_ms': 4.0}]),
        ([{'a/bytes_in': size} for size in range(1, 9)], [{'a/bytes_in': 6}]),  # an end even where it never settles
    ],
)
def test_the_most_that_was_recorded_counts_and_nothing_is_written_before_it_settles(records, written):
    found = []
    hook = network.NetworkHook('step', when=every.Every(), write=lambda step, values: found.append(dict(values)))
    for step, record in enumerate(records):
        hook._look_at(step, record)
    assert found == written
