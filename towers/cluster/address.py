"""Where a task of the cluster can be reached: what its host stands for on this machine, and whether its port is free."""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from towers import listening
from towers.cluster import spec

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # another machine's, or of a family that this one does not have

_Found = tuple[socket.AddressFamily, Any]  # what a socket is bound with


def check_port(task: spec.Task) -> dict[str, bool]:
    """Makes sure that a task's port is free, without a wait.

    Returns:
      The addresses that its host stands for here -> whether each is one of this machine's.

    Raises:
      ValueError: it is taken, or the host's name is unknown.
    """
    try:
        found = _resolved(task)
    except OSError as error:
        raise ValueError(f'The host of {task} is not known here ({error}); correct its name or give its address.') from None
    for family in dict.fromkeys(family for family, _ in found):
        _can_bind(task, family, ('::' if family == socket.AF_INET6 else '0.0.0.0', task.port))
    return {str(where[0]): _can_bind(task, family, where) for family, where in found}


def why_open(cluster: spec.Cluster, task: spec.Task, found: Mapping[str, bool]) -> str | None:
    """Why a task's server must take connections at every address of this machine; None where those of its host do.

    Args:
      cluster: all tasks.
      task: the one that this process is.
      found: what its host stands for, of `check_port`.
    """
    foreign = [address for address, is_own in found.items() if not is_own]
    if foreign:
        return f'{foreign[0]} is not an address of this machine, and others reach it only where something forwards it'
    if any(listening.plain(address).is_unspecified for address in found):
        return f'{task.host} stands for all'
    if _is_name(task.host) and any(listening.plain(address).is_loopback for address in found):
        distant = next((other for other in _others(cluster, task) if not _is_loopback(other)), None)
        if distant is not None:
            return f'{task.host} means {", ".join(found)} here (/etc/hosts?), where {distant} would not reach it: give addresses, not names'
    return None


def allowed(task: spec.Task, found: Mapping[str, bool]) -> tuple[str, ...]:
    """The addresses at which a task is to be reached; a name of the loopback stands for both of its usual ones, as resolvers differ."""
    if _is_name(task.host) and any(listening.plain(address).is_loopback for address in found):
        return tuple(dict.fromkeys((*found, *listening.LOOPBACK)))
    return tuple(found)


def _resolved(task: spec.Task) -> list[_Found]:
    return [(family, where) for family, _, _, _, where in socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)]


def _others(cluster: spec.Cluster, task: spec.Task) -> list[spec.Task]:
    """The tasks of other hosts."""
    return [other for other in (cluster.master, *cluster.others) if other.host != task.host]


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _is_loopback(task: spec.Task) -> bool:
    """Whether a task's host is this machine alone; one that is not known here isn't."""
    try:
        return all(listening.plain(where[0]).is_loopback for _, where in _resolved(task))
    except OSError:
        return False


def _can_bind(task: spec.Task, family: socket.AddressFamily, where: Any) -> bool:
    """Whether a socket can be bound to an address; False where it is not this machine's."""
    try:
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f'The port of {task} is taken ({task.address}): another process listens there, perhaps of an earlier run; '
                'end it, or give other ports.'
            ) from None
        raise ValueError(f'{task} can not listen there ({error.strerror}); give another port.') from None
    return True
