"""Under which names the status page is shown. Pure.

A site may have its own name resolved to an address of this node, and its scripts could then read the page in the browser of
somebody who can reach it (DNS rebinding). They cannot change the Host header that the browser sends: it has the site's name.
"""

import re
import socket
from collections.abc import Collection

_HOST = re.compile(r"(?P<host>\[[^]]*\]|[^:\[\]]*)(:\d*)?")
"""uri-host and port of a Host header (RFC 9110, 7.2)."""

LOCALHOST = "localhost"
"""Browsers and resolvers never ask the domain name system for it (RFC 6761, 6.3)."""


def known_host(header: str, names: Collection[str]) -> bool:
    """Whether a Host header names this node as no other site can: by an address, as localhost, or by one of `names`.

    `names` are in small letters; `*.example.com` stands for every name that ends in `.example.com`. No header, or an empty
    one, is no browser's.
    """
    found = _HOST.fullmatch(header.strip())
    if found is None:
        return False
    host = found["host"]
    if host.startswith("["):
        return _is_address(socket.AF_INET6, host[1:-1].partition("%")[0])  # the zone is the peer's own (RFC 6874)
    name = host.lower().removesuffix(".")
    if not name or name == LOCALHOST or _is_address(socket.AF_INET, name):
        return True
    return name in names or any(each.startswith("*.") and name.endswith(each[1:]) for each in names)


def _is_address(family: int, text: str) -> bool:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # text that is no ASCII is a ValueError
        return False
    return True
