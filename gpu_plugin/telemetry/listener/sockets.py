"""From the HOST and PORT of --http-address to sockets that listen, and how many connections the process can afford."""

import errno
import logging
import resource
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import NoAnswerError, begin

log = logging.getLogger(__name__)

RESOLVE_WITHIN = 10.0
"""Seconds that the name of a host may take to be resolved."""

BACKLOG = 128
"""Connections that the kernel keeps ready to be accepted."""

WANTED_DESCRIPTORS = 4096
"""Descriptors that the process asks for at most. More would be no use to it, and slow programs that close every possible one."""

SHARE = 8
"""One descriptor in so many may be a connection for probes and metrics: the kubelet's connections need them, too."""

MAX_CONNECTIONS = 32
"""Connections that are enough for any number of probes and scrapes, each of which takes milliseconds."""

_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""What a machine without IPv6 says to an address of that family."""


Lookup = SlowCall[list[Any]]
"""Resolves HOST and PORT: one call at a time, however long the resolver hangs and however often it is asked."""


def lookup() -> Lookup:
    """One that has not been asked yet."""
    return SlowCall(partial(begin, name="http-address"))  # a daemon thread: a pool's would be waited for at the end


async def listen(host: str, port: int, lookup: Lookup) -> list[socket.socket]:
    """A listening socket for each address of `host`, or of the machine where it is empty.

    An address of a family that the machine does not have is left out where another can be had.

    Raises:
        OSError: one cannot be bound, or there is none.
        TimeoutError: `lookup` takes longer than `RESOLVE_WITHIN`. The next time, the same call is waited for.
    """
    resolve = partial(socket.getaddrinfo, host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        found = await lookup.joined(resolve, RESOLVE_WITHIN)
    except NoAnswerError:
        raise TimeoutError(f"{host} was not resolved within {RESOLVE_WITHIN:g} s") from None
    except UnicodeError as error:  # a name that cannot be one in the domain name system
        raise OSError(f"{host} cannot be resolved: {error}") from None
    bound: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as stack:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                made = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 has a socket of its own
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
    """How many descriptors the process may have; a limit below `WANTED_DESCRIPTORS` is raised as far as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit(soft, hard)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def limit(soft: int, hard: int) -> int:
    """The soft limit to have instead of `soft` under a hard limit of `hard` descriptors. Never less than it is."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS))


def connections(soft: int) -> int:
    """How many connections there may be where the process may have `soft` descriptors; two at least."""
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(max(soft // SHARE, 2), MAX_CONNECTIONS)
