"""Where a server of this process that listens on every address of the machine takes connections: at given addresses alone.

TensorFlow's server can not be told an address. The system can: a small program on the listening socket (a classic BPF filter, which
needs no privilege) sees each packet before TCP does and drops those to other addresses, as a firewall would, of interfaces that
come later too. Connections inherit it.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator

LOOPBACK = ('127.0.0.1', '::1')
_FOLDER = '/proc/self/fd'
_SO_ATTACH_FILTER = 26  # of asm-generic/socket.h; the module `socket` has no name for it. Read, it gives the program
# Of linux/bpf_common.h and linux/filter.h: an instruction is (code, jump if true, jump if not, operand).
_INSTRUCTION = '=HBBI'
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are those in the IP header
_DESTINATION = {4: 16, 6: 24}  # where it is in the header
_DROP, _KEEP = 0, 0xFFFFFFFF

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def narrow(port: int, addresses: Iterable[str]) -> None:
    """Lets what listens at a port in this process take connections at some addresses only, and ends those that it has at others.

    Those that wait to be taken are ended too, as nobody can tell at which address they are; clients try again.

    Args:
      port: that one or more sockets, which do not block, listen at.
      addresses: IPv4 and IPv6, at least one.

    Raises:
      OSError: it was not done, and what listens does so at every address that it is bound to.
    """
    if sys.platform != 'linux':
        raise OSError('it takes Linux')
    allowed = frozenset(map(plain, addresses))
    program = _program(sorted(allowed, key=str))
    narrowed = 0
    for each in filter(_listens, _sockets(port)):
        _attach(each, program)
        narrowed += 1
    if not narrowed:
        raise OSError(f'no socket of this process listens at port {port}')
    # From here on the filter sees each packet, but a connection from before it has none.
    for each in _sockets(port):
        if not _listens(each):
            _end(each, allowed)


def plain(address: str) -> _Address:
    """An address without the zone of an interface, as IPv4 where it is IPv4 within IPv6."""
    found = ipaddress.ip_address(address.partition('%')[0])
    return getattr(found, 'ipv4_mapped', None) or found


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


def _attach(listener: socket.socket, program: bytes) -> None:
    """Gives a listening socket its filter, and ends what waits there to be taken."""
    held = ctypes.create_string_buffer(program)
    count = len(program) // struct.calcsize(_INSTRUCTION)
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack('HP', count, ctypes.addressof(held)))
    # Some sandboxes take the option and do nothing. It is read into a buffer of its bytes, and its instructions are what is counted.
    if len(listener.getsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, len(program))) != count:
        raise OSError('the system took the filter and does not have it')
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return


def _end(connection: socket.socket, allowed: Collection[_Address]) -> None:
    """Ends a connection at another address than the allowed ones."""
    with contextlib.suppress(OSError):  # it has ended
        if plain(connection.getsockname()[0]) not in allowed:
            connection.shutdown(socket.SHUT_RDWR)


def _program(allowed: Iterable[_Address]) -> bytes:
    """Keeps packets to one of the addresses and drops all others."""
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
