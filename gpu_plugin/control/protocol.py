"""What both ends of the control socket know: its place in the state directory, the bounds of a line, and what can go wrong."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpu_plugin.config.socket_path import room

SOCKET = "control.sock"

LONGEST_LINE = 64 * 1024
"""Bytes of a request."""

LONGEST_REPLY = 1024 * 1024
"""Bytes of a reply: why each of 16 GPUs with all their MIG devices is in its state takes some 100 KiB."""

SECONDS_TO_ANSWER = 10.0
"""How long a verb may take."""

PATIENCE = SECONDS_TO_ANSWER + 1
"""Seconds after which `request` gives up."""


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
