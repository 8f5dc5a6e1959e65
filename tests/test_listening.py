"""A socket that is bound to every address takes connections at those it is narrowed to, and at no other."""

import concurrent.futures
import contextlib
import ctypes
import errno
import platform
import select
import socket
import struct

import pytest
import reaching

from towers import listening


@pytest.fixture
def listener():
    """A socket as TensorFlow's servers have it: for IPv4 and IPv6, without waits."""
    made = socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True)
    made.setblocking(False)
    with made:
        yield made


def port_of(listener):
    return listener.getsockname()[1]


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
def test_it_is_reached_at_the_allowed_addresses_alone(listener, allowed):
    assert reaching.reached(port_of(listener)) == set(reaching.PLACES)
    listening.narrow(port_of(listener), allowed)
    assert reaching.reached(port_of(listener)) == {str(listening.plain(each)) for each in allowed} & set(reaching.PLACES)


def test_a_socket_of_ipv4_is_narrowed_too():
    with socket.create_server(('0.0.0.0', 0)) as listener:
        listener.setblocking(False)
        listening.narrow(port_of(listener), ['127.0.0.2', '::1'])
        assert reaching.reached(port_of(listener), reaching.IPV4) == {'127.0.0.2'}


def test_other_ports_and_the_sockets_themselves_are_left_alone(listener):
    with socket.create_server(('127.0.0.1', 0)) as other:
        listening.narrow(port_of(listener), ['127.0.0.2'])
        assert reaching.reached(port_of(other), ['127.0.0.1']) == {'127.0.0.1'}
    with socket.create_connection(('127.0.0.2', port_of(listener)), 5) as client:
        assert select.select([listener], [], [], 5)[0]
        with listener.accept()[0] as taken:
            client.sendall(b'in')
            taken.sendall(b'out')
            assert (taken.recv(10), client.recv(10)) == (b'in', b'out')


def test_connections_from_before_are_ended_at_other_addresses(listener):
    with contextlib.ExitStack() as held:
        clients = {place: held.enter_context(socket.create_connection((place, port_of(listener)), 5)) for place in reaching.PLACES}
        for _ in reaching.PLACES:
            assert select.select([listener], [], [], 5)[0]
            taken = held.enter_context(listener.accept()[0])
            taken.sendall(b'taken')
        waiting = held.enter_context(socket.create_connection(('127.0.0.3', port_of(listener)), 5))
        listening.narrow(port_of(listener), ['127.0.0.2'])
        said = {place: client.recv(100) + (b'' if place == '127.0.0.2' else client.recv(100)) for place, client in clients.items()}
        assert said == dict.fromkeys(reaching.PLACES, b'taken')  # and then the end
        clients['127.0.0.2'].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients['127.0.0.2'].recv(100)
        with contextlib.suppress(ConnectionResetError):
            assert waiting.recv(100) == b''
        with pytest.raises(BlockingIOError):
            listener.accept()


SETSOCKOPT = {'x86_64': 54, 'aarch64': 208}


def forbid_filters(error):
    """From here on the calling thread's system takes no filter for a socket: an error, or 0 for a success that does nothing."""
    number = SETSOCKOPT.get(platform.machine())
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, number or 0), (0x20, 0, 0, 32), (0x15, 0, 1, 26)]  # the call, and its third argument
    steps += [(0x06, 0, 0, 0x50000 + error), (0x06, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
    held = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *step) for step in steps))
    program = struct.pack('HP', len(steps), ctypes.addressof(held))
    libc = ctypes.CDLL(None)
    if number is None or libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        pytest.skip('seccomp is not available here')


@pytest.mark.parametrize(
    ('error', 'said'), [(errno.EPERM, 'Operation not permitted'), (0, 'the system took the filter and does not have it')]
)
def test_a_system_that_does_not_do_it_is_told(listener, error, said):
    def work():
        forbid_filters(error)
        with pytest.raises(OSError, match=said):
            listening.narrow(port_of(listener), ['127.0.0.1'])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread that ends takes its limits with it
        pool.submit(work).result()
    assert reaching.reached(port_of(listener)) == set(reaching.PLACES)


def test_what_can_not_be_done_is_told(listener):
    port = port_of(listener)
    with pytest.raises(OSError, match='Invalid argument'):  # more than the system takes
        listening.narrow(port, [f'127.1.{number // 250}.{number % 250}' for number in range(1000)])
    assert reaching.reached(port) == set(reaching.PLACES)
    listener.close()
    with pytest.raises(OSError, match=f'no socket of this process listens at port {port}'):
        listening.narrow(port, ['127.0.0.1'])
