"""Serve a resource to the kubelet: listen, register, watch, and start again when any of these fails.

The kubelet never repairs a broken connection to a plugin. After any failure the plugin must close the old socket and its
connections, and register again. So there is one way to recover: end this incarnation, and start the next incarnation. Each
listens on a socket with a new name, because kubelets from 1.37 on identify endpoints by path.
"""

import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.containers.conflicts import PairWatch
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import BoundedChannel, CallError
from gpu_plugin.kubelet.counts import ACCEPTED, FAILED, KubeletCounts
from gpu_plugin.kubelet.directory import POLL_INTERVAL
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.registrations import UNHEARD, Registrations
from gpu_plugin.kubelet.server import SocketServer
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.kubelet.socket import Identity, identity, remove_stale, socket_path
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import forever

log = logging.getLogger(__name__)

# One count for all resources of the process: two resources may share the part of their name that fits into a socket's name.
_INCARNATIONS = itertools.count(1)

# Seconds after which the log has another line while there is no kubelet. These later lines are warnings.
REMINDER = 600.0

# Seconds until the next start after the second failure in a row, and the longest pause. The first failure has no pause.
FIRST_RETRY = 0.05
LONGEST_RETRY = 30.0

STABLE = 30.0  # Reset the failure count after this many seconds of service. Waiting for a stream does not count.

# Seconds for a registration. The kubelet tries for 10 s to connect to us: a longer limit lets its own error message reach us.
REGISTER_DEADLINE = 15.0

# Seconds after a registration within which the kubelet must open its stream. A kubelet opens it at once.
FIRST_STREAM = 30.0


class RegistrationLog:
    """Logs concurrent registrations in one line, once all of them have ended."""

    def __init__(self) -> None:
        self._under_way = 0
        self._sockets: dict[str, str] = {}

    def registered(self, resource: str, socket: str) -> None:
        """Add a registration with this socket name to the next line."""
        self._sockets[resource] = socket

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Count a registration as under way inside this context."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._flush()

    def _flush(self) -> None:
        sockets, self._sockets = self._sockets, {}
        level = logging.INFO
        if len(sockets) > 1:
            level = logging.DEBUG
            log.info("%d resources registered with the kubelet: %s", len(sockets), ", ".join(sockets))
        for resource, socket in sockets.items():
            log.log(level, "%s: registered with the kubelet as %s", resource, socket, extra={"resource": resource})


class Shared(msgspec.Struct, frozen=True):
    """The objects that the endpoints of all resources share.

    Attributes:
        store: the snapshots.
        kubelet_socket: `directory`/kubelet.sock, or None to serve without registering.
        directory: the kubelet's device plugin directory.
        look: rings when something in `directory` may have changed.
        registered: set after the first registration.
        registrations: the state of each resource. A resource counts as registered once the kubelet has opened its stream.
        counts: counts of the traffic with the kubelet.
        pairs: as for `DevicePluginService`.
        log: logs registrations.
    """

    store: SnapshotStore
    kubelet_socket: Path | None
    directory: Path
    look: Pulse
    registered: anyio.Event = msgspec.field(default_factory=anyio.Event)
    registrations: Registrations = msgspec.field(default_factory=Registrations)
    counts: KubeletCounts = msgspec.field(default_factory=KubeletCounts)
    pairs: PairWatch = msgspec.field(default_factory=PairWatch)
    log: RegistrationLog = msgspec.field(default_factory=RegistrationLog)


class ResourceEndpoint:
    """Keeps one resource registered for as long as `run` runs."""

    def __init__(self, resource: str, shared: Shared) -> None:
        """Raises ValueError if kubelets do not accept the name."""
        fault = resource_name_fault(resource)
        if fault:
            raise ValueError(fault)
        self.resource = resource
        self._log = logging.LoggerAdapter(log, {"resource": resource})
        self._shared = shared
        self._registrations = shared.registrations
        self._feed = ListFeed(resource, shared.store)
        self._trouble = LogOnChange(self._log, f"{resource}: %s")
        """Why the last incarnation failed; empty if it did not."""
        self._no_stream = False
        """Whether the last incarnation ended because the kubelet never opened a stream."""
        self._works_since: float | None = None
        """The time since which the present incarnation has a stream, or serves without a kubelet; None before that."""

    async def run(self) -> None:
        """Serve until cancelled, then end streams, connections and socket. Start again after every failure."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed.run)
            await self._serve_repeatedly()

    async def _serve_repeatedly(self) -> None:
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY, free=1, stable=STABLE)
        while True:
            seen = self._kubelet()
            self._works_since = None
            trouble, no_stream = "", False
            try:
                kubelet = await self._wait_for_kubelet()
                if kubelet != seen:  # the kubelet was away
                    seen = kubelet
                    backoff.succeeded()
                why = await self._serve(kubelet)
                no_stream = self._no_stream
                if no_stream:
                    trouble = f"{why}, so it knows no device of this resource; registering again"
                else:
                    self._log.info("%s: %s; registering again", self.resource, why)
            except CallError as error:
                trouble = f"registration failed: {error}"
            except OSError as error:
                trouble = f"cannot serve in {self._shared.directory}: {error}"
            except Exception:
                fields = {"resource": self.resource}
                log.exception("%s: serving failed unexpectedly; starting again", self.resource, extra=fields)
                self._registrations.away(self.resource, "serving it failed unexpectedly: the log has the details")
            self._trouble.update(trouble)
            if trouble:
                self._registrations.away(self.resource, trouble)
            self._no_stream = no_stream
            now = anyio.current_time()
            worked_for = 0.0 if self._works_since is None else now - self._works_since
            await self._wait(backoff.failed(now, worked_for=worked_for), seen, backoff)

    async def _wait(self, seconds: float, seen: Identity | None, backoff: Backoff) -> None:
        """Wait before the next try. A kubelet.sock other than `seen` ends the wait."""
        deadline = anyio.current_time() + seconds
        while self._kubelet() in (None, seen):
            left = deadline - anyio.current_time()
            if left <= 0:
                return
            await self._shared.look.wait(left)
        backoff.succeeded()

    def _kubelet(self) -> Identity | None:
        """Return the identity of the kubelet's socket, or None without a socket.

        Without registration, it is a constant while the directory exists, and None without a directory.
        """
        if self._shared.kubelet_socket is None:
            return (0, 0, 0) if self._shared.directory.is_dir() else None
        return identity(self._shared.kubelet_socket)

    async def _serve(self, kubelet: Identity) -> str:
        """Run one incarnation for this kubelet, and return why it ended.

        Raises:
            CallError: the registration failed.
            OSError: the socket cannot be made.
        """
        remove_stale(self._shared.directory)
        path = socket_path(self._shared.directory, self.resource, next(_INCARNATIONS))
        await self._feed.refresh()
        shared = self._shared
        service = DevicePluginService(self._feed, shared.store, shared.look, shared.pairs, counts=shared.counts)
        server = SocketServer(service)
        try:
            try:
                await server.bind(path)
            except FileNotFoundError:
                self._no_stream = False
                return "our socket was removed as soon as it was made"
            self._log.debug("%s: listening on %s", self.resource, path)
            self._registrations.served(self.resource, path)
            if self._shared.kubelet_socket is not None:
                with self._shared.log.registering():
                    kubelet = await self._register(self._shared.kubelet_socket, path.name, server) or kubelet
                    service.registering = False
                    if self._no_stream:
                        self._log.debug("%s: registered with the kubelet as %s", self.resource, path.name)
                    else:
                        self._shared.log.registered(self.resource, path.name)
                self._registrations.away(self.resource, UNHEARD)
                self._shared.registered.set()
            why = await self._until_over(service, server, kubelet)
            self._registrations.away(self.resource, why)
            return why
        finally:
            self._registrations.ended(self.resource, path)
            service.end_streams()
            await server.end()

    async def _register(self, kubelet_socket: Path, name: str, server: SocketServer) -> Identity | None:
        """Register, and return the identity of the kubelet's socket that took the call; None if it is not known.

        If our socket is removed during the call, it is made again: the kubelet tries to connect to it for 10 s.

        Raises:
            CallError: the registration failed.
            OSError: our socket was removed, and cannot be made again.
        """
        dialled: Identity | None = None
        failure: CallError | OSError | None = None

        async def keep_in_place() -> None:
            nonlocal failure
            while True:
                await self._shared.look.wait(POLL_INTERVAL)
                if dialled is not None and not server.listening and self._shared.directory.is_dir():
                    self._log.warning(
                        "%s: our socket was removed during the registration; making it again", self.resource
                    )
                    try:
                        await server.rebind()
                    except OSError as error:
                        failure = error
                        tasks.cancel_scope.cancel()
                        return

        request = wire.encode_register(name, self.resource)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_in_place)
            try:
                with BoundedChannel(kubelet_socket, "the kubelet") as channel:
                    await channel.connect(REGISTER_DEADLINE)
                    dialled = identity(
                        kubelet_socket
                    )  # the socket that took the connection, even if it is replaced later
                    # A kubelet that starts first removes all sockets and then listens. It would try to connect for 10 s.
                    if not server.listening:
                        raise CallError("our socket was removed while the kubelet was starting")
                    await channel.ask(wire.REGISTER, request, REGISTER_DEADLINE)
            except CallError as error:
                failure = error
            tasks.cancel_scope.cancel()
        self._shared.counts.registrations[self.resource, ACCEPTED if failure is None else FAILED] += 1
        if failure is not None:
            raise failure
        return dialled

    async def _wait_for_kubelet(self) -> Identity:
        """Wait for the kubelet's socket, and return its identity."""
        next_line, reminded = -math.inf, False
        while True:
            found = self._kubelet()
            if found is not None:
                return found
            if anyio.current_time() >= next_line:
                why = self._missing_path()
                level = logging.WARNING if reminded else logging.INFO
                self._log.log(level, "%s: %s", self.resource, why)
                self._registrations.away(self.resource, why)
                next_line, reminded = anyio.current_time() + REMINDER, True
            await self._shared.look.wait(POLL_INTERVAL)

    def _missing_path(self) -> str:
        """Return which path of the kubelet is missing, for the log."""
        if not self._shared.directory.is_dir():
            return f"waiting for the kubelet: there is no directory {self._shared.directory}: is --device-plugin-dir right?"
        return f"waiting for the kubelet: no {self._shared.kubelet_socket} yet"

    async def _until_over(self, service: DevicePluginService, server: SocketServer, kubelet: Identity) -> str:
        registered = anyio.current_time()
        if self._shared.kubelet_socket is None:
            self._works_since = registered
        while True:
            view = View(
                listening=server.listening,
                registering=self._shared.kubelet_socket is not None,
                kubelet_before=kubelet,
                kubelet_now=self._kubelet(),
                streams=service.streams,
                streams_opened=service.streams_opened,
                age=anyio.current_time() - registered,
                again=self._registrations.reregistration_reason(self.resource),
            )
            why = over(view)
            if why:
                self._no_stream = _stream_overdue(view)
                return why
            if self._works_since is None and view.streams_opened:
                self._works_since = anyio.current_time()
                self._registrations.taken(self.resource)
                if self._no_stream:
                    self._log.info("%s: the kubelet has opened its stream", self.resource)
            await self._shared.look.wait(POLL_INTERVAL)


class Endpoints:
    """Serves every resource of the store on a socket of its own. A failure of one resource does not affect the others."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._store, self._registrations = shared.store, shared.registrations
        self._running: dict[str, anyio.CancelScope] = {}

    async def run(self) -> None:
        """Start and end endpoints as the store's resources change. Once cancelled, end every endpoint."""
        async with anyio.create_task_group() as tasks:
            while True:
                names = self._store.current.resources.keys()
                withdrawn = [name for name in self._running if name not in names]
                if withdrawn:
                    log.info("%s: withdrawn", ", ".join(withdrawn))
                for name in withdrawn:
                    self._running.pop(name).cancel()
                    self._registrations.withdrawn(name)
                for name in names - self._running.keys():
                    self._running[name] = anyio.CancelScope()
                    tasks.start_soon(self._serve, name, self._running[name])
                await self._store.changed.wait()

    async def _serve(self, name: str, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                endpoint = ResourceEndpoint(name, self._shared)
            except ValueError as error:
                log.error("cannot be served: %s", error)  # noqa: TRY400 - the message is complete
                self._registrations.away(name, f"it cannot be served: {error}")
            else:
                await forever(name, endpoint.run)
        if name not in self._running:  # it was withdrawn: drop the state from its end
            self._registrations.withdrawn(name)


class View(msgspec.Struct, frozen=True):
    """The state of an incarnation: `age` is in seconds since its registration, and identities are of kubelet.sock.

    `again` is the reason of a request to register again, although the rest of the state is good; empty without a request.
    """

    listening: bool
    registering: bool
    kubelet_before: Identity
    kubelet_now: Identity | None
    streams: int
    streams_opened: int
    age: float
    again: str = ""


def over(view: View) -> str:
    """Return why an incarnation must end; empty if it continues. The result depends on the present alone, not on old events."""
    if not view.listening:
        return "our socket is gone"
    if not view.registering:
        return ""
    if view.kubelet_now not in (None, view.kubelet_before):
        return "the kubelet has a new socket"
    if view.streams_opened and not view.streams:
        return "the kubelet dropped our stream"
    if _stream_overdue(view):
        return f"the kubelet opened no stream within {FIRST_STREAM:g} s of our registration"
    return view.again


def _stream_overdue(view: View) -> bool:
    """Whether the kubelet has not opened its stream in time."""
    return view.registering and not view.streams_opened and view.age > FIRST_STREAM
