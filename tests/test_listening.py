"""A server that is bound to every address takes connections at those it is kept to, and at no other, from its first moment on."""

import concurrent.futures
import contextlib
import ctypes
import errno
import os
import platform
import select
import socket
import struct

import pytest
import reaching

from towers import listening

FAMILY = socket.AF_INET6 if reaching.IPV6 else socket.AF_INET


@contextlib.contextmanager
def opened(addresses, *, family=FAMILY, port=0, then=lambda port: None):
    """A socket as TensorFlow's servers have it, and why it is not kept to the addresses; `then` is called before it has its filter."""
    made = socket.socket(family)

    def make(port):
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int('TF_GRPC_REUSE_PORT' in os.environ))
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(('::' if family == socket.AF_INET6 else '0.0.0.0', port))
        made.listen()
        then(port_of(made))
        return made

    with made:
        same, error = listening.kept_to(addresses, port, make)
        assert same is made and 'TF_GRPC_REUSE_PORT' not in os.environ
        yield made, error


def port_of(listener):
    return listener.getsockname()[1]


@pytest.mark.skipif(not reaching.IPV6, reason='this machine has no IPv6')
@pytest.mark.parametrize(
    'allowed',
    [
        ['127.0.0.2'],
        ['::2', '127.1.0.1'],
        ['::ffff:127.0.0.2'],
        ['::1'],
        ['127.0.0.3', '::1'],
        ['192.0.2.1', '2001:db8::1', '127.0.0.1', '127.0.0.2'],
    ],
    ids=','.join,
)
def test_it_is_reached_at_the_allowed_addresses_alone_and_before_at_none(allowed):
    before = []
    with opened(allowed, then=lambda port: before.append(reaching.reached(port))) as (listener, error):
        assert error is None and before == [set()]
        assert reaching.reached(port_of(listener)) == {str(listening.plain(each)) for each in allowed} & set(reaching.PLACES)


def test_without_ipv6_a_socket_of_ipv4_is_kept_too(monkeypatch):
    monkeypatch.setattr(listening, '_has_ipv6', lambda: False)
    before = []
    with opened(
        ['127.0.0.2', '::1'], family=socket.AF_INET, then=lambda port: before.append(reaching.reached(port, reaching.IPV4))
    ) as made:
        assert made[1] is None and before == [set()]
        assert reaching.reached(port_of(made[0]), reaching.IPV4) == {'127.0.0.2'}


def test_other_ports_and_the_sockets_themselves_are_left_alone():
    with socket.create_server(('127.0.0.1', 0)) as other, opened(['127.0.0.2']) as (listener, _):
        assert reaching.reached(port_of(other), ['127.0.0.1']) == {'127.0.0.1'}
        with socket.create_connection(('127.0.0.2', port_of(listener)), 5) as client:
            assert select.select([listener], [], [], 5)[0]
            with listener.accept()[0] as taken:
                client.sendall(b'in')
                taken.sendall(b'out')
                assert (taken.recv(10), client.recv(10)) == (b'in', b'out')


def test_who_comes_early_to_an_allowed_address_waits_and_is_taken():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        early = []

        def come(port):
            early.append(pool.submit(socket.create_connection, ('127.0.0.2', port), 10))
            concurrent.futures.wait(early, 0.2)
            assert not early[0].done()

        with opened(['127.0.0.2'], then=come) as (_, error):
            assert error is None
            early[0].result().close()


def test_a_port_is_nobody_elses_before_and_after():
    def taken(port):
        with pytest.raises(OSError, match='in use'):
            socket.create_server(('127.0.0.9', port))

    with opened(['127.0.0.2'], then=taken) as (listener, _):
        taken(port_of(listener))
        with pytest.raises(OSError, match='in use'), opened(['127.0.0.2'], port=port_of(listener)):
            pass
        assert reaching.reached(port_of(listener)) == {'127.0.0.2'}


def test_a_server_that_can_not_be_made_leaves_nothing_behind():
    ports = []

    def fail(port):
        ports.append(port)
        raise RuntimeError('not made')

    with pytest.raises(RuntimeError, match='not made'), opened(['127.0.0.2'], then=fail):
        pass
    assert 'TF_GRPC_REUSE_PORT' not in os.environ
    socket.create_server(('127.0.0.1', ports[0])).close()


SETSOCKOPT = {'x86_64': 54, 'aarch64': 208}


def forbid(option, error):
    """From here on the calling thread's system does not take an option for a socket: an error, or 0 for a success that does nothing."""
    number = SETSOCKOPT.get(platform.machine())
    # The call, its second and its third argument.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 5, number or 0), (0x20, 0, 0, 24), (0x15, 0, 3, socket.SOL_SOCKET), (0x20, 0, 0, 32)]
    steps += [(0x15, 0, 1, option)]
    steps += [(0x06, 0, 0, 0x50000 + error), (0x06, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
    held = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *step) for step in steps))
    program = struct.pack('HP', len(steps), ctypes.addressof(held))
    libc = ctypes.CDLL(None)
    if number is None or libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        pytest.skip('seccomp is not available here')


def knock(port):
    """Connects until somebody who is not the guard has surely been asked."""
    assert any(reaching.is_reached('127.0.0.3', port) for _ in range(20))


@pytest.mark.parametrize(
    ('option', 'error', 'said', 'then'),
    [
        (26, errno.EPERM, 'Operation not permitted', reaching.reached),
        (26, 0, 'the system took the filter and does not have it', reaching.reached),
        (51, errno.EPERM, 'Operation not permitted', reaching.reached),
        (51, 0, 'somebody could connect before the filter was on', knock),
    ],
    ids=['filter refused', 'filter ignored', 'guard refused', 'guard ignored'],
)
def test_a_system_that_does_not_do_it_is_told(option, error, said, then):
    def work():
        forbid(option, error)
        with opened(['127.0.0.1'], then=then) as (listener, why):
            assert said in str(why)
            if said != 'somebody could connect before the filter was on':
                assert reaching.reached(port_of(listener)) == set(reaching.PLACES)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread that ends takes its limits with it
        pool.submit(work).result()


def test_what_can_not_be_done_is_told():
    many = [f'127.1.{number // 250}.{number % 250}' for number in range(1000)]  # more than the system takes
    with opened(many) as (listener, error):
        assert 'Invalid argument' in str(error) and reaching.reached(port_of(listener)) == set(reaching.PLACES)
    _, error = listening.kept_to(['127.0.0.1'], 0, lambda port: None)
    assert 'no socket of this process listens at port' in str(error)
