"""Check that a kubelet accepts registrations. The check registers nothing."""

import os
import socket
import stat
from pathlib import Path

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, note, ok, seen, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.process import name_of
from gpu_plugin.runtime.peer import peer_of

# The first bytes of an HTTP/2 client: the preface, and an empty SETTINGS frame (RFC 9113, 3.4)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"

# RFC 9113, 4.1
_SETTINGS = 4  # type of a server's first frame
_HEADER = 9  # bytes of a frame's header

# Programs of distributions that contain the kubelet
_EMBEDDING = ("k3s", "rke2", "k0s", "microk8s", "kubelite", "hyperkube")


@check("kubelet-socket")
def kubelet_socket(node: Node) -> Finding:
    """Fail if no server answers on the kubelet's socket as a gRPC server does."""
    path = node.settings.registration_socket
    if not path:
        return note("--kubelet-socket is empty: the daemon registers nothing")
    return seen(
        node.known("kubelet_socket", look, path, node.patience * 0.4, node.root),
        path,
        "the kubelet, or the directory of its socket, hangs: see its log and the kernel log; restart the kubelet "
        "(systemctl restart kubelet)",
        needed=True,
    )


def look(path: str, patience: float, root: Path) -> Finding:
    """Connect to a socket, and return the finding. Each step takes up to `patience` seconds."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - only a socket is connected to
        if not stat.S_ISSOCK(mode):
            return failed(f"{path} is not a socket", "remove it and restart the kubelet")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(patience)
            connection.connect(path)
            pid, _ = peer_of(connection)
            http2 = _begins_as_http2(connection)
    except OSError as error:
        return _unanswered(path, error)
    program = name_of(root, pid)
    who = f" by process {pid} ({program})" if pid else ""
    if not http2:
        return failed(f"{path} is answered{who}, but not as a kubelet does", "which program listens there?")
    if program and program != "kubelet" and not program.startswith(_EMBEDDING):
        return warning(
            f"{path} is answered{who}, which is not called kubelet",
            "unless that is the kubelet of a distribution, find out why it listens there",
        )
    return ok(f"{path} is answered{who}")


def _unanswered(path: str, error: OSError) -> Finding:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return failed(
            f"there is no {path}",
            "is the kubelet running (systemctl status kubelet)? It makes the socket when it has started; or is "
            "--device-plugin-dir right?",
        )
    if isinstance(error, PermissionError):
        return failed(
            f"this process may not connect to {path}: {error.strerror}",
            "run as root, and see the modes of the socket and its directories (ls -l); as root, SELinux may be the reason "
            "(ausearch -m avc): give the container the type spc_t, or run it privileged",
        )
    why = "it accepts no connection" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return failed(f"no connection to {path}: {why}", "restart the kubelet: this is the socket of a kubelet that ended")


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
