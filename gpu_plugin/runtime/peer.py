"""The process at the other end of a Unix socket."""

import errno
import socket
import struct

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and uid of the peer that connected or called listen(), from the kernel (SO_PEERCRED, unix(7)).

    A process of another container has the id 0. Raises OSError.
    """
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def listening(path: str) -> bool:
    """Whether a process listens on a socket, even if its queue is full. Blocks for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            return probe.connect_ex(path) in (0, errno.EAGAIN)
        except OSError:  # the path is too long for a socket
            return False
