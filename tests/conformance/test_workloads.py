"""The workloads of the benchmark train to the same weights: on N towers as on one, or as the classic loop by hand on as many.

ResNet-50 is held against a classic loop that adds the penalty's gradient to the average, as the product does: on each tower it is
rounded otherwise, and with weights changed by 1e-7 the classic loop itself goes another way within a few steps. So against that one
it is held step by step, each from the same state.
"""

import dataclasses

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from scripts._bench import sides, workloads

STEPS = 10


def batch_of(work, examples):
    """The values of a batch; a dataset of them gives the same one at each step."""
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={'CPU': 1})) as session:
        return session.run(work.features(examples))


def trained(work, n, examples, *, every=STEPS):
    """The variables before the first and after every so many steps of the product, on `examples` rows that are the batch of each step."""
    settings = harness.config(
        n=n, global_batch_size=examples, optimizer='momentum', momentum=workloads.MOMENTUM, learning_rate=workloads.RATE, l2=work.l2
    )
    with harness.started(work.model, harness.rows(**batch_of(work, examples)), settings) as run:
        found = [run.variables()]
        for _ in range(STEPS // every):
            run.steps(every)
            found.append(run.variables())
        return found


def by_hand(work, n, states):
    """The trainable variables after each of as many steps of the classic loop; each begins with the state given, None = the last one's."""
    with sides.classic(sides.Case(work, n, 'constants')) as step:
        session, trainable = tf.get_default_session(), [variable.op.name for variable in tf.trainable_variables()]
        momentum = [f'{name}/Momentum' for name in trainable]
        variables = {variable.op.name: variable for variable in tf.global_variables()}
        for state in states:
            for name in [*trainable, *momentum] if state else ():
                variables[name].load(state[name], session)
            step()
            yield session.run({name: variables[name] for name in trainable})


def compare(found, expected, tolerance, *, first):
    """Holds all entries against each other; weights must have moved far enough from the first for that to mean something."""
    moved = max(np.abs(value - first[name]).max() for name, value in found.items() if f'{name}/Momentum' in found)
    assert moved > 10 * tolerance
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize('n', [2, 4])
@pytest.mark.parametrize('name', ['w1', 'w4'])
def test_as_on_one_tower(name, n):
    work = workloads.WORKLOADS[name]
    first, expected = trained(work, 1, 4 * work.batch)
    compare(trained(work, n, 4 * work.batch)[-1], expected, 1e-5, first=first)


@pytest.mark.parametrize(('n', 'batch'), [(2, 4), pytest.param(4, 32, marks=pytest.mark.soak)])
def test_w2_as_the_classic_loop_on_as_many_towers(n, batch):
    work = dataclasses.replace(workloads.WORKLOADS['w2'], batch=batch)
    first, found = trained(work, n, n * batch)
    *_, expected = by_hand(work, n, [first, *[None] * (STEPS - 1)])
    compare(found, expected, 1e-3, first=first)


class Penalised(tf.train.MomentumOptimizer):
    """Adds the penalty's gradient to what it applies."""

    def apply_gradients(self, pairs, *args, **kwargs):
        l2 = workloads.WORKLOADS['w3'].l2
        return super().apply_gradients([(gradient + l2 * variable, variable) for gradient, variable in pairs], *args, **kwargs)


@pytest.mark.parametrize(('n', 'batch'), [pytest.param(2, 2, marks=pytest.mark.soak), pytest.param(4, 8, marks=pytest.mark.soak)])
def test_w3_as_the_classic_loop(n, batch, monkeypatch):
    work = dataclasses.replace(workloads.WORKLOADS['w3'], batch=batch)
    first, found = trained(work, n, n * batch)
    monkeypatch.setattr(sides, 'make_optimizer', lambda: Penalised(workloads.RATE, workloads.MOMENTUM))
    *_, expected = by_hand(dataclasses.replace(work, l2=0.0), n, [first, *[None] * (STEPS - 1)])
    compare(found, expected, 1e-3, first=first)


@pytest.mark.soak
def test_w3_as_the_classic_loop_step_by_step():
    work = workloads.WORKLOADS['w3']
    states = trained(work, 4, 4 * work.batch, every=1)
    for before, after, expected in zip(states[:-1], states[1:], by_hand(work, 4, states[:-1]), strict=True):
        compare(after, expected, 1e-4, first=before)
