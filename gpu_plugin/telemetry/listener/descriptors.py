"""How many file descriptors the process may have, and which share of them connections for probes and metrics may take."""

import resource

WANTED_DESCRIPTORS = 4096
"""Descriptors that the process asks for at most. More would be no use to it, and slow programs that close every possible one."""

SHARE = 8
"""One descriptor in so many may be a connection for probes and metrics: the kubelet's connections need them, too."""

MAX_CONNECTIONS = 32
"""Connections that are enough for any number of probes and scrapes, each of which takes milliseconds."""


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


def streams(connections: int) -> int:
    """How many of so many connections may be readers of the status page that are kept up to date; one at least."""
    return max(1, connections // 4)
