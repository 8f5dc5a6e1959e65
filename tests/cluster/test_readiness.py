"""What is wrong with a cluster is said before a session is made, soon, and by name."""

import re
import socket
import threading
import time

import harness
import processes
import pytest
import tensorflow.compat.v1 as tf

from towers import identity
from towers.cluster import address, board, readiness, server, spec, worker
from towers.jobs import connecting, serving

GO_ON = threading.Event()
PROTO = tf.ConfigProto(device_count={'CPU': 2}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


def cluster_of(**flags):
    return spec.of(harness.config(**flags))


@pytest.fixture(scope='module')
def served():
    """A cluster of two workers of which this process is the first; it never ends, as a server can't be stopped."""
    master, *workers = processes.free_ports(3)
    cluster = cluster_of(worker_hosts=tuple(workers), master_host=master)
    return cluster, *server.start(cluster, cluster.workers[0], PROTO)


def test_an_absent_task_is_named_within_the_limit(served):
    cluster, _, card = served
    start = time.monotonic()
    with pytest.raises(spec.ClusterError, match=rf'within 1 s .*worker 1 at {cluster.workers[1].address} \(nothing listens on its port\)'):
        readiness.wait(cluster.workers, card, 1.0, GO_ON)
    assert time.monotonic() - start < 3


def test_what_listens_but_is_no_server_is_told(served):
    cluster, _, card = served
    with socket.create_server((cluster.workers[1].host, cluster.workers[1].port)):
        with pytest.raises(spec.ClusterError, match='something listens there, but does not answer as a server of TensorFlow'):
            readiness.wait(cluster.workers[1:], card, 1.0, GO_ON)


def test_another_task_on_a_port_is_told(served):
    cluster, _, card = served
    other = spec.Task('worker', 1, cluster.workers[0].address)
    with pytest.raises(spec.ClusterError, match='what answers there is /job:worker/task:0'):
        readiness.wait([other], card, 0.5, GO_ON)


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'token': 'of another run'}, r'another run: its --worker_hosts, --ps_hosts, --master_host or --run_token'),
        ({'tensorflow': '2.20.0'}, rf'has tensorflow {re.escape(tf.__version__)}, here 2\.20\.0; install the same'),
        ({'towers': '9'}, 'has towers .*, here 9; install the same'),
        ({'code': 'changed'}, rf'has other code of towers \({identity.code()}\) than here \(changed\); install the same on all machines'),
    ],
)
def test_other_runs_and_versions_are_refused(served, change, said):
    cluster, _, card = served
    with pytest.raises(ValueError, match=f'worker 0 at .* can not take part: it .*{said}'):
        readiness.wait(cluster.workers[:1], {**card, **change}, 5.0, GO_ON)


def test_a_taken_port_is_told_at_once(served):
    cluster = served[0]
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf'port of worker 0 at {cluster.workers[0].address} is taken .*{cluster.workers[0].address}'):
        serving.serve(config_of(cluster), 'worker', 0, GO_ON)
    assert time.monotonic() - start < 2


def config_of(cluster):
    # Another token makes it another cluster for this process, which then starts a server of its own.
    hosts = tuple(task.address for task in cluster.workers)
    return harness.config(worker_hosts=hosts, master_host=cluster.master.address, run_token='other')


def test_the_hosts_name_must_be_known():
    [port] = processes.free_ports(1)
    task = spec.Task('worker', 0, f'no.such.host.invalid:{port.rpartition(":")[2]}')
    with pytest.raises(ValueError, match='host of worker 0 at no.such.host.invalid:.* is not known here'):
        address.check_port(task)


def test_a_run_without_its_workers_ends_in_one_line(tmp_path):
    master, gone = processes.free_ports(2)
    config = harness.config(worker_hosts=(gone,), master_host=master, connect_timeout_secs=0.5)
    with pytest.raises(spec.ClusterError, match=f'Not there within 0.5 s .*worker 0 at {gone}'):
        with connecting.connected(config, GO_ON):
            pass


def test_a_worker_notices_that_its_master_is_gone(served):
    cluster, own, _ = served
    seconds = iter(range(0, 10_000, 2))
    with board.Board(cluster.workers[0], target=own.target, timeout_secs=5) as writer:
        writer.write(board.ORDERS, {'master': 'a', 'beat': 1})
        ended = worker.watch(cluster.workers[0], own.target, Looks(20), clock=lambda: next(seconds))
        assert ended is worker.Ended.LOST
        ended = worker.watch(cluster.workers[0], own.target, Looks(20), keeps=True, clock=lambda: next(seconds))
        assert ended is worker.Ended.SIGNAL  # it went on without one
        writer.write(board.ORDERS, {'master': 'a', 'beat': 2, 'over': True})
        assert worker.watch(cluster.workers[0], own.target, Looks(20)) is worker.Ended.OVER


class Looks(threading.Event):
    """Is set after so many looks, without a wait."""

    def __init__(self, count):
        super().__init__()
        self.left = count

    def wait(self, timeout=None):
        self.left -= 1
        return self.left < 0
