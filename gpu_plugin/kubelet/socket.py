"""The names of our sockets in the kubelet's device plugin directory, and the removal of those a dead process left."""

import errno
import logging
import os
import socket
import stat
from contextlib import closing
from pathlib import Path

from gpu_plugin.config.socket_path import room
from gpu_plugin.kubelet.birth import birth

log = logging.getLogger(__name__)

PREFIX = "gpu-plugin-"

INSTANCE = os.urandom(4).hex()
"""Tells this process's sockets from every other's, so that an old instance's end is never taken for ours."""


def socket_path(directory: Path, resource: str, incarnation: int, instance: str = INSTANCE) -> Path:
    """Where the server of a resource listens; a name of its own each time it begins anew.

    The resource's name is shortened where the whole would not fit into a socket address. Raises ValueError where not
    even the shortest would.
    """
    tail = f"-{instance}-{incarnation}.sock"
    left = room(f"{directory}/{PREFIX}{tail}")
    if left < 0:
        raise ValueError(f"{directory} is too long a path for a unix socket")
    name = resource.rpartition("/")[2][:left]
    return directory / f"{PREFIX}{name}{tail}"


def remove_stale(directory: Path) -> list[str]:
    """Removes sockets of ours that nobody listens on, and returns their names. Others' sockets and living ones stay."""
    removed = []
    try:
        entries = [
            entry for entry in os.scandir(directory) if entry.name.startswith(PREFIX) and entry.name.endswith(".sock")
        ]
    except OSError:
        return []
    for entry in entries:
        try:
            if _dead(entry.path):
                Path(entry.path).unlink(missing_ok=True)
                removed.append(entry.name)
        except OSError as error:
            log.warning("cannot remove the stale socket %s: %s", entry.path, error)
    return removed


def _dead(path: str) -> bool:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


Identity = tuple[int, int, int]


def identity(path: Path) -> Identity | None:
    """Which socket lies at `path`: device, inode, and when it was made, since an inode number may come again. None: no socket.

    It stays the same when the socket's mode or times change, when it gets another link, or is renamed and renamed back.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - as cheap as can be, it is asked often
    except OSError:
        return None
    return (status.st_dev, status.st_ino, birth(path, status)) if stat.S_ISSOCK(status.st_mode) else None
