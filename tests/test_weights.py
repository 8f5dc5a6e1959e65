"""The weights on their way to several machines: how many messages carry them, told from the devices of a graph."""

import dataclasses

import pytest
import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import strategies
from towers.graph.reduce import packing

MACHINES, SMALL = [f'/job:worker/task:{index}' for index in range(3)], 5
TOWERS = [structs.Tower(index, (f'{machine}/cpu:0',), f'{machine}/cpu:0') for index, machine in enumerate(MACHINES)]
SURVEY = dataclasses.replace(TOWERS[0], is_survey=True)


def arrivals(place, towers):
    """For each machine the number of tensors that come to it, and how many of the large ones go behind packs.

    Each of `towers` reads some small variables and a large one, which are on device `place`.
    """
    strategy = strategies.parameter_server(parameter_device=place, seed=1)
    with tf.Graph().as_default() as graph:
        for tower in towers:
            with tf.name_scope(f'{tower.scope}/'), tf.device(tower.devices[0]), strategy.scope(tower):
                read = [tf.get_variable(f'small{index}', [2, index + 1]) for index in range(SMALL)]
                read += [tf.get_variable('moving', [3], trainable=False), tf.get_variable('large', [300, 300])]
                assert [tf.negative(variable).shape for variable in read] == [variable.shape for variable in read]
    found = {machine: set() for machine in MACHINES}
    for operation in [each for each in graph.get_operations() if not each.name.startswith(SURVEY.scope)]:
        own = task(operation.device)
        found.get(own, set()).update(tensor.name for tensor in operation.inputs if tensor.device and task(tensor.device) != own)
    packs = {name.partition(':')[0] for tensors in found.values() for name in tensors if 'packed' in name}
    large = {graph.get_operation_by_name(name.partition(':')[0]) for tensors in found.values() for name in tensors if 'large' in name}
    behind = sum(any(before.name in packs for before in read.control_inputs) for read in large)
    return [len(found[machine]) for machine in MACHINES], behind


def task(device):
    spec = tf.DeviceSpec.from_string(device)
    return f'/job:{spec.job}/task:{spec.task}'


@pytest.mark.parametrize(
    ('place', 'towers', 'expected', 'behind'),
    [
        (f'{MACHINES[0]}/cpu:0', TOWERS, [0, 2, 2], 2),
        ('/job:master/task:0/cpu:0', TOWERS, [SMALL + 2, 2, 2], 2),
        ('/job:master/task:0/cpu:0', [SURVEY, *TOWERS], [2, 2, 2], 3),
    ],
    ids=['on the first machine', 'on a master of its own', 'on a master of its own, surveyed'],
)
def test_small_weights_come_together_once_it_is_known_which_are_read(place, towers, expected, behind):
    assert arrivals(place, towers) == (expected, behind)


@pytest.mark.parametrize(
    ('kilobytes', 'expected'),
    [
        ([], []),
        ([1], [1]),
        ([100, 100, 56], [3]),
        ([100, 100, 57], [1, 2]),
        ([1] * 300, [128, 172]),
        ([200, 100], [1, 1]),
        ([64] * 40, [2, 16, 16, 6]),
    ],
)
def test_what_is_needed_first_goes_apart_from_the_rest_where_that_is_much(kilobytes, expected):
    with tf.Graph().as_default():
        groups = list(packing.groups([tf.zeros([256 * size]) for size in kilobytes]))
    assert [len(group) for group in groups] == expected
    assert [place for group in groups for place in group] == list(range(len(kilobytes)))


@pytest.mark.parametrize('count', [1, 5, 60])
def test_packed_tensors_come_whole_and_the_first_ones_first(count):
    tower, place = TOWERS[1], TOWERS[0].devices[0]
    strategy = strategies.parameter_server(parameter_device=place, seed=1)
    with tf.Graph().as_default() as graph:
        for each in TOWERS[:2]:
            with tf.name_scope(f'{each.scope}/'), tf.device(each.devices[0]), strategy.scope(each):
                read = [tf.get_variable(f'w{index}', [2, 1000 * (index % 5 + 1)]) for index in range(count)]
                values = [variable.value() for variable in read]
    assert [value.shape for value in values] == [variable.shape for variable in read]
    packs = [op for op in graph.get_operations() if op.type == 'ConcatV2']
    assert len(packs) == {1: 0, 5: 1, 60: 3}[count]
    for before, pack in zip(packs, packs[1:], strict=False):
        assert all(before in tensor.op.inputs[0].op.control_inputs for tensor in pack.inputs if tensor.op.type == 'Reshape')
    assert {task(value.device) for value in values} == {task(tower.devices[0])}
