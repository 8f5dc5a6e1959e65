"""The weights on their way to several machines: how many messages carry them, told from the devices of a graph."""

import dataclasses

import pytest
import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import strategies

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
                read += [tf.get_variable('moving', [3], trainable=False), tf.get_variable('large', [200, 100])]
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
