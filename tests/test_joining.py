import pytest

import towers
from towers.jobs import joining
from towers.sessions import host, ledger, memory

NUMBER = 5


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A ledger of the machine for each test."""
    (tmp_path / 'runtime').mkdir()
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path / 'runtime'))
    monkeypatch.setattr(memory, 'limit_mb', lambda: 1000)


def joined(**settings):
    config = towers.Config(device='cpu', visible_gpus=(NUMBER,), **settings)
    with joining.joined(config, joining.master(config)) as (given, member):
        assert [seen.entry for seen in ledger.read(host.folder())] == [member.entry]
        return given, member.entry


@pytest.mark.parametrize(
    ('settings', 'share'),
    [
        ({}, None),
        ({'gpu_memory_fraction': 0.4}, 0.4),
        ({'gpu_memory_limit_mb': 250}, 0.25),
        ({'gpu_memory_limit_mb': 4000}, 1.0),
        ({'memory_plan': 'auto'}, 1.0),
        ({'memory_plan': 'auto', 'evaluate': True}, 1.0),  # on the CPU
        ({'memory_plan': 'auto', 'evaluate': True, 'eval_device': 'gpu'}, 0.5),
        ({'memory_plan': 'auto', 'evaluator': ('a:device=gpu', 'b:device=gpu', 'c:device=cpu')}, 0.33),
    ],
)
def test_a_session_has_the_share_that_it_names_or_is_planned(settings, share):
    given, entry = joined(**settings)
    assert (entry.share, entry.gpus, entry.fake, entry.role) == (share, (NUMBER,), True, 'master')
    if 'memory_plan' in settings:
        assert (given.gpu_memory_fraction, given.memory_plan) == (share, 'off')
        assert given.eval_gpu_memory_fraction == (share if share < 1 else None)


def test_threads_and_memory_are_those_of_the_session():
    _, entry = joined(intra_op_threads=3, inter_op_threads=2, host_memory_mb=77)
    assert (entry.intra_op_threads, entry.inter_op_threads, entry.memory_mb) == (3, 2, 77)


def test_main_memory_is_refused_beyond_the_limit():
    with pytest.raises(ValueError, match='wants 1001 MiB of main memory, of which 0 MiB of 1000 MiB are held'):
        joined(host_memory_mb=1001)


@pytest.mark.parametrize(('master', 'gpus'), [(None, ()), ('far:2222', (0, 1))])
def test_towers_elsewhere_hold_nothing_here(master, gpus):
    config = towers.Config(worker_hosts=('far:2222', 'away:2222'), master_host=master, num_gpus=2, device='cpu')
    with joining.joined(config, joining.master(config)) as (_, member):
        assert member.entry.gpus == gpus
