"""How a command talks to the running daemon: a Unix socket in the state directory, one JSON line each way.

A request is `{"verb": "fault", ...fields}`; the reply `{"ok": true, ...fields}` or `{"ok": false, "error": "a sentence"}`.
Only the daemon's own user (and root) can connect. `request` is all that a command needs and imports little; `serve` is
the daemon's side.
"""

import contextlib
import json
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_plugin.config.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

SOCKET = "control.sock"

Verb = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]
"""Takes a request's fields, gives the reply's.

A ConfigError's text is the answer where what is asked cannot be, a RefusedError's where it can, and could not be done; anything
else is a fault of ours.
"""

_LONGEST_LINE = 64 * 1024
"""Bytes of a request."""

_LONGEST_REPLY = 1024 * 1024
"""Bytes of a reply: why each of 16 GPUs with all their MIG devices is in its state takes some 100 KiB."""

_SECONDS_TO_ASK = 5.0
"""How long a client may take to send its line or fetch its reply: it is a local program, and has it ready."""

_SECONDS_TO_ANSWER = 10.0
"""How long a verb may take."""

PATIENCE = _SECONDS_TO_ANSWER + 1
"""Seconds after which `request` gives up."""

_PEERCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""

_BACKLOG = 1024
"""Connections that may wait to be accepted, as far as the kernel lets them (net.core.somaxconn)."""

_SECONDS_TO_CONNECT_AGAIN = 0.01
"""Between two tries to connect to a daemon that as many wait for as may: the kernel tells nobody when there is room."""

_LONGEST_ADDRESS = 107
"""sun_path has 108 bytes, the last a zero (unix(7))."""

_log = logging.getLogger(__name__)


class Peer(NamedTuple):  # a dataclass takes 1 ms of the start
    """Who asks, as the kernel knows it (SO_PEERCRED, unix(7)): a process of another container has the id 0."""

    pid: int = 0
    uid: int = -1
    program: str = ""

    def __str__(self) -> str:
        program = f" ({self.program})" if self.program else ""
        return f"uid {self.uid}, process {self.pid}{program}" if self.uid >= 0 else "unknown"


_NOBODY = Peer()

asking: ContextVar[Peer] = ContextVar("asking", default=_NOBODY)
"""Who asks for the verb that runs now."""


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


_REFUSALS: Mapping[str, type[ControlError]] = {"unknown_verb": UnknownVerbError, "bad_request": BadRequestError}
"""What a refusal is called in a reply, and what it is then."""


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
    line = _line({**fields, "verb": verb})
    if len(line) > _LONGEST_LINE:
        raise ControlError(f"{verb}: {len(line)} bytes are too long for a request: up to {_LONGEST_LINE} go")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            deadline = time.monotonic() + PATIENCE
            with _directory(state_dir) as directory:
                _connect(connection, _address(state_dir, directory), deadline)
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
        raise NoDaemonError(f"{state_dir} is no directory: is --state-dir right?") from None
    except OSError as error:
        raise NoDaemonError(f"{path}: {error.strerror or error}") from None
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise NoDaemonError(f"what answers at {path} is no gpu-plugin daemon")
    if not answer.pop("ok"):
        refused = next((kind for mark, kind in _REFUSALS.items() if answer.get(mark)), ControlError)
        raise refused(str(answer.get("error") or "refused without a reason"))
    return answer


def answers(state_dir: Path) -> bool:
    """Whether a daemon uses this state directory: something takes connections on its control socket. Blocks, but not for long."""
    try:
        with socket.socket(socket.AF_UNIX) as probe, _directory(state_dir) as directory:
            probe.setblocking(False)
            probe.connect(_address(state_dir, directory))
    except BlockingIOError:  # too busy to accept, and therefore there
        return True
    except OSError:
        return False
    return True


class Door:
    """The control socket of this process, where commands look for it."""

    def __init__(self, state_dir: Path, ours: "_Identity | None") -> None:
        self._path = state_dir / SOCKET
        self._ours = ours

    @property
    def stands(self) -> bool:
        """Whether commands find it still: it may have been removed, or the directory renamed."""
        try:
            return _identity_of(os.stat(self._path, follow_symlinks=False)) == self._ours  # noqa: PTH116 - as cheap as can be
        except OSError:
            return False


@contextlib.asynccontextmanager
async def serve(state_dir: Path, verbs: Mapping[str, Verb]) -> AsyncIterator[Door]:
    """Answers requests for as long as the context lasts; on leaving it, connections end and the socket goes.

    `state_dir` is made if need be. A socket left by a killed daemon is replaced. Leaving takes no longer than a turn of
    the event loop: what is under way is cancelled, not waited for.

    Raises:
        ConfigError: another daemon uses this state directory, or it cannot be used.
    """
    import asyncio  # noqa: PLC0415 - a command that only asks does without

    conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(_converse(reader, writer, verbs))
        conversations[task] = writer
        task.add_done_callback(conversations.pop)

    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(_directory(state_dir, make=True))
            listener = _bind(state_dir, directory)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"--state-dir: {state_dir} is not a directory, so nothing can be kept there") from None
        except OSError as error:
            raise ConfigError(f"{state_dir / SOCKET}: {error.strerror or error}") from None
        ours = _identity(directory)
        stack.callback(_unlink_if_ours, directory, ours)
        stack.callback(listener.close)
        server = await asyncio.start_unix_server(
            connected, sock=listener, limit=_LONGEST_LINE, backlog=_BACKLOG, start_serving=False
        )
        try:
            await server.start_serving()
            yield Door(state_dir, ours)
        finally:
            server.close()  # not wait_closed(): since Python 3.12 it waits for clients to hang up
            for task, writer in conversations.items():
                task.cancel()
                writer.transport.abort()  # one that has not begun yet would not


class _Refusals(Mapping[str, Verb]):
    """Every verb there can be: a few, and all others, each of which is refused with the same sentence."""

    def __init__(self, why: Callable[[], str], verbs: Mapping[str, Verb]) -> None:
        self._why = why
        self._verbs = verbs

    def __getitem__(self, verb: str) -> Verb:
        return self._verbs.get(verb, self._refuse)

    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    def __len__(self) -> int:
        return len(self._verbs)

    async def _refuse(self, _: Mapping[str, object]) -> Mapping[str, object]:
        raise RefusedError(self._why())


@contextlib.asynccontextmanager
async def serve_refusals(
    state_dir: Path, why: Callable[[], str], verbs: Mapping[str, Verb] | None = None
) -> AsyncIterator[None]:
    """As `serve`, and every other verb is refused with the sentence that `why` gives: there is a daemon, and no more to ask it.

    Where another daemon answers at `state_dir`, or it cannot be used, nothing is answered.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve(state_dir, _Refusals(why, verbs or {})))
        except ConfigError as error:
            _log.info(f"commands are not answered yet: {error}")
        yield


async def _converse(reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter", verbs: Mapping[str, Verb]) -> None:
    """One request and its reply."""
    import asyncio  # noqa: PLC0415 - as in serve

    try:
        asking.set(_peer(writer))
        async with asyncio.timeout(_SECONDS_TO_ASK):
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                line = b""
        # A transport that was closed before all was sent cannot be aborted after that: asyncio has let go of its loop by then.
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(await _answer(line, verbs))
        async with asyncio.timeout(_SECONDS_TO_ASK):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (OSError, EOFError) as error:
        _log.debug(f"control socket: a client left or was too slow: {error!r}")
    finally:
        writer.transport.abort()


def _peer(writer: "asyncio.StreamWriter") -> Peer:
    try:
        told = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        pid, uid, _ = _PEERCRED.unpack(told)
    except OSError:
        return Peer()
    try:
        program = Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").strip()
    except OSError:
        program = ""
    return Peer(pid, uid, program)


async def _answer(line: bytes, verbs: Mapping[str, Verb]) -> bytes:
    """The reply's line to a request's."""
    import asyncio  # noqa: PLC0415 - as in serve

    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(name := fields.pop("verb", None), str):
        return _refusal(f'a request is one line of JSON, {{"verb": "...", ...}}, of up to {_LONGEST_LINE} bytes')
    if name not in verbs:
        known = ", ".join(sorted(verbs)) or "none"
        return _refusal(f"this daemon has no verb {name}; it has: {known}", unknown_verb=True)
    try:
        async with asyncio.timeout(_SECONDS_TO_ANSWER) as limit:
            fields = await verbs[name](fields)
        reply = _line({**fields, "ok": True})
    except ConfigError as error:
        return _refusal(str(error), bad_request=True)
    except RefusedError as error:
        return _refusal(str(error))
    except Exception:  # noqa: BLE001 - whatever a verb does, the daemon lives on
        if limit.expired():
            return _refusal(f"{name} took longer than {_SECONDS_TO_ANSWER:g} s and was given up")
        _log.exception(f"control socket: {name} failed")
        return _refusal("internal error: the daemon's log has the details")
    return reply if len(reply) <= _LONGEST_REPLY else _refusal(f"{name}: the reply is too long for one line")


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _refusal(sentence: str, **more: object) -> bytes:
    return _line({"ok": False, "error": sentence, **more})


def _bind(state_dir: Path, directory: int) -> socket.socket:
    """A listening socket, mode 0600 before anyone can connect."""
    import fcntl  # noqa: PLC0415 - a command that only asks does without

    address, path = _address(state_dir, directory), state_dir / SOCKET
    try:
        # Two daemons starting at once must not take turns at removing each other's socket.
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path}: another daemon is starting with this state directory") from None
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


_Identity = tuple[int, int, int]
"""Device, inode, and when it was made, in ns."""


def _identity(directory: int) -> _Identity | None:
    """What tells our socket from one put in its place, even under the same inode number."""
    try:
        there = os.stat(SOCKET, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _identity_of(there)


def _identity_of(there: os.stat_result) -> _Identity:
    return there.st_dev, there.st_ino, there.st_mtime_ns


def _unlink_if_ours(directory: int, ours: _Identity | None) -> None:
    if ours and _identity(directory) == ours:
        os.unlink(SOCKET, dir_fd=directory)


@contextlib.contextmanager
def _directory(state_dir: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory: what it names stays the same when the path comes to mean another."""
    if make:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _address(state_dir: Path, directory: int) -> str:
    """The socket's path or, where that is too long for sun_path, a short one that leads to the same place."""
    path = str(state_dir / SOCKET)
    return path if len(os.fsencode(path)) <= _LONGEST_ADDRESS else f"/proc/self/fd/{directory}/{SOCKET}"


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
        chunk = connection.recv(_LONGEST_LINE)
        received += chunk
        if not chunk or len(received) > _LONGEST_REPLY:
            break
    return bytes(received)
