"""At which addresses a port of this machine takes connections."""

import socket

LIMIT_SECS = 0.3  # for a packet that is dropped; the system itself answers those of its own machine, at once


def _has_ipv6():
    try:
        with socket.create_server(('::1', 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV4 = ('127.0.0.1', '127.0.0.2', '127.0.0.3')
IPV6 = ('::1',) if _has_ipv6() else ()
PLACES = (*IPV4, *IPV6)


def reached(port, hosts=PLACES):
    """Those of some addresses at which somebody can connect to a port."""
    return {host for host in hosts if is_reached(host, port)}


def is_reached(host, port):
    try:
        socket.create_connection((host, port), LIMIT_SECS).close()
    except TimeoutError:
        return False
    return True
