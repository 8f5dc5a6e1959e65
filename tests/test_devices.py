import pytest
import tensorflow.compat.v1 as tf

from towers import config
from towers.graph import devices, machines
from towers.run import session_config

CPU4 = ['/cpu:1', '/cpu:2', '/cpu:3', '/cpu:4']
GPU4 = ['/gpu:0', '/gpu:1', '/gpu:2', '/gpu:3']


@pytest.mark.parametrize(
    ('device', 'towers', 'gpus', 'expected'),
    [
        ('auto', 4, 0, CPU4),
        ('auto', 4, 4, GPU4),
        ('auto', 2, 8, GPU4[:2]),
        ('auto', 1, 0, ['/cpu:0']),
        ('auto', 1, 1, ['/gpu:0']),
        ('cpu', 4, 8, CPU4),
        ('cpu', 1, 8, ['/cpu:0']),
        ('gpu', 4, 4, GPU4),
    ],
)
def test_towers_have_their_devices(device, towers, gpus, expected):
    placement = devices.place(config.DeviceConfig(num_gpus=towers, device=device), gpus=gpus)
    assert [tower.devices for tower in placement.towers] == [(name,) for name in expected]
    assert [tower.index for tower in placement.towers] == list(range(towers))
    assert {tower.host for tower in placement.towers} == {placement.parameter_device} == {'/cpu:0'}
    assert placement.fake == expected[0].startswith('/cpu')


@pytest.mark.parametrize(
    ('device', 'towers', 'gpus', 'message'),
    [
        ('auto', 4, 2, '4 GPUs asked, 2 found; use --num_gpus=2, or --device=cpu for fake GPUs on the CPU.'),
        ('gpu', 4, 1, '4 GPUs asked, 1 found; use --num_gpus=1, or --device=cpu for fake GPUs on the CPU.'),
        ('gpu', 1, 0, '1 GPU asked, 0 found (--verbose shows why TensorFlow finds none); use --device=cpu for a tower on the CPU.'),
    ],
)
def test_too_few_gpus_are_refused_with_the_ways_out(device, towers, gpus, message):
    with pytest.raises(ValueError) as error:
        devices.place(config.DeviceConfig(num_gpus=towers, device=device), gpus=gpus)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ('device', 'towers', 'gpus', 'note'),
    [
        ('auto', 4, 0, '4 towers on CPU devices as fake GPUs: no GPU was found.'),
        ('cpu', 4, 4, '4 towers on CPU devices as fake GPUs, as --device=cpu asks.'),
        ('auto', 1, 0, '1 tower on the CPU: no GPU was found.'),
        ('auto', 2, 4, '2 towers on 2 GPUs: logical 0 = physical 0, logical 1 = physical 1.'),
        ('gpu', 1, 1, '1 tower on 1 GPU: logical 0 = physical 0.'),
    ],
)
def test_the_note_says_where_and_why(device, towers, gpus, note):
    assert devices.place(config.DeviceConfig(num_gpus=towers, device=device), gpus=gpus).note == note


@pytest.mark.parametrize(
    ('options', 'gpus', 'shown', 'pairs', 'towers'),
    [
        ({'num_gpus': 2}, 4, None, ((0, 0), (1, 1)), GPU4[:2]),
        ({'num_gpus': 2, 'visible_gpus': (5, 3)}, 8, None, ((5, 5), (3, 3)), GPU4[:2]),
        ({'num_gpus': 1, 'visible_gpus': (7,)}, 2, '5, 7', ((1, 7),), GPU4[:1]),
        ({'num_gpus': 2}, 3, '6,4,5', ((0, 6), (1, 4)), GPU4[:2]),
        ({'num_gpus': 4, 'towers_per_gpu': 2}, 2, None, ((0, 0), (1, 1)), GPU4),
        ({'num_gpus': 3, 'towers_per_gpu': 2, 'visible_gpus': (4, 1)}, 8, None, ((4, 4), (1, 1)), GPU4[:3]),
        ({'num_gpus': 2, 'visible_gpus': (5, 7)}, 0, None, ((0, 5), (1, 7)), CPU4[:2]),
        ({'num_gpus': 4, 'towers_per_gpu': 2}, 0, None, ((0, 0), (1, 1)), CPU4),
    ],
)
def test_physical_numbers_are_those_of_the_machine(monkeypatch, options, gpus, shown, pairs, towers):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if shown:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
    placement = devices.place(config.DeviceConfig(**options), gpus=gpus)
    assert placement.gpus == pairs
    assert [tower.devices[0] for tower in placement.towers] == towers
    if gpus or 'visible_gpus' in options:
        assert all(f'logical {logical} = physical {number}' in placement.note for logical, (_, number) in enumerate(pairs))


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5')
    with pytest.raises(ValueError, match=r'^--visible_gpus=5,6: no GPU 6 is visible, only 4, 5; give physical numbers of these'):
        devices.place(config.DeviceConfig(num_gpus=2, visible_gpus=(5, 6)), gpus=2)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'visible_gpus': (1, 1), 'num_gpus': 2}, 'wants each number once, from 0 on'),
        ({'visible_gpus': (1,), 'num_gpus': 2}, 'names 1, 2 towers with 1 on each need 2'),
        ({'gpu_memory_fraction': 1.5}, 'above 0 and at most 1, got 1.5'),
        ({'gpu_memory_fraction': 0.5, 'gpu_memory_limit_mb': 10}, 'two ways to say one thing'),
        ({'gpu_thread_count': 2}, 'give --gpu_thread_mode=gpu_private'),
        ({'towers_per_gpu': 0}, '--towers_per_gpu must be at least 1'),
    ],
)
def test_options_that_can_not_be_right_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config.DeviceConfig(**options)


@pytest.mark.parametrize(
    ('fields', 'flag'),
    [
        ({'xla': True}, '--xla compiles what runs on GPUs'),
        ({'gpu_allow_growth': False}, "--nogpu_allow_growth says how a GPU's memory is taken"),
        ({'gpu_allocator': 'cuda_malloc_async'}, "--gpu_allocator=cuda_malloc_async says who manages a GPU's memory"),
        ({'gpu_thread_mode': 'gpu_private', 'gpu_thread_count': 3}, '--gpu_thread_mode=gpu_private is for threads that launch kernels'),
    ],
    ids=['xla', 'growth', 'allocator', 'threads'],
)
def test_what_is_for_gpus_alone_is_refused_on_the_cpu_and_no_evaluators_there(fields, flag):
    for device in ('cpu', 'auto'):
        with pytest.raises(ValueError, match=f'{flag}.*, got towers on the CPU; leave it out, or use --device=gpu'):
            devices.place(config.DeviceConfig(device=device, **fields), gpus=0)
    assert not devices.place(config.DeviceConfig(**fields), gpus=1).fake
    assert devices.place(config.evaluation_devices(config.Config(**fields)), gpus=1).fake


def test_without_a_count_tensorflow_is_asked():
    found = len(tf.config.list_physical_devices('GPU'))
    placement = devices.place(config.DeviceConfig(num_gpus=max(found, 2)))
    assert placement.fake == (found == 0)


@pytest.mark.parametrize('towers', [1, 2, 4])
def test_a_session_with_its_options_has_each_fake_device(towers):
    asked = config.DeviceConfig(num_gpus=towers, device='cpu')
    placement = devices.place(asked)
    with tf.Graph().as_default(), tf.Session(config=session_config.make(asked, placement)) as session:
        devices.check_devices(session, placement)


def test_missing_devices_are_named():
    placement = devices.place(config.DeviceConfig(num_gpus=3, device='cpu'))
    options = tf.ConfigProto(device_count={'CPU': 2})
    with tf.Graph().as_default(), tf.Session(config=options) as session:
        with pytest.raises(ValueError, match=r'wants /cpu:2, /cpu:3, the session has /job:localhost.*CPU:0, .*CPU:1; make'):
            devices.check_devices(session, placement)


@pytest.mark.parametrize(
    ('gpus', 'cpus', 'asked', 'said'),
    [
        (
            0,
            1,
            2,
            '2 CPU devices as fake GPUs asked .*, b offers 1; start its scripts/worker.py with --num_gpus=2, or use --num_gpus=1 here',
        ),
        (0, 3, 4, '4 CPU devices as fake GPUs asked .*, b offers 2; start .* --num_gpus=4, or use --num_gpus=2 here'),
        (1, 1, 2, '2 GPUs asked .*, b offers 1; start'),
        (0, 1, 1, None),
        (0, 3, 2, None),
    ],
    ids=range(5),
)
def test_a_machine_with_too_few_devices_is_told_by_what_it_has(gpus, cpus, asked, said):
    there = [machines.Machine('/job:worker/task:0', 'a', gpus and 8, 9), machines.Machine('/job:worker/task:1', 'b', gpus, cpus)]
    wanted = config.Config(num_gpus=asked, device='gpu' if gpus else 'cpu')
    if said is None:
        assert len(machines.place(wanted, there, master='/job:master').towers) == 2 * asked
        return
    with pytest.raises(ValueError, match=said):
        machines.place(wanted, there, master='/job:master')
