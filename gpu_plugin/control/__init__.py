"""How a command talks to the running daemon: a Unix socket in the state directory, one JSON line each way.

A request is `{"verb": "fault", ...fields}`; the reply `{"ok": true, ...fields}` or `{"ok": false, "error": "a sentence"}`.
Only the daemon's own user (and root) can connect. `request` is all that a command needs and imports little; `server.serve` is
the daemon's side.
"""

from gpu_plugin.control.client import answers, request
from gpu_plugin.control.protocol import (
    SOCKET,
    BadRequestError,
    ControlError,
    NoDaemonError,
    RefusedError,
    SilentDaemonError,
    UnknownVerbError,
)
from gpu_plugin.control.server import Peer, Verb, asking, serve, serve_refusals

__all__ = [
    "SOCKET",
    "BadRequestError",
    "ControlError",
    "NoDaemonError",
    "Peer",
    "RefusedError",
    "SilentDaemonError",
    "UnknownVerbError",
    "Verb",
    "answers",
    "asking",
    "request",
    "serve",
    "serve_refusals",
]
