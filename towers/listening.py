"""Where a server of this process that listens on every address of the machine takes connections: at given addresses alone.

TensorFlow's server can not be told an address. The system can: a small program on the listening socket (a classic BPF filter, which
needs no privilege) sees each packet before TCP does and drops those to other addresses, as a firewall would, of interfaces that
come later too. Connections inherit it.

Nobody may connect before the filter is on, for gRPC keeps what it has read, even of a connection that has ended, and TensorFlow runs it
when it starts. So a socket of our own, the guard, takes the port first and shares it with the server's: what comes is sent to the
guard (a program of the group of sockets says so), which drops it, until the server's socket has its filter.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

LOOPBACK = ('127.0.0.1', '::1')
_FOLDER = '/proc/self/fd'
# Of asm-generic/socket.h; the module `socket` has no names for them. Read, the first gives the program.
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 51
_SHARES = 'TF_GRPC_REUSE_PORT'  # of the environment: whether a server that TensorFlow makes shares its port
# Of linux/bpf_common.h and linux/filter.h: an instruction is (code, jump if true, jump if not, operand).
_INSTRUCTION = '=HBBI'
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are those in the IP header
_DESTINATION = {4: 16, 6: 24}  # where it is in the header
_DROP, _KEEP = 0, 0xFFFFFFFF

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Made = TypeVar('_Made')


def kept_to(addresses: Iterable[str], port: int, make: Callable[[int], _Made]) -> tuple[_Made, OSError | None]:
    """Makes a server that takes connections at some addresses only, from its first moment on.

    Args:
      addresses: IPv4 and IPv6, at least one.
      port: that it is to listen at; 0 for a free one.
      make: makes it, given the port, with TensorFlow or with sockets that do not block and have SO_REUSEPORT.

    Returns:
      (what was made, why it takes connections at every address that it is bound to: None where it does not)
    """
    with contextlib.ExitStack() as stack:
        try:
            guard = stack.enter_context(_guard(port))
        except OSError as error:
            return make(port), error
        with _sharing():
            made = make(guard.getsockname()[1])
        try:
            _narrow(guard, _program(sorted(set(map(plain, addresses)), key=str)))
        except OSError as error:
            return made, error
        return made, None


def plain(address: str) -> _Address:
    """An address without the zone of an interface, as IPv4 where it is IPv4 within IPv6."""
    found = ipaddress.ip_address(address.partition('%')[0])
    return getattr(found, 'ipv4_mapped', None) or found


@contextlib.contextmanager
def _guard(port: int) -> Iterator[socket.socket]:
    """A socket that has a port, and drops all that comes to it and to those of this process that share it."""
    if sys.platform != 'linux':
        raise OSError('it takes Linux')
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as guard:
        if family == socket.AF_INET6:
            guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        guard.bind(('::' if family == socket.AF_INET6 else '0.0.0.0', port))
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # not before: it takes no port that others share
        nothing = _program([])
        _attach(guard, nothing)
        _set_program(guard, _SO_ATTACH_REUSEPORT_CBPF, nothing)  # here what it returns is the number of a socket: 0 is the first
        guard.listen(1)
        yield guard


def _has_ipv6() -> bool:
    """Whether gRPC uses IPv6 here: by its own test."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(('::1', 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _sharing() -> Iterator[None]:
    """What TensorFlow makes within shares its port."""
    before = os.environ.get(_SHARES)
    os.environ[_SHARES] = '1'
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHARES]
        else:
            os.environ[_SHARES] = before


def _narrow(guard: socket.socket, program: bytes) -> None:
    """Gives the sockets that listen at the guard's port their filter, and sees that nobody came before."""
    port = guard.getsockname()[1]
    narrowed = 0
    for each in _sockets(port):
        if _listens(each) and each.fileno() != guard.fileno():
            _attach(each, program)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)  # nobody is to join
            narrowed += 1
    if not narrowed:
        raise OSError(f'no socket of this process listens at port {port}')
    for each in _sockets(port):
        if each.fileno() != guard.fileno() and (not _listens(each) or each.family != guard.family or _has_waiting(each)):
            raise OSError('somebody could connect before the filter was on')


def _sockets(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that are bound to a port, each until the next is asked for; their owners keep them."""
    for name in os.listdir(_FOLDER):
        try:
            found = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if _port(found) == port:
                yield found
        finally:
            found.detach()


def _port(found: socket.socket) -> int | None:
    with contextlib.suppress(OSError):  # closed meanwhile
        return int(found.getsockname()[1]) if found.family in (socket.AF_INET, socket.AF_INET6) else None
    return None


def _listens(found: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _has_waiting(listener: socket.socket) -> bool:
    """Whether a connection waited to be taken; it is ended."""
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _attach(found: socket.socket, program: bytes) -> None:
    """Gives a socket its filter."""
    _set_program(found, _SO_ATTACH_FILTER, program)
    # Some sandboxes take the option and do nothing. It is read into a buffer of its bytes, and its instructions are what is counted.
    if len(found.getsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, len(program))) != _count(program):
        raise OSError('the system took the filter and does not have it')


def _set_program(found: socket.socket, option: int, program: bytes) -> None:
    held = ctypes.create_string_buffer(program)
    found.setsockopt(socket.SOL_SOCKET, option, struct.pack('HP', _count(program), ctypes.addressof(held)))


def _count(program: bytes) -> int:
    """Its instructions."""
    return len(program) // struct.calcsize(_INSTRUCTION)


def _program(allowed: Iterable[_Address]) -> bytes:
    """A filter that keeps packets to one of the addresses and drops all others."""
    found: list[tuple[int, int, int, int]] = []
    for address in allowed:
        words = struct.unpack(f'!{len(address.packed) // 4}I', address.packed)
        steps = [(_LOAD_BYTE, _HEADER), (_AND, 0xF0), (_JUMP_IF_EQUAL, address.version << 4)]
        for place, word in enumerate(words):
            steps += [(_LOAD_WORD, _HEADER + _DESTINATION[address.version] + 4 * place), (_JUMP_IF_EQUAL, word)]
        steps.append((_RETURN, _KEEP))
        # What is not equal goes on behind these steps, with the next address.
        found += [(code, 0, len(steps) - 1 - at if code == _JUMP_IF_EQUAL else 0, value) for at, (code, value) in enumerate(steps)]
    return b''.join(struct.pack(_INSTRUCTION, *each) for each in [*found, (_RETURN, 0, 0, _DROP)])
