"""Where strategies put the variables."""

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers


def model(x, *, training):
    for width in (4, 3, 2, 2):
        x = tf.matmul(x, tf.get_variable(f'w{width}_{x.shape[1]}', [x.shape[1], width]))
    seen = tf.get_variable('seen', [100], initializer=tf.zeros_initializer(), trainable=False)
    return towers.ModelOutput(tf.reduce_mean(x) + 0 * seen[0])


def test_balanced_shares_the_trainable_variables_among_the_towers_by_bytes():
    with harness.started(model, harness.rows(np.ones([4, 5], np.float32)), harness.config('balanced', 2, global_batch_size=4)) as run:
        places = {variable.op.name: int(variable.device.rpartition(':')[2]) for variable in tf.global_variables()}
    # 20 numbers on the first, 12 on the second, 6 more there, 4 more there.
    assert places == {
        'w4_5': 1,
        'w3_4': 2,
        'w2_3': 2,
        'w2_2': 2,
        **dict.fromkeys(('seen', 'global_step', 'examples_seen', 'skipped_steps'), 0),
    }
    assert run.program.placement.towers[0].devices[0].endswith('cpu:1')


@pytest.mark.parametrize(
    ('strategy', 'more', 'said'),
    [
        ('collective', {}, '^--strategy=collective is for the towers of one machine, got a cluster of 2 machines; use parameter_server'),
        *[
            (strategy, {'ps_hosts': ('c:1',)}, f'^--ps_hosts hold .*, got --strategy={strategy}; leave one of the two out')
            for strategy in ('balanced', 'mirrored')
        ],
    ],
    ids=['collective', 'balanced', 'mirrored'],
)
def test_a_strategy_that_does_not_fit_the_cluster_is_refused(strategy, more, said):
    more = {'worker_hosts': ('a:1', 'b:1'), **more}
    with pytest.raises(ValueError, match=said):
        harness.config(strategy, **more)
