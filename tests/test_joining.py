import pytest
import test_evaluation

import towers
from towers import config as config_lib
from towers.config import evaluation as eval_config
from towers.evaluators import supervisor
from towers.jobs import joining
from towers.sessions import admission, host, ledger, memory

NUMBER = 5


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A ledger of the machine for each test."""
    (tmp_path / 'runtime').mkdir()
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path / 'runtime'))
    monkeypatch.setattr(memory, 'limit_mb', lambda: 1000)


def joined(**settings):
    config = towers.Config(device='cpu', visible_gpus=(NUMBER,), **settings)
    beside = supervisor.of(config, test_evaluation.DATA) if config.evaluate or config.evaluator else ()
    with joining.joined(config, joining.master(config, [each.config for each in beside])) as (given, member):
        first, *coming = [seen.entry for seen in ledger.read(host.folder())]
        assert first == member.entry and all(entry.is_coming and entry.pid == first.pid for entry in coming)
        return given, first, {entry.name: entry.share for entry in coming}


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
        ({'memory_plan': 'auto', 'evaluate': True, 'eval_gpu_memory_fraction': 0.2}, 0.8),
        ({'memory_plan': 'auto', 'evaluator': ('a:gpu_memory_fraction=0.2', 'b:device=auto', 'c:gpu_memory_fraction=0.3')}, 0.25),
        ({'gpu_memory_fraction': 0.8, 'evaluate': True, 'eval_gpu_memory_fraction': 0.2}, 0.8),
        ({'gpu_memory_fraction': 0.5, 'evaluate': True}, 0.5),  # on the CPU
    ],
)
def test_a_session_has_the_share_that_it_names_or_is_planned(settings, share, caplog):
    caplog.set_level('INFO')
    given, entry, coming = joined(**settings)
    assert (entry.share, entry.gpus, entry.fake, entry.role) == (share, (NUMBER,), True, 'master')
    if 'memory_plan' in settings:
        assert (given.gpu_memory_fraction, given.memory_plan) == (share, 'off')
        assert f'this session takes {share:.2f} of each of its GPUs' in caplog.text
        others = {each.name: config_lib.evaluation_devices(each.config) for each in supervisor.of(given, test_evaluation.DATA)}
        own = {name: fields.get('eval_gpu_memory_fraction') for name, fields in eval_config.specs(given.evaluator).items()}
        for name, section in others.items():
            asked = own.get(name) or given.eval_gpu_memory_fraction
            assert section.gpu_memory_fraction == (asked or (None if section.device == 'cpu' else share))
            assert coming.get(name) == (None if section.device == 'gpu' else section.gpu_memory_fraction)  # there is none


@pytest.mark.parametrize(
    ('settings', 'problem', 'ways'),
    [
        (
            {'gpu_memory_fraction': 0.9, 'evaluator': ('s:device=cpu,gpu_memory_fraction=0.2',)},
            'This session wants 0.90 of fake GPU 5, of which 0.20 is held and 0.80 free.',
            '--gpu_memory_fraction=0.8, or smaller shares of its evaluators.',
        ),
        (
            {'gpu_memory_fraction': 0.9, 'evaluate': True, 'eval_gpu_memory_fraction': 0.2},
            'This session wants 0.90 of fake GPU 5, of which 0.20 is held and 0.80 free.',
            '--gpu_memory_fraction=0.8, or smaller shares of its evaluators.',
        ),
        (
            {'evaluator': ('s:gpu_memory_fraction=0.7', 't:gpu_memory_fraction=0.4')},
            'The evaluator t wants 0.40 of fake GPU 5, of which 0.70 is held and 0.30 free.',
            'its gpu_memory_fraction=0.3.',
        ),
    ],
    ids=['own', 'evaluate', 'evaluators'],
)
def test_the_shares_of_its_own_evaluators_must_fit_at_the_start(settings, problem, ways):
    with pytest.raises(admission.Refused) as refused:
        joined(**settings)
    first, *table, fits = refused.value.screen.splitlines()
    assert (first, fits) == (problem, f'What would fit: {ways}')
    assert [line.split()[:4] for line in table[1:]] == [['evaluator', 's' if 'evaluator' in settings else 'test', 'to', 'come']]


def test_a_limit_in_megabytes_of_a_fake_gpu_says_what_it_counts_as(caplog):
    caplog.set_level('INFO')
    joined(gpu_memory_limit_mb=250)
    assert (
        '--gpu_memory_limit_mb=250 counts as 0.25 of a fake GPU: its size is not known, and the main memory, 1000 MiB, stands'
        in caplog.text
    )


def test_a_plan_and_a_share_are_two_answers():
    with pytest.raises(ValueError, match='--memory_plan=auto chooses the share, got --gpu_memory_fraction=0.5 too; give one of the two'):
        towers.Config(memory_plan='auto', gpu_memory_fraction=0.5)
    with pytest.raises(ValueError, match='--eval_gpu_memory_fraction must be above 0 and at most 1, got 2.0'):
        towers.Config(eval_gpu_memory_fraction=2.0)


def test_threads_and_memory_are_those_of_the_session():
    _, entry, _ = joined(intra_op_threads=3, inter_op_threads=2, host_memory_mb=77)
    assert (entry.intra_op_threads, entry.inter_op_threads, entry.memory_mb) == (3, 2, 77)


def test_main_memory_is_refused_beyond_the_limit():
    with pytest.raises(ValueError, match='wants 1001 MiB of main memory, of which 0 MiB of 1000 MiB are held'):
        joined(host_memory_mb=1001)


@pytest.mark.parametrize(('master', 'gpus'), [(None, ()), ('far:2222', (0, 1))])
def test_towers_elsewhere_hold_nothing_here(master, gpus):
    config = towers.Config(worker_hosts=('far:2222', 'away:2222'), master_host=master, num_gpus=2, device='cpu')
    with joining.joined(config, joining.master(config)) as (_, member):
        assert member.entry.gpus == gpus
