"""How a command talks to the running daemon: a Unix socket in the state directory, one JSON line each way.

A request is `{"verb": "fault", ...fields}`; the reply `{"ok": true, ...fields}` or `{"ok": false, "error": "a sentence"}`.
Only the daemon's own user (and root) can connect. What a command needs is here, without an event loop, and imports little; what
the daemon does is in `server`.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_plugin.config.socket_path import room
from gpu_plugin.runtime.peer import listening
from gpu_plugin.runtime.regular_file import open_file

SOCKET = "control.sock"

LOCK = "daemon.lock"
"""The file of the state directory in which the daemon that has the directory describes itself (`state.node_lock`)."""

SECONDS_TO_HAND_OVER = 5.0
"""For which `request` waits for the new daemon's socket while one daemon hands the node over to another."""

LONGEST_LINE = 64 * 1024
"""Bytes of a request."""

LONGEST_REPLY = 1024 * 1024
"""Bytes of a reply: why each of 16 GPUs with all their MIG devices is in its state takes some 100 KiB."""

SECONDS_TO_ANSWER = 10.0
"""How long a verb may take."""

PATIENCE = SECONDS_TO_ANSWER + 1
"""Seconds after which `request` gives up."""

_SECONDS_TO_CONNECT_AGAIN = 0.01
"""Between two tries to connect to a daemon that as many wait for as may: the kernel tells nobody when there is room."""


class ControlError(Exception):
    """No daemon answers, or it refuses; `str()` is a sentence to show."""


class NoDaemonError(ControlError):
    """No daemon answers, or none that can be talked to."""


class SilentDaemonError(NoDaemonError):
    """A daemon is there, and does not answer in time."""


class UnknownVerbError(ControlError):
    """The daemon is there and has no such verb."""


class BadRequestError(ControlError):
    """What is asked cannot be: a GPU that the node does not have, say."""


class RefusedError(Exception):
    """What a verb is asked makes sense, and could not be done, or not as it should be; `str()` is a sentence to show."""


REFUSALS: Mapping[str, type[ControlError]] = {"unknown_verb": UnknownVerbError, "bad_request": BadRequestError}
"""What a refusal is called in a reply, and what it is then."""


def line_of(message: Mapping[str, object]) -> bytes:
    """A request or a reply as it goes over the socket."""
    return json.dumps(message).encode() + b"\n"


@contextlib.contextmanager
def opened(state_dir: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory: what it names stays the same when the path comes to mean another."""
    if make:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def address_of(state_dir: Path, directory: int) -> str:
    """The socket's path or, where that is too long for sun_path, a short one that leads to the same place."""
    path = str(state_dir / SOCKET)
    return path if room(path) >= 0 else f"/proc/self/fd/{directory}/{SOCKET}"


def request(state_dir: Path, verb: str, **fields: object) -> dict[str, Any]:
    """Asks the daemon that uses `state_dir` and gives its reply's fields.

    Raises:
        UnknownVerbError: the daemon has no such verb.
        SilentDaemonError: one is there, and does not answer in time.
        NoDaemonError: no daemon answers there, also after a wait while one daemon hands over to another.
        BadRequestError: what is asked cannot be.
        ControlError: it refuses.
    """
    path = state_dir / SOCKET
    line = line_of({**fields, "verb": verb})
    if len(line) > LONGEST_LINE:
        raise ControlError(f"{verb}: {len(line)} bytes are too long for a request: up to {LONGEST_LINE} go")
    deadline = time.monotonic() + PATIENCE
    try:
        with opened(state_dir) as directory, _connected(state_dir, directory, deadline) as connection:
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
        with opened(state_dir) as directory:
            return listening(address_of(state_dir, directory))
    except OSError:
        return False


@contextlib.contextmanager
def _connected(state_dir: Path, directory: int, deadline: float) -> Iterator[socket.socket]:
    """A connection to the daemon. While one daemon hands over to another, neither listens: the new daemon is waited for.

    Raises OSError, and TimeoutError at the deadline.
    """
    until = time.monotonic() + SECONDS_TO_HAND_OVER
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                _connect(connection, address_of(state_dir, directory), deadline)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() >= until or not _hands_over(state_dir):
                    raise
            else:
                yield connection
                return
        time.sleep(_SECONDS_TO_CONNECT_AGAIN)


def _hands_over(state_dir: Path) -> bool:
    """Whether the daemon that had the state directory last has written down that it hands over."""
    try:
        with open_file(state_dir / LOCK, links=False) as stream:
            owner = json.loads(stream.read(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(owner, dict) and owner.get("leaving") is True


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
