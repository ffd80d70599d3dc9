"""From the HOST and PORT of --http-address to sockets that listen."""

import errno
import logging
import socket
from contextlib import ExitStack
from functools import partial

from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

RESOLVE_WITHIN = 10.0
"""Seconds that the name of a host may take to be resolved."""

BACKLOG = 128
"""Connections that the kernel keeps ready to be accepted."""

_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""What a machine without IPv6 says to an address of that family."""


async def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, or of the machine where it is empty.

    An address of a family that the machine does not have is left out where another can be had.

    Raises:
        OSError: one cannot be bound, or there is none.
        TimeoutError: the name of the host was not resolved in time.
    """
    threads = DaemonThreads("http-address")  # a resolver may hang, and no pool's thread must at the end
    try:
        lookup = partial(socket.getaddrinfo, host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found = await threads.run(lookup, RESOLVE_WITHIN)
    finally:
        threads.close()
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
