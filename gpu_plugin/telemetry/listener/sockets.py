"""Makes listening sockets for the HOST and PORT of --http-address, and computes how many connections are possible."""

import errno
import logging
import resource
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpu_plugin.runtime.threads import NoAnswerError, SlowCall

log = logging.getLogger(__name__)

RESOLVE_WITHIN = 10.0
"""Longest time in seconds for resolving the host's name."""

BACKLOG = 128
"""Number of connections that the kernel queues for accept."""

WANTED_DESCRIPTORS = 4096
"""Limit of descriptors to set. A higher limit has no use, and slows programs that close every possible descriptor."""

SHARE = 8
"""One of this many descriptors may be a connection for probes and metrics: the kubelet's connections need descriptors too."""

MAX_CONNECTIONS = 32
"""Largest number of connections. It is enough for any number of probes and scrapes, which take milliseconds each."""

_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors for an IPv6 address on a machine without IPv6."""


# Resolves HOST and PORT, with only one call at a time even if the resolver hangs.
Lookup = SlowCall[list[Any]]


async def listen(host: str, port: int, lookup: Lookup) -> list[socket.socket]:
    """Return a listening socket for each address of `host`; an empty host means all addresses of the machine.

    An address whose family the machine lacks is skipped if there is another address.

    Raises:
        OSError: an address cannot be bound, or there is no address.
        TimeoutError: `lookup` takes longer than `RESOLVE_WITHIN`. The next attempt waits for the same call.
    """
    resolve = partial(socket.getaddrinfo, host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        found = await lookup.joined(resolve, RESOLVE_WITHIN)
    except NoAnswerError:
        raise TimeoutError(f"{host} was not resolved within {RESOLVE_WITHIN:g} s") from None
    except UnicodeError as error:  # the name is invalid in the domain name system
        raise OSError(f"{host} cannot be resolved: {error}") from None
    bound: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as stack:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                made = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a separate socket
                made.bind(address)
                made.listen(BACKLOG)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                log.debug("not listening on %s: %s", address[0], error)
                missing = error
            else:
                bound.append(made)
        if missing is not None and not bound:
            raise missing
        stack.pop_all()
    return bound


def allowed() -> int:
    """Raise the limit of descriptors to `WANTED_DESCRIPTORS` if possible and needed. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit(soft, hard)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def limit(soft: int, hard: int) -> int:
    """Return the new soft limit for these soft and hard limits of descriptors. It is never lower than `soft`."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS))


def connections(soft: int) -> int:
    """Return the largest number of connections with `soft` descriptors; at least two."""
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(max(soft // SHARE, 2), MAX_CONNECTIONS)
