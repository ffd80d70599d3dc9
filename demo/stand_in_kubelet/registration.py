"""The kubelet's Registration service, with injected failures.

Source: pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go (Register): its order of steps and its error texts, which
are plain Go errors and reach the plugin with status UNKNOWN. Names: pkg/apis/core/v1/helper (IsExtendedResourceName,
IsQualifiedName) and sun_path of unix(7).
"""

import asyncio
import os
import re
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from demo.stand_in_kubelet.client import AlreadyConnectedError, CallError, DialError
from demo.stand_in_kubelet.journal import EventKind, Journal
from demo.stand_in_kubelet.registry import PluginRegistry
from demo.stand_in_kubelet.server import caller_pid
from gpu_plugin.config.socket_path import LONGEST, room
from gpu_plugin.kubelet import messages, wire

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX_PREFIX = 253
_MAX_NAME = 63

FaultKind = Literal["refuse", "hang", "reset"]


class RegistrationCount(msgspec.Struct):
    """Registers of one resource over all restarts of a kubelet.

    `total` were received, `accepted` were answered without error, `in_flight` are being served, and `most_in_flight` is the
    largest number at once.
    """

    total: int = 0
    accepted: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


class Fault(msgspec.Struct, frozen=True):
    """A failure of one Register: it is refused with `message`, never answered, or its connection is cut."""

    kind: FaultKind
    message: str = ""


class RegistrationService:
    """Serves /v1beta1.Registration/Register of one kubelet, over all its restarts.

    Attributes:
        counts: by resource name.
        faults: failures of the next Registers, one each, in order.
        delay: seconds by which each Register is delayed before it is processed.
        late: seconds by which each answer is delayed after the processing.
    """

    def __init__(self, journal: Journal, directory: Path, registry: PluginRegistry) -> None:
        self.counts: dict[str, RegistrationCount] = {}
        self.faults: deque[Fault] = deque()
        self.delay = 0.0
        self.late = 0.0
        self._journal = journal
        self._directory = directory
        self._registry = registry
        self._in_flight: list[tuple[str, int | str]] = []

    def __mapping__(self) -> dict[str, Handler]:
        """Return the only method, for grpclib's server."""
        return {wire.REGISTER: Handler(self._register, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _register(self, stream: Stream[bytes, bytes]) -> None:
        data = await stream.recv_message()
        request = messages.decode(messages.RegisterRequest, data or b"")
        pid = caller_pid(stream)
        name = request.resource_name
        caller = (name, request.endpoint if pid in (0, os.getpid()) else pid)
        count = self.counts.setdefault(name, RegistrationCount())
        count.total += 1
        count.in_flight += 1
        count.most_in_flight = max(count.most_in_flight, count.in_flight)
        path = self._directory / request.endpoint.lstrip("/")  # Go's filepath.Join keeps absolute paths below it too
        self._journal.note(EventKind.REGISTER, name, endpoint=str(path), pid=pid)
        if caller in self._in_flight:
            self._journal.breach(name, f"process {pid} has two Registers in flight")
        self._in_flight.append(caller)
        try:
            await self._serve(stream, request, path)
        except (DialError, CallError, GRPCError, AlreadyConnectedError) as error:
            text = error.message or "" if isinstance(error, GRPCError) else str(error)
            if isinstance(error, CallError):
                text = f"failed to get device plugin options: {error}"
            self._journal.note(EventKind.REFUSED, name, endpoint=str(path), pid=pid, text=text)
            raise GRPCError(Status.UNKNOWN, text) from None
        finally:
            count.in_flight -= 1
            self._in_flight.remove(caller)
            self._journal.wake()
        count.accepted += 1
        self._journal.note(EventKind.REGISTERED, name, endpoint=str(path), pid=pid)
        await stream.send_message(wire.EMPTY)

    async def _serve(self, stream: Stream[bytes, bytes], request: Any, path: Path) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._apply_fault(stream)
        name = request.resource_name
        if request.version != wire.VERSION:
            self._journal.breach(name, f"Register with API version {request.version!r}, not {wire.VERSION!r}")
            raise GRPCError(
                Status.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{wire.VERSION}"]',
            )
        if not is_extended_resource_name(name):
            self._journal.breach(name, f"resource name {name!r} is invalid")
            raise GRPCError(Status.UNKNOWN, f'the ResourceName "{name}" is invalid')
        for breach in endpoint_breaches(request.endpoint, str(path)):
            self._journal.breach(name, breach)
        await self._registry.connect(name, path)
        if self.late:
            await asyncio.sleep(self.late)

    async def _apply_fault(self, stream: Stream[bytes, bytes]) -> None:
        if not self.faults:
            return
        fault = self.faults.popleft()
        if fault.kind == "refuse":
            raise GRPCError(Status.UNKNOWN, fault.message)
        if fault.kind == "reset":
            stream._stream.connection._transport.abort()  # noqa: SLF001 - grpclib cannot cut a connection
        await asyncio.get_running_loop().create_future()  # until the caller or this kubelet ends


def is_extended_resource_name(name: str) -> bool:
    """Return whether the kubelet lets a device plugin register `name`."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix, _, rest = f"requests.{name}".partition("/")  # quota keys have this prefix, so it counts in the length
    return (
        len(prefix) <= _MAX_PREFIX
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and len(rest) <= _MAX_NAME
        and _NAME.fullmatch(rest) is not None
    )


def endpoint_breaches(endpoint: str, path: str) -> list[str]:
    """Return the faults of a Register's `endpoint`, whose socket should be at `path`; empty if there are no faults."""
    found = []
    if not endpoint:
        found.append("Register without an endpoint")
    if "/" in endpoint:
        found.append(f"endpoint {endpoint!r} has a directory part: a file name in the plugin directory is expected")
    if (left := room(path)) < 0:
        found.append(f"socket path {path} has {LONGEST - left} bytes, unix sockets take {LONGEST}")
    return found
