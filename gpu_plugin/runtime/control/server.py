"""The daemon's side of the control socket: it receives requests and answers them with verbs."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import LONGEST_LINE, LONGEST_REPLY, SOCKET, RefusedError, address_of, line_of, opened
from gpu_plugin.runtime.peer import peer_of

# A function from the request's fields to the reply's fields. It raises ConfigError if the request is invalid, and RefusedError
# if a valid request could not be carried out. The reply then has the error's text. Any other exception is a bug of this plugin.
Verb = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]

# Time limit for a client to send its line, and to read the reply. The client is a local program with its line ready.
_SECONDS_TO_ASK = 5.0

_BACKLOG = 1024  # Number of connections that may wait to be accepted. The kernel may lower it (net.core.somaxconn).

_log = logging.getLogger(__name__)


class Peer(NamedTuple):  # a dataclass takes 1 ms of the start
    """The process at the other end of a connection, from `peer_of`."""

    pid: int = 0
    uid: int = -1
    program: str = ""

    def __str__(self) -> str:
        program = f" ({self.program})" if self.program else ""
        return f"uid {self.uid}, process {self.pid}{program}" if self.uid >= 0 else "unknown"


# The process that sent the request of the verb that runs now.
asking: ContextVar[Peer] = ContextVar("asking", default=Peer())  # noqa: B039 - a tuple


@contextlib.asynccontextmanager
async def serve(
    state_dir: Path, verbs: Mapping[str, Verb], other: Verb | None = None
) -> AsyncIterator[Callable[[], bool]]:
    """Answer requests until the context ends. Then close all connections and remove the socket.

    Yields a function that returns True while the socket is still at its path: it may be removed, or the directory renamed.

    Creates `state_dir` if it is missing, and replaces the socket of a killed daemon. The exit from the context takes at most one
    turn of the event loop, since it cancels running verbs and does not wait for them. `other` answers all other verbs.

    Raises:
        ConfigError: another daemon uses this state directory, or the directory cannot be used.
    """
    conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(_serve_client(reader, writer, verbs, other))
        conversations[task] = writer
        task.add_done_callback(conversations.pop)

    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(opened(state_dir, make=True))
            listener = _bind(state_dir, directory)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"--state-dir: {state_dir} is not a directory, so no file can be stored there") from None
        except OSError as error:
            raise ConfigError(f"{state_dir / SOCKET}: {error.strerror or error}") from None
        ours = _identity(SOCKET, directory)
        stack.callback(_unlink_if_ours, directory, ours)
        stack.callback(listener.close)
        server = await asyncio.start_unix_server(
            connected, sock=listener, limit=LONGEST_LINE, backlog=_BACKLOG, start_serving=False
        )
        try:
            await server.start_serving()
            yield lambda: ours is not None and _identity(state_dir / SOCKET) == ours
        finally:
            server.close()  # not wait_closed(): since Python 3.12 it waits until the clients close their connections
            for task, writer in conversations.items():
                task.cancel()
                writer.transport.abort()  # a new task would not abort it


@contextlib.asynccontextmanager
async def serve_refusals(
    state_dir: Path, why: Callable[[], str], verbs: Mapping[str, Verb] | None = None
) -> AsyncIterator[None]:
    """Serve as `serve` does, and refuse every other verb with the sentence of `why`, since the daemon is not ready.

    If another daemon uses `state_dir`, or the directory cannot be used, no request is answered.
    """

    async def refuse(_: Mapping[str, object]) -> Mapping[str, object]:
        raise RefusedError(why())

    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve(state_dir, verbs or {}, refuse))
        except ConfigError as error:
            _log.info(f"the control socket is not available yet: {error}")
        yield


async def _serve_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, verbs: Mapping[str, Verb], other: Verb | None
) -> None:
    """Read one request and send its reply."""
    try:
        asking.set(_peer(writer))
        async with asyncio.timeout(_SECONDS_TO_ASK):
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                line = b""
        # With a high-water mark of 0, `drain` waits until all bytes are sent. A transport that is closed before that cannot be
        # aborted later, since asyncio has already removed its reference to the loop.
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(await _answer(line, verbs, other))
        async with asyncio.timeout(_SECONDS_TO_ASK):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (OSError, EOFError) as error:
        _log.debug(f"control socket: a client left or was too slow: {error!r}")
    finally:
        writer.transport.abort()


def _peer(writer: asyncio.StreamWriter) -> Peer:
    try:
        pid, uid = peer_of(writer.get_extra_info("socket"))
    except OSError:
        return Peer()
    try:
        program = Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").strip()
    except OSError:
        program = ""
    return Peer(pid, uid, program)


async def _answer(line: bytes, verbs: Mapping[str, Verb], other: Verb | None) -> bytes:
    """Return the line of the reply to a request's line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(name := fields.pop("verb", None), str):
        return _refusal(f'a request is one line of JSON, {{"verb": "...", ...}}, of up to {LONGEST_LINE} bytes')
    verb = verbs.get(name, other)
    if verb is None:
        known = ", ".join(sorted(verbs)) or "none"
        return _refusal(f"this daemon has no verb {name}; it has: {known}", unknown_verb=True)
    try:
        async with asyncio.timeout(control.SECONDS_TO_ANSWER) as limit:
            fields = await verb(fields)
        reply = line_of({**fields, "ok": True})
    except ConfigError as error:
        return _refusal(str(error), bad_request=True)
    except RefusedError as error:
        return _refusal(str(error))
    except Exception:  # noqa: BLE001 - a bug in a verb must not end the daemon
        if limit.expired():
            return _refusal(f"{name} took longer than {control.SECONDS_TO_ANSWER:g} s and was cancelled")
        _log.exception(f"control socket: {name} failed")
        return _refusal("internal error: the daemon's log has the details")
    return reply if len(reply) <= LONGEST_REPLY else _refusal(f"{name}: the reply is too long for one line")


def _refusal(sentence: str, **more: object) -> bytes:
    return line_of({"ok": False, "error": sentence, **more})


def _bind(state_dir: Path, directory: int) -> socket.socket:
    """Return a listening socket. Its mode is 0600 before a client can connect."""
    address, path = address_of(state_dir, directory), state_dir / SOCKET
    try:
        # Two daemons that start at the same time must not remove each other's socket.
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path}: another daemon is starting with this state directory") from None
    except OSError as error:  # commands are answered also on a file system without locks; NodeLock logs a warning
        _log.debug(f"{state_dir} cannot be locked: {error.strerror or error}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(address, path, directory)
        # The file gets the mode of the socket (unix(7)). A chmod by name could change another file that replaced the socket.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        with contextlib.suppress(OSError):  # as above
            fcntl.flock(directory, fcntl.LOCK_UN)
    return listener


def _remove_stale(address: str, path: Path, directory: int) -> None:
    try:
        there = os.stat(SOCKET, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(there.st_mode):
        raise ConfigError(f"{path}: a file that is not a socket has the name of the control socket: remove the file")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(SOCKET, dir_fd=directory)
            return
        except BlockingIOError:
            _log.debug(f"{path}: the backlog is full, so a daemon is running")
    raise ConfigError(f"{path}: another daemon already uses this state directory: stop it, or name another directory")


def _identity(path: str | Path, directory: int | None = None) -> tuple[int, int, int] | None:
    """Return values that distinguish this socket from a replacement, even with the same inode number; None without a file."""
    try:
        there = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return there.st_dev, there.st_ino, there.st_mtime_ns


def _unlink_if_ours(directory: int, ours: tuple[int, int, int] | None) -> None:
    if ours and _identity(SOCKET, directory) == ours:
        os.unlink(SOCKET, dir_fd=directory)
