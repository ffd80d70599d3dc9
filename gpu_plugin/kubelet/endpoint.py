"""One resource's life with the kubelet: listen, register, watch, and begin again when anything of that is lost.

The kubelet never repairs a broken connection to a plugin; whatever breaks, the plugin has to register again, and must
have let go of everything old before it does. So there is one way to mend: end this incarnation, begin the next. Each
listens on a socket of its own name, since kubelets from 1.37 on tell endpoints apart by path.
"""

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.containers.conflicts import PairWatch
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.counts import ACCEPTED, FAILED, KubeletCounts
from gpu_plugin.kubelet.directory import POLL_INTERVAL
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.registration import register
from gpu_plugin.kubelet.registrations import UNHEARD, Registrations
from gpu_plugin.kubelet.server import SocketServer
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.kubelet.socket import Identity, identity, remove_stale, socket_path
from gpu_plugin.runtime.backoff import ON_NODE, Backoff
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import forever

log = logging.getLogger(__name__)

_INCARNATIONS = itertools.count(1)
"""One count for all resources of the process: two may share the part of their name that fits into a socket's."""

REMINDER = 600.0
"""Seconds after which it is said again that there is no kubelet, as a warning from then on."""

FIRST_RETRY = 0.05
LONGEST_RETRY = 30.0
"""Seconds before serving is begun again after the second failure in a row, and at most; after the first it is at once."""

STABLE = 30.0
"""Seconds that it must have worked for a failure to count as the first again; to wait for a stream is no work."""

FIRST_STREAM = 30.0
"""Seconds after a registration within which the kubelet must have opened its stream (it does so at once)."""


class RegistrationLog:
    """Logs resources that are registered side by side in one line, once none of them is under way any more."""

    def __init__(self) -> None:
        self._under_way = 0
        self._sockets: dict[str, str] = {}

    def registered(self, resource: str, socket: str) -> None:
        """Note a registration as a socket of this name."""
        self._sockets[resource] = socket

    @contextmanager
    def registering(self) -> Iterator[None]:
        """A registration is under way meanwhile."""
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
    """What the endpoints of all resources have in common.

    `kubelet_socket` is `directory`/kubelet.sock, or None to serve without registering; `look` rings when something in `directory`
    may have changed. `registered` is called after each registration, and `registrations` told how each resource stands: a
    registration counts there once the kubelet has opened its stream; `counts` takes down what passes between us and the kubelet.
    `log` logs registrations.
    """

    store: SnapshotStore
    kubelet_socket: Path | None
    directory: Path
    look: Pulse
    registered: Callable[[], object] = tuple
    registrations: Registrations = msgspec.field(default_factory=Registrations)
    counts: KubeletCounts = msgspec.field(default_factory=KubeletCounts)
    pairs: PairWatch = msgspec.field(default_factory=PairWatch)
    log: RegistrationLog = msgspec.field(default_factory=RegistrationLog)


class ResourceEndpoint:
    """Keeps one resource registered for as long as `run` runs."""

    def __init__(self, resource: str, shared: Shared) -> None:
        """Raises ValueError for a name that no kubelet would take."""
        fault = resource_name_fault(resource)
        if fault:
            raise ValueError(fault)
        self.resource = resource
        self._log = logging.LoggerAdapter(log, {"resource": resource})
        self._shared = shared
        self._registrations = shared.registrations
        self._feed = ListFeed(resource, shared.store)
        self._trouble = ""
        """Why the last incarnation came to nothing; empty where it did not. The same is worth a line once."""
        self._unheard = False
        """Whether the last incarnation ended because the kubelet never opened a stream."""
        self._works_since: float | None = None
        """Since when the present incarnation does what it is for; None before that."""

    async def run(self) -> None:
        """Serves until cancelled, then ends streams, connections and socket. One failure after the other is mended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed.run)
            await self._live()

    async def _live(self) -> None:
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY, ON_NODE, free=1, stable=STABLE)
        while True:
            seen = self._kubelet()
            self._works_since = None
            trouble, unheard = "", False
            try:
                kubelet = await self._kubelet_present()
                if kubelet != seen:  # it was waited for
                    seen = kubelet
                    backoff.succeeded()
                why = await self._serve(kubelet)
                unheard = self._unheard
                if unheard:
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
            if trouble:  # a kubelet that is away is asked many times: once is worth a line
                self._log.log(
                    logging.DEBUG if trouble == self._trouble else logging.WARNING, "%s: %s", self.resource, trouble
                )
                self._registrations.away(self.resource, trouble)
            self._trouble, self._unheard = trouble, unheard
            now = anyio.current_time()
            worked_for = 0.0 if self._works_since is None else now - self._works_since
            pause = backoff.failed(now, random.random(), worked_for)  # noqa: S311 - spreads retries, keeps no secret
            await self._wait(pause, seen, backoff)

    async def _wait(self, seconds: float, seen: Identity | None, backoff: Backoff) -> None:
        """Waits before the next try; a kubelet.sock that is not the one of before ends the wait."""
        deadline = anyio.current_time() + seconds
        while self._kubelet() in (None, seen):
            left = deadline - anyio.current_time()
            if left <= 0:
                return
            await self._shared.look.wait(left)
        backoff.succeeded()

    def _kubelet(self) -> Identity | None:
        """Which kubelet socket there is now; where none is registered with, any directory will do."""
        if self._shared.kubelet_socket is None:
            return (0, 0, 0) if self._shared.directory.is_dir() else None
        return identity(self._shared.kubelet_socket)

    async def _serve(self, kubelet: Identity) -> str:
        """One incarnation for this kubelet: returns why it is over.

        Raises:
            CallError: the kubelet did not take us.
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
                self._unheard = False
                return "our socket went as soon as it was made"
            self._log.debug("%s: listening on %s", self.resource, path)
            self._registrations.served(self.resource, path)
            if self._shared.kubelet_socket is not None:
                with self._shared.log.registering():
                    kubelet = await self._register(self._shared.kubelet_socket, path.name, server) or kubelet
                    service.registering = False
                    if self._unheard:
                        self._log.debug("%s: registered with the kubelet as %s", self.resource, path.name)
                    else:
                        self._shared.log.registered(self.resource, path.name)
                self._registrations.away(self.resource, UNHEARD)
                self._shared.registered()
            why = await self._until_over(service, server, kubelet)
            self._registrations.away(self.resource, why)
            return why
        finally:
            self._registrations.ended(self.resource, path)
            service.end_streams()
            await server.end()

    async def _register(self, kubelet_socket: Path, name: str, server: SocketServer) -> Identity | None:
        """Registers, and keeps our socket in its place meanwhile: the kubelet goes on dialling it for 10 s.

        Returns which kubelet it was.

        Raises:
            CallError: the kubelet did not take us.
            OSError: our socket went, and cannot be made again.
        """
        dialled: Identity | None = None

        def listening() -> bool:
            nonlocal dialled  # the one that took the connection, should another have come since
            dialled = identity(kubelet_socket)
            return server.listening

        failure: CallError | OSError | None = None

        async def keep_in_place() -> None:
            nonlocal failure
            while True:
                await self._shared.look.wait(POLL_INTERVAL)
                if dialled is not None and not server.listening and self._shared.directory.is_dir():
                    self._log.warning("%s: our socket went while we registered; making it again", self.resource)
                    try:
                        await server.rebind()
                    except OSError as error:
                        failure = error
                        tasks.cancel_scope.cancel()
                        return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_in_place)
            try:
                await register(kubelet_socket, name, self.resource, listening)
            except CallError as error:
                failure = error
            tasks.cancel_scope.cancel()
        self._shared.counts.registrations[self.resource, ACCEPTED if failure is None else FAILED] += 1
        if failure is not None:
            raise failure
        return dialled

    async def _kubelet_present(self) -> Identity:
        """Waits for the kubelet's socket and says which one it is."""
        next_line, reminded = -math.inf, False
        while True:
            found = self._kubelet()
            if found is not None:
                return found
            if anyio.current_time() >= next_line:
                why = self._absent()
                level = logging.WARNING if reminded else logging.INFO
                self._log.log(level, "%s: %s", self.resource, why)
                self._registrations.away(self.resource, why)
                next_line, reminded = anyio.current_time() + REMINDER, True
            await self._shared.look.wait(POLL_INTERVAL)

    def _absent(self) -> str:
        """What of the kubelet is not there."""
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
                self._unheard = _unheard(view)
                return why
            if self._works_since is None and view.streams_opened:
                self._works_since = anyio.current_time()
                self._registrations.taken(self.resource)
                if self._unheard:
                    self._log.info("%s: the kubelet has opened its stream", self.resource)
            await self._shared.look.wait(POLL_INTERVAL)


class Endpoints:
    """Serves every resource of the store on a socket of its own. One resource's trouble never reaches another."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._store, self._registrations = shared.store, shared.registrations
        self._running: dict[str, anyio.CancelScope] = {}

    async def run(self) -> None:
        """Follows the store until cancelled, then ends every endpoint."""
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
                log.error("cannot be served: %s", error)  # noqa: TRY400 - the sentence is all there is to say
                self._registrations.away(name, f"it cannot be served: {error}")
            else:
                await forever(name, endpoint.run)
        if name not in self._running:  # it was withdrawn: what was noted of it while it ended is past, too
            self._registrations.withdrawn(name)


class View(msgspec.Struct, frozen=True):
    """An incarnation as it stands: `age` is in seconds since its registration, identities are of kubelet.sock.

    `again` is why it is to be registered again, though nothing that can be seen from here is wrong with it.
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
    """Why this incarnation is over; empty while all is well. Looks at the present alone, so no stale event misleads."""
    if not view.listening:
        return "our socket is gone"
    if not view.registering:
        return ""
    if view.kubelet_now not in (None, view.kubelet_before):
        return "the kubelet has a new socket"
    if view.streams_opened and not view.streams:
        return "the kubelet dropped our stream"
    if _unheard(view):
        return f"the kubelet opened no stream within {FIRST_STREAM:g} s of our registration"
    return view.again


def _unheard(view: View) -> bool:
    """Whether a kubelet has had time enough to open its stream, and has not."""
    return view.registering and not view.streams_opened and view.age > FIRST_STREAM
