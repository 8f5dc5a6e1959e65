"""A rehearsal of a cluster reads the flags of the training before it starts anything."""

import pathlib
import sys
import types

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2])]

from scripts import _local  # noqa: E402

OWN = {'worker_hosts': 'a:1', 'ps_hosts': 'a:1', 'master_host': 'a:1', 'hosts_file': 'hosts', 'job_name': 'ps', 'task_index': '1'}


def rehearsal(*training, **changes):
    values = {'machines': 2, 'num_gpus': 2, 'ps': 1, 'base_port': None, 'restart': True, **changes}
    return _local.Rehearsal(types.SimpleNamespace(**values), training)


@pytest.mark.parametrize('as_file', [False, True])
@pytest.mark.parametrize('name', OWN)
def test_what_it_sets_itself_is_refused(tmp_path, name, as_file):
    given = f'--{name}={OWN[name]}'
    (tmp_path / 'given.flags').write_text(given)
    with pytest.raises(ValueError, match=f'Behind -- expected flags of the training alone, got --{name}, .*; leave it out'):
        rehearsal(f'--flagfile={tmp_path}/given.flags' if as_file else given)


@pytest.mark.parametrize(
    ('training', 'said'),
    [
        (['--num_gpus=4'], 'expected --num_gpus=2 as in all processes, got 4'),
        (['--device=auto'], 'expected --device=cpu as in all processes, got auto'),
        (['--momentm=1'], "Unknown command line flag 'momentm'"),
        (['--train_steps=x'], '--train_steps'),
        (['--model=nothing'], "Unknown model 'nothing'"),
        (['--optimizer=adam', '--momentum=0.5'], '--momentum=0.5 is for'),
        (['--min_workers=3'], '--min_workers=3 is more than the 2 of --worker_hosts'),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else None,
)
def test_flags_that_the_training_would_refuse_are_refused_at_once(training, said):
    with pytest.raises(ValueError, match=said):
        rehearsal(*training)


def test_ports_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match='wants host:port with a port from 1 to 65535'):
        rehearsal(base_port=65534)


def test_what_all_processes_have_may_be_said_again():
    rehearsal('--num_gpus=2', '--device=cpu', '--min_workers=2', '--train_steps=3')
