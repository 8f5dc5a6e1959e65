"""Who takes part, from the flags."""

import harness
import pytest

from towers.cluster import spec
from towers.jobs import connecting


def test_no_hosts_are_this_machine():
    assert spec.of(harness.config()) is None


@pytest.mark.parametrize(
    ('flags', 'jobs', 'others'),
    [
        ({'worker_hosts': ('a:2222', 'b:2222')}, {'master': ['a:2221'], 'worker': ['a:2222', 'b:2222']}, 2),
        ({'worker_hosts': ('a:2222', 'b:2222'), 'master_host': 'a:2222'}, {'worker': ['a:2222', 'b:2222']}, 1),
        (
            {'worker_hosts': ('a:2222',), 'master_host': 'c:1', 'ps_hosts': ('d:5',)},
            {'master': ['c:1'], 'worker': ['a:2222'], 'ps': ['d:5']},
            2,
        ),
        ({'worker_hosts': ('[::1]:2222',)}, {'master': ['[::1]:2221'], 'worker': ['[::1]:2222']}, 1),
    ],
    ids=['own-master', 'a-worker-is-master', 'ps', 'ipv6'],
)
def test_the_tasks_of_a_cluster(flags, jobs, others):
    found = spec.of(harness.config(**flags))
    assert found.jobs() == jobs
    assert len(found.others) == others
    assert found.master not in found.others


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ({'worker_hosts': ('a',)}, r"--worker_hosts wants host:port with a port from 1 to 65535, got 'a'; give e\.g"),
        ({'worker_hosts': ('a:0',)}, "got 'a:0'"),
        ({'worker_hosts': ('a:70000',)}, "got 'a:70000'"),
        ({'worker_hosts': ('a:1', 'a:1'), 'master_host': 'b:1'}, 'address of its own, got a:1 twice'),
        ({'worker_hosts': ('a:2', 'a:1')}, 'got a:1 twice.*here a:1'),
        ({'worker_hosts': ('a:1',)}, 'give --master_host'),
        ({'ps_hosts': ('a:1',)}, '--ps_hosts needs --worker_hosts'),
        ({'worker_hosts': ('a:2',), 'min_workers': 2}, '--min_workers=2 is more than the 1'),
    ],
    ids=['no-port', 'port-0', 'large-port', 'twice', 'masters-default', 'no-master', 'ps-alone', 'min-workers'],
)
def test_addresses_that_can_not_be_right(flags, said):
    with pytest.raises(ValueError, match=said):
        spec.of(harness.config(**flags))


def test_the_token_is_of_the_hosts_or_as_given():
    tokens = [
        spec.of(harness.config(worker_hosts=hosts, run_token=token)).token
        for hosts, token in [(('a:2',), None), (('a:2',), None), (('a:3',), None), (('a:2',), 'x'), (('a:3',), 'x')]
    ]
    assert tokens[0] == tokens[1] and tokens[3] == tokens[4]
    assert len(set(tokens)) == 3


def test_a_task_is_found_by_its_number():
    found = spec.of(harness.config(worker_hosts=('a:2', 'b:2')))
    assert str(found.task('worker', 1)) == 'worker 1 at b:2'
    with pytest.raises(ValueError, match='--task_index=2 is no worker of --worker_hosts=a:2,b:2; expected 0 to 1'):
        found.task('worker', 2)


def test_the_global_batch_stays_where_machines_may_be_left_out():
    flags = {'worker_hosts': ('a:2', 'b:2', 'c:2'), 'n': 4, 'batch_size': 5}
    assert connecting.fixed(harness.config(**flags)).global_batch_size is None
    fixed = connecting.fixed(harness.config(**flags, min_workers=2))
    assert (fixed.batch_size, fixed.global_batch_size) == (None, 60)
    with pytest.raises(ValueError, match='--min_workers=2 keeps the numbers .* got --lr_scaling=linear'):
        connecting.fixed(harness.config(**flags, min_workers=2, lr_scaling='linear'))
