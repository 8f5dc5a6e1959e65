"""A task's server takes connections at the addresses that its host stands for, where the other tasks reach it there."""

import itertools
import re
import subprocess
import sys

import harness
import processes
import pytest
import reaching
import starter
import tensorflow.compat.v1 as tf

from towers.cluster import address, server, spec

PROTO = tf.ConfigProto(device_count={'CPU': 1}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
DISTANT = '192.0.2.77'  # of a network for documentation, which nobody has
CONNECT = "import socket; socket.create_connection(('{}', {}), 2).close()"


def cluster_of(host, *others):
    """A cluster whose first worker has a host, or several."""
    master, *ports = [int(each.rpartition(':')[2]) for each in processes.free_ports(2 + len(others))]
    hosts = tuple(f'{name}:{port}' for name, port in zip((host, *others), ports, strict=False))
    return spec.of(harness.config(worker_hosts=hosts, master_host=f'127.0.0.1:{master}'))


def started(cluster):
    """The first worker's task, its server being started in this process, where it stays."""
    server.start(cluster, cluster.workers[0], PROTO)
    return cluster.workers[0]


@pytest.mark.parametrize(
    ('host', 'places'),
    [('127.0.0.2', {'127.0.0.2'}), ('[::1]', {'::1'}), ('localhost', {'127.0.0.1', '::1'}), ('[::ffff:127.0.0.3]', {'127.0.0.3'})],
)
def test_a_server_is_reached_at_its_host_alone(host, places, caplog):
    if not places & set(reaching.PLACES):
        pytest.skip('this machine has no IPv6')
    with caplog.at_level('INFO'):
        task = started(cluster_of(host, '127.0.0.9'))
    assert reaching.reached(task.port) == places & set(reaching.PLACES)
    [record] = [record for record in caplog.records if 'listens' in record.message]
    assert record.levelname == 'INFO' and record.message.startswith(f'worker 0 at {host}:{task.port}: listens at ')
    assert record.message.endswith(' only.')


HAMMER = """
import socket, sys, threading
port, stop, came = int(sys.argv[1]), threading.Event(), []
def hammer(host):
    while not stop.is_set():
        with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET) as client:
            client.settimeout(0.05)
            try:
                client.connect((host, port))
                came.append(host)
            except (TimeoutError, ConnectionError):
                pass
threads = [threading.Thread(target=hammer, args=(host,)) for host in sys.argv[2:]]
for each in threads:
    each.start()
print('hammers', flush=True)
sys.stdin.read()
stop.set()
for each in threads:
    each.join()
print(sorted(set(came)))
"""


def test_nobody_connects_elsewhere_in_any_moment_of_a_start(monkeypatch):
    before, make = [], tf.train.Server
    cluster = cluster_of('127.0.0.2')
    port = cluster.workers[0].port

    def looked_at(*args, **settings):
        made = make(*args, **settings)
        before.append(reaching.reached(port))
        return made

    monkeypatch.setattr(tf.train, 'Server', looked_at)
    forbidden = sorted(set(reaching.PLACES) - {'127.0.0.2'})
    command = [sys.executable, '-c', HAMMER, str(port), *forbidden]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hammer:
        assert hammer.stdout.readline() == 'hammers\n'
        started(cluster)
        assert hammer.communicate(timeout=20)[0] == '[]\n'
    assert before == [set()]  # there is a server, and no way to it
    assert reaching.reached(port) == {'127.0.0.2'}


def test_a_name_that_others_take_for_another_address_leaves_it_open(caplog):
    cluster = cluster_of('localhost', DISTANT)
    task = started(cluster)
    assert reaching.reached(task.port) == set(reaching.PLACES)
    [record] = [record for record in caplog.records if 'listens' in record.message]
    assert record.levelname == 'WARNING' and f'listens on port {task.port} of every address of this machine' in record.message
    assert 'localhost means 127.0.0.1' in record.message
    assert f'where {cluster.workers[1]} would not reach it: give addresses, not names' in record.message


def test_a_system_that_refuses_leaves_it_open(caplog, monkeypatch):
    # So many addresses are more than the system takes.
    monkeypatch.setattr(address, 'allowed', lambda *_: [f'127.1.{number // 250}.{number % 250}' for number in range(1000)])
    task = started(cluster_of('127.0.0.2'))
    assert reaching.reached(task.port) == set(reaching.PLACES)
    assert 'every address of this machine (it can not be kept to 127.0.0.2 here ([Errno 22] Invalid argument)); it asks' in caplog.text


@pytest.mark.parametrize(
    ('hosts', 'found', 'why'),
    [
        (['127.0.0.2', DISTANT], {'127.0.0.2': True}, None),  # an address is the same everywhere
        (['node1', DISTANT], {'10.9.0.1': True, 'fd00::7': True}, None),
        (['node1', 'node1', '127.0.0.1'], {'127.0.1.1': True}, None),
        (['node1', DISTANT], {'127.0.1.1': True}, 'node1 means 127.0.1.1 here .* where worker 1 at 192.0.2.77:.* give addresses'),
        (['node1', DISTANT], {'127.0.1.1': True, 'fd00::7': True}, 'node1 means 127.0.1.1, fd00::7 here'),
        (['node1', 'no.such.host.invalid'], {'127.0.1.1': True}, 'where worker 1 at no.such.host.invalid:'),
        (['node1', DISTANT], {'10.9.0.1': True, '10.9.0.2': False}, '10.9.0.2 is not an address of this machine'),
        (['0.0.0.0'], {'0.0.0.0': True}, '0.0.0.0 stands for all'),
        (['[::]'], {'::': True}, ':: stands for all'),
    ],
    ids=itertools.count(),
)
def test_which_hosts_can_be_kept_to(hosts, found, why):
    cluster = cluster_of(*hosts)
    said = address.why_open(cluster, cluster.workers[0], found)
    assert said is None if why is None else re.search(why, said)


def test_whose_an_address_is():
    [mine] = cluster_of('127.0.0.2').workers
    [foreign] = cluster_of(DISTANT).workers
    assert address.check_port(mine) == {'127.0.0.2': True} and address.check_port(foreign) == {DISTANT: False}


def outcome(host, where, port):
    """What becomes of a connection from a host: the name of the error, or nothing."""
    command = ['ip', 'netns', 'exec', host, sys.executable, '-c', CONNECT.format(where, port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1].partition(':')[0] if done.returncode else ''


def test_a_machine_with_two_interfaces_answers_at_the_given_one(two_hosts, tmp_path):
    (here, given, _), (there, distant, _) = two_hosts
    subprocess.run(['ip', '-n', here, 'link', 'add', 'other', 'type', 'veth', 'peer', 'name', 'other', 'netns', there], check=True)
    for host, number in ((here, 1), (there, 9)):
        subprocess.run(['ip', '-n', host, 'addr', 'add', f'10.78.0.{number}/24', 'dev', 'other'], check=True)
        subprocess.run(['ip', '-n', host, 'link', 'set', 'other', 'up'], check=True)
    command = [sys.executable, processes.WORKER, f'--worker_hosts={given}:2222,{distant}:2222', '--task_index=0', '--device=cpu']
    with open(tmp_path / 'output', 'wb') as output:
        worker = subprocess.Popen(['ip', 'netns', 'exec', here, *command], stdout=output, stderr=output, cwd=tmp_path)
    try:
        starter.wait_for(lambda: 'listens' in (tmp_path / 'output').read_text() or worker.poll() is not None)
        text = (tmp_path / 'output').read_text()
        assert f'worker 0 at {given}:2222: listens at {given} only; it asks for no password' in text
        subprocess.run(['ip', '-n', here, 'addr', 'add', '10.78.0.2/24', 'dev', 'other'], check=True)  # it came later
        places = [given, '10.78.0.1', '10.78.0.2']
        assert [outcome(there, where, 2222) for where in places] == ['', 'TimeoutError', 'TimeoutError']
        assert [outcome(there, where, 2223) for where in places] == ['ConnectionRefusedError'] * 3  # there is a way to all
        assert outcome(here, '127.0.0.1', 2222) == 'TimeoutError'
    finally:
        worker.kill()
        worker.wait()
