"""The side of the daemon: the socket, and verbs that answer requests."""

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

Verb = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]
"""Takes a request's fields, gives the reply's.

A ConfigError's text is the answer where what is asked cannot be, a RefusedError's where it can, and could not be done; anything
else is a fault of ours.
"""

_SECONDS_TO_ASK = 5.0
"""How long a client may take to send its line or fetch its reply: it is a local program, and has it ready."""

_BACKLOG = 1024
"""Connections that may wait to be accepted, as far as the kernel lets them (net.core.somaxconn)."""

_log = logging.getLogger(__name__)


class Peer(NamedTuple):  # a dataclass takes 1 ms of the start
    """Who asks, as `peer_of` tells it."""

    pid: int = 0
    uid: int = -1
    program: str = ""

    def __str__(self) -> str:
        program = f" ({self.program})" if self.program else ""
        return f"uid {self.uid}, process {self.pid}{program}" if self.uid >= 0 else "unknown"


asking: ContextVar[Peer] = ContextVar("asking", default=Peer())  # noqa: B039 - a tuple
"""Who asks for the verb that runs now."""


@contextlib.asynccontextmanager
async def serve(
    state_dir: Path, verbs: Mapping[str, Verb], other: Verb | None = None
) -> AsyncIterator[Callable[[], bool]]:
    """Answers requests for as long as the context lasts; on leaving it, connections end and the socket goes.

    Gives whether commands find the socket still: it may have been removed, or the directory renamed.

    `state_dir` is made if need be. A socket left by a killed daemon is replaced. Leaving takes no longer than a turn of
    the event loop: what is under way is cancelled, not waited for. `other` answers every verb that is not in `verbs`.

    Raises:
        ConfigError: another daemon uses this state directory, or it cannot be used.
    """
    conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(
            _converse(reader, writer, lambda line: _answer(line, verbs, other))
        )
        conversations[task] = writer
        task.add_done_callback(conversations.pop)

    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(opened(state_dir, make=True))
            listener = _bind(state_dir, directory)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"--state-dir: {state_dir} is not a directory, so nothing can be kept there") from None
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
            server.close()  # not wait_closed(): since Python 3.12 it waits for clients to hang up
            for task, writer in conversations.items():
                task.cancel()
                writer.transport.abort()  # one that has not begun yet would not


@contextlib.asynccontextmanager
async def serve_refusals(
    state_dir: Path, why: Callable[[], str], verbs: Mapping[str, Verb] | None = None
) -> AsyncIterator[None]:
    """Serves as `serve` does, and refuses every other verb with the sentence that `why` gives: the daemon is not ready.

    Where another daemon answers at `state_dir`, or it cannot be used, nothing is answered.
    """

    async def refuse(_: Mapping[str, object]) -> Mapping[str, object]:
        raise RefusedError(why())

    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve(state_dir, verbs or {}, refuse))
        except ConfigError as error:
            _log.info(f"commands are not answered yet: {error}")
        yield


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[bytes], Awaitable[bytes]]
) -> None:
    """One request and its reply."""
    try:
        asking.set(_peer(writer))
        async with asyncio.timeout(_SECONDS_TO_ASK):
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                line = b""
        # A transport that was closed before all was sent cannot be aborted after that: asyncio has let go of its loop by then.
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(await answer(line))
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
    """The reply's line to a request's."""
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
    except Exception:  # noqa: BLE001 - whatever a verb does, the daemon lives on
        if limit.expired():
            return _refusal(f"{name} took longer than {control.SECONDS_TO_ANSWER:g} s and was given up")
        _log.exception(f"control socket: {name} failed")
        return _refusal("internal error: the daemon's log has the details")
    return reply if len(reply) <= LONGEST_REPLY else _refusal(f"{name}: the reply is too long for one line")


def _refusal(sentence: str, **more: object) -> bytes:
    return line_of({"ok": False, "error": sentence, **more})


def _bind(state_dir: Path, directory: int) -> socket.socket:
    """A listening socket, mode 0600 before anyone can connect."""
    address, path = address_of(state_dir, directory), state_dir / SOCKET
    try:
        # Two daemons starting at once must not take turns at removing each other's socket.
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path}: another daemon is starting with this state directory") from None
    except (
        OSError
    ) as error:  # a file system without locks is no reason to leave commands unanswered: NodeLock warns of it
        _log.debug(f"{state_dir} cannot be locked: {error.strerror or error}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(address, path, directory)
        # The file gets the mode of the socket (unix(7)). To change the file's by its name would change whatever has it by then.
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
        raise ConfigError(f"{path}: is in the way of the control socket: remove it")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(SOCKET, dir_fd=directory)
            return
        except BlockingIOError:
            _log.debug(f"{path}: its daemon is too busy to accept, so it is there")
    raise ConfigError(f"{path}: another daemon already uses this state directory: stop it, or name another directory")


def _identity(path: str | Path, directory: int | None = None) -> tuple[int, int, int] | None:
    """What tells our socket from one put in its place, even under the same inode number; None where there is none."""
    try:
        there = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return there.st_dev, there.st_ino, there.st_mtime_ns


def _unlink_if_ours(directory: int, ours: tuple[int, int, int] | None) -> None:
    if ours and _identity(SOCKET, directory) == ours:
        os.unlink(SOCKET, dir_fd=directory)
