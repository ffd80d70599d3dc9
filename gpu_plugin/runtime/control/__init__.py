"""The control socket, a Unix socket in the state directory. A command sends one line of JSON, and the daemon replies with one.

A request is `{"verb": "fault", ...fields}`. The reply is `{"ok": true, ...fields}` or `{"ok": false, "error": "a sentence"}`.
Only the daemon's user and root can connect. This module has the command's side, without an event loop and with few imports.
`server` has the daemon's side.
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

# The file of the state directory with a description of the daemon that uses the directory (`state.node_lock`).
LOCK = "daemon.lock"

# Longest wait of `request` for the new daemon's socket while a daemon hands the node over to a new daemon.
SECONDS_TO_HAND_OVER = 5.0

LONGEST_LINE = 64 * 1024  # limit in bytes for a request

# Limit in bytes for a reply: the reasons for the states of 16 GPUs with all their MIG devices take about 100 KiB.
LONGEST_REPLY = 1024 * 1024

SECONDS_TO_ANSWER = 10.0  # time limit of a verb
PATIENCE = SECONDS_TO_ANSWER + 1  # seconds after which `request` gives up

# Pause between attempts to connect while the socket's backlog is full: the kernel does not report when it has room.
_SECONDS_TO_CONNECT_AGAIN = 0.01


class ControlError(Exception):
    """No daemon answered, or the daemon refused the request. The text is a sentence for the user."""


class NoDaemonError(ControlError):
    """No daemon answered at the control socket, or the socket cannot be used."""


class SilentDaemonError(NoDaemonError):
    """A daemon is running and did not answer in time."""


class UnknownVerbError(ControlError):
    """The daemon does not have the verb."""


class BadRequestError(ControlError):
    """The request is invalid, for example because the node does not have the GPU."""


class RefusedError(Exception):
    """A verb could not fully carry out a valid request. The text is a sentence for the user."""


# The error that `request` raises for a refusal, by the key of the reply that marks it.
REFUSALS: Mapping[str, type[ControlError]] = {"unknown_verb": UnknownVerbError, "bad_request": BadRequestError}


def line_of(message: Mapping[str, object]) -> bytes:
    """Return a request or a reply as a line for the socket."""
    return json.dumps(message).encode() + b"\n"


@contextlib.contextmanager
def opened(state_dir: Path, *, make: bool = False) -> Iterator[int]:
    """Open the directory and yield its descriptor, which refers to the same directory if the path later names another."""
    if make:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def address_of(state_dir: Path, directory: int) -> str:
    """Return the socket's path or, if the path is too long for sun_path, a short path to the same socket."""
    path = str(state_dir / SOCKET)
    return path if room(path) >= 0 else f"/proc/self/fd/{directory}/{SOCKET}"


def request(state_dir: Path, verb: str, patience: float = PATIENCE, /, **fields: object) -> dict[str, Any]:
    """Send a request to the daemon that uses `state_dir`, and return the fields of its reply. Blocks.

    `patience` is the most seconds to wait.

    Raises:
        UnknownVerbError: the daemon does not have the verb.
        SilentDaemonError: a daemon is running and did not answer in time.
        NoDaemonError: no daemon answered. If a daemon hands over to a new daemon, this is raised only after a wait.
        BadRequestError: the request is invalid.
        ControlError: the daemon refused the request.
    """
    path = state_dir / SOCKET
    line = line_of({**fields, "verb": verb})
    if len(line) > LONGEST_LINE:
        raise ControlError(f"{verb}: the request has {len(line)} bytes, more than the limit of {LONGEST_LINE}")
    deadline = time.monotonic() + patience
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
        raise NoDaemonError(f"{path}: permission denied: only root and the daemon's user can connect to it") from None
    except NotADirectoryError:
        raise NoDaemonError(f"{state_dir} is not a directory: is --state-dir right?") from None
    except OSError as error:
        raise NoDaemonError(f"{path}: {error.strerror or error}") from None
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise NoDaemonError(f"the program that answers at {path} is not a gpu-plugin daemon")
    if not answer.pop("ok"):
        refused = next((kind for mark, kind in REFUSALS.items() if answer.get(mark)), ControlError)
        raise refused(str(answer.get("error") or "refused without a reason"))
    return answer


def answers(state_dir: Path) -> bool:
    """Return True if a daemon uses this state directory: its control socket accepts connections. Blocks only for a moment."""
    try:
        with opened(state_dir) as directory:
            return listening(address_of(state_dir, directory))
    except OSError:
        return False


@contextlib.contextmanager
def _connected(state_dir: Path, directory: int, deadline: float) -> Iterator[socket.socket]:
    """Connect to the daemon and yield the connection.

    During a handover neither daemon listens, so wait for the new daemon. Raises OSError, and TimeoutError at the deadline.
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
    """Return True if the last daemon of the state directory wrote into LOCK that it hands over."""
    try:
        with open_file(state_dir / LOCK, links=False) as stream:
            owner = json.loads(stream.read(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(owner, dict) and owner.get("leaving") is True


def _connect(connection: socket.socket, address: str, deadline: float) -> None:
    """Connect, and wait while the backlog is full. Raises TimeoutError at the deadline, and OSError."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:  # with a Unix socket, the only way to wait is to try again
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
