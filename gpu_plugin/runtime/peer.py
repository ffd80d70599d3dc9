"""Who is at the other end of a Unix socket."""

import socket
import struct

_UCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and uid of who connected, or of who called listen(), as the kernel knows them (SO_PEERCRED, unix(7)).

    A process of another container has the id 0. Raises OSError.
    """
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
