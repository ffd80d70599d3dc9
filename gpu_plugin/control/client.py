"""The side of the command: one request, one reply, without an event loop."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from gpu_plugin.control import protocol
from gpu_plugin.control.protocol import (
    LONGEST_LINE,
    LONGEST_REPLY,
    REFUSALS,
    SOCKET,
    ControlError,
    NoDaemonError,
    SilentDaemonError,
    address_of,
    line_of,
    opened,
)

_SECONDS_TO_CONNECT_AGAIN = 0.01
"""Between two tries to connect to a daemon that as many wait for as may: the kernel tells nobody when there is room."""


def request(state_dir: Path, verb: str, **fields: object) -> dict[str, Any]:
    """Asks the daemon that uses `state_dir` and gives its reply's fields.

    Raises:
        UnknownVerbError: the daemon has no such verb.
        SilentDaemonError: one is there, and does not answer in time.
        NoDaemonError: no daemon answers there.
        BadRequestError: what is asked cannot be.
        ControlError: it refuses.
    """
    path = state_dir / SOCKET
    line = line_of({**fields, "verb": verb})
    if len(line) > LONGEST_LINE:
        raise ControlError(f"{verb}: {len(line)} bytes are too long for a request: up to {LONGEST_LINE} go")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            deadline = time.monotonic() + protocol.PATIENCE
            with opened(state_dir) as directory:
                _connect(connection, address_of(state_dir, directory), deadline)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(line)
            reply = _read_line(connection, deadline)
    except (FileNotFoundError, ConnectionError):
        raise NoDaemonError(f"no daemon answers at {path}: is one running with this state directory?") from None
    except TimeoutError:
        raise SilentDaemonError(f"the daemon at {path} does not answer in time") from None
    except PermissionError:
        raise NoDaemonError(
            f"{path}: permission denied: only root and the user that the daemon runs as may talk to it"
        ) from None
    except NotADirectoryError:
        raise NoDaemonError(f"{state_dir} is not a directory: is --state-dir right?") from None
    except OSError as error:
        raise NoDaemonError(f"{path}: {error.strerror or error}") from None
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise NoDaemonError(f"what answers at {path} is not a gpu-plugin daemon")
    if not answer.pop("ok"):
        refused = next((kind for mark, kind in REFUSALS.items() if answer.get(mark)), ControlError)
        raise refused(str(answer.get("error") or "refused without a reason"))
    return answer


def answers(state_dir: Path) -> bool:
    """Whether a daemon uses this state directory: something takes connections on its control socket. Blocks, but not for long."""
    try:
        with socket.socket(socket.AF_UNIX) as probe, opened(state_dir) as directory:
            probe.setblocking(False)
            probe.connect(address_of(state_dir, directory))
    except BlockingIOError:  # too busy to accept, and therefore there
        return True
    except OSError:
        return False
    return True


def _connect(connection: socket.socket, address: str, deadline: float) -> None:
    """Connects, waiting for as long as others are in the way. Raises TimeoutError at the deadline, and OSError."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:  # a Unix socket has no other way to wait than to try again
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_SECONDS_TO_CONNECT_AGAIN)
        else:
            return


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = connection.recv(LONGEST_LINE)
        received += chunk
        if not chunk or len(received) > LONGEST_REPLY:
            break
    return bytes(received)
