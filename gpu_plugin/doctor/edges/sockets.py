"""The server of a Unix socket. The probe sends no request that changes the server's state."""

import os
import socket
import stat
from contextlib import closing

from gpu_plugin.doctor.edges.process import name_of
from gpu_plugin.doctor.facts import Socket
from gpu_plugin.runtime.peer import peer_of

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""The first bytes of an HTTP/2 client: the preface, and an empty SETTINGS frame (RFC 9113, 3.4)."""

# RFC 9113, 4.1
_SETTINGS = 4  # type of a server's first frame
_HEADER = 9  # bytes of a frame's header


def look(path: str, patience: float) -> Socket:
    """Return the socket at this path: whether it accepts connections, and its server begins as a gRPC server does. Blocks.

    Each step takes up to `patience` seconds.
    """
    try:
        there = os.stat(path)  # noqa: PTH116 - only a socket is connected to
    except (FileNotFoundError, NotADirectoryError):
        return Socket(path, there=False, is_socket=False, http2=False)
    except OSError as error:
        return Socket(path, error=error.strerror or str(error), http2=False)
    if not stat.S_ISSOCK(there.st_mode):
        return Socket(path, is_socket=False, http2=False)
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(patience)
        try:
            connection.connect(path)
        except TimeoutError:
            return Socket(path, error="it accepts no connection", http2=False)
        except OSError as error:
            return Socket(path, error=error.strerror or str(error), http2=False)
        pid, _ = peer_of(connection)
        return Socket(path, http2=_begins_as_http2(connection), pid=pid, program=name_of(pid))


def _begins_as_http2(connection: socket.socket) -> bool:
    try:
        connection.sendall(_PREFACE)
        header = b""
        while len(header) < _HEADER:
            piece = connection.recv(_HEADER - len(header))
            if not piece:
                return False
            header += piece
    except OSError:
        return False
    return header[3] == _SETTINGS
