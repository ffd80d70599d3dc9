"""Which resource names and endpoints a kubelet takes.

Source: pkg/apis/core/v1/helper (IsExtendedResourceName, IsQualifiedName) and sun_path of unix(7).
"""

import re

from gpu_plugin.config.socket_path import LONGEST, room

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX_PREFIX = 253
_MAX_NAME = 63


def is_extended_resource_name(name: str) -> bool:
    """Whether the kubelet lets a device plugin register `name`."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix, _, rest = f"requests.{name}".partition("/")  # quota keys carry this prefix, so it counts in the length
    return (
        len(prefix) <= _MAX_PREFIX
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and len(rest) <= _MAX_NAME
        and _NAME.fullmatch(rest) is not None
    )


def endpoint_breaches(endpoint: str, path: str) -> list[str]:
    """What is wrong with a Register's `endpoint`, whose socket is to be at `path`; empty when nothing is."""
    found = []
    if not endpoint:
        found.append("Register without an endpoint")
    if "/" in endpoint:
        found.append(f"endpoint {endpoint!r} has a directory part: a file name in the plugin directory is expected")
    if (left := room(path)) < 0:
        found.append(f"socket path {path} has {LONGEST - left} bytes, unix sockets take {LONGEST}")
    return found
