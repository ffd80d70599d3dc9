"""The five methods of the kubelet's DevicePlugin API for one resource.

The kubelet admits pods one after the other and waits for our answer without a deadline. So an answer depends only on the request
and the newest snapshot: no NVML calls, no file access, no waiting. Allocate also stores which devices were given away.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

import anyio
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gpu_plugin.containers.conflicts import PairWatch
from gpu_plugin.containers.edits import ContainerEdits, container_edits
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.connection import received
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.whole import Budget
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.rates import LogThrottle, TokenBucket
from gpu_plugin.runtime.threads import computed

log = logging.getLogger(__name__)

BytesStream = Stream[bytes, bytes]

# Larger requests (700 ids) are handled on a thread, so that other calls are answered at the same time. A smaller request has
# room for 16,000 empty ids, which take 5 ms.
OFF_LOOP_BYTES = 32 * 1024

# The time limit of an exact choice of GPUs: 100 times its usual duration, so that only a stalled machine exceeds it.
CHOOSING = Budget(time.monotonic, 0.05)

# ListAndWatch streams of one resource. A kubelet has one stream. A stream whose client does not read takes 20 KiB.
MAX_STREAMS = 16

RESEND_SECONDS = 1.0  # seconds between two lists that are sent again for a request which follows another plugin's list

# Characters of an unknown id in a refusal. Our ids have at most 63, and another plugin's may have any number.
MAX_SHOWN_ID = 80

MAX_LOGGED_IDS = 128  # the most ids of one kind in a log line: 16 GPUs with seven MIG devices each have 112


class RequestRejectedError(Exception):
    """A refused request. The text is shown in the pod's events, so it names the device and the reason."""

    status = Status.INVALID_ARGUMENT


class UnknownDeviceError(RequestRejectedError):
    """A requested id is not a device of this resource."""

    status = Status.NOT_FOUND


class UnhealthyDeviceError(RequestRejectedError):
    """A requested device is unhealthy."""

    status = Status.FAILED_PRECONDITION


class DevicePluginService:
    """Serves one resource from the store. `streams_changed` rings when a ListAndWatch stream is opened or has ended.

    A kubelet calls GetDevicePluginOptions while we register, and opens its stream on the same connection. So a stream on such a
    connection is the kubelet's, and only these streams count. Until the kubelet opens such a stream, every stream counts.
    """

    def __init__(
        self,
        feed: ListFeed,
        store: SnapshotStore,
        streams_changed: Pulse,
        pairs: PairWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
        counts: KubeletCounts | None = None,
    ) -> None:
        """`pairs` and `counts` are shared by the services of all resources; `clock` is steady, in seconds."""
        self._pairs = pairs or PairWatch()
        self._counts = counts or KubeletCounts()
        # A controller may create pods without end that Allocate refuses, so each kind of line has a limit of its own.
        self._refused, self._unreadable = LogThrottle(), LogThrottle()
        self._resent, self._crowded = LogThrottle(), LogThrottle()
        self._resends = TokenBucket(1, RESEND_SECONDS)
        self._foreign_list = False
        """Whether a request since the last answer follows another plugin's list. Set on any thread, read on the event loop."""
        self._clock = clock
        self.resource = feed.resource
        self.registering = True
        """True from before a registration is sent until it is answered: the kubelet connects to us in this time."""
        self._registering_connections: WeakSet[object] = WeakSet()
        self._streams: dict[anyio.CancelScope, bool] = {}
        """The open streams, oldest first, and whether each is the kubelet's own."""
        self._opened: dict[bool, int] = {True: 0, False: 0}
        self._feed = feed
        self._store = store
        self._streams_changed = streams_changed
        self._ended = False

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return raw handlers by path.

        grpclib's generated handlers never close the generator of a stream that the kubelet ended.
        """
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            wire.OPTIONS: Handler(self._options, unary, bytes, bytes),
            wire.LIST_AND_WATCH: Handler(self._list_and_watch, stream, bytes, bytes),
            wire.PREFERRED: Handler(self._preferred, unary, bytes, bytes),
            wire.ALLOCATE: Handler(self._allocate, unary, bytes, bytes),
            wire.PRE_START: Handler(self._pre_start, unary, bytes, bytes),
        }

    def end_streams(self) -> None:
        """End every open ListAndWatch stream with status OK, and every later stream at once."""
        self._ended = True
        for scope in tuple(self._streams):
            scope.cancel()

    @property
    def streams(self) -> int:
        """The number of open streams of the kubelet."""
        own = bool(self._opened[True])
        return sum(1 for each in self._streams.values() if each is own)

    @property
    def streams_opened(self) -> int:
        """The number of streams that the kubelet has opened."""
        return self._opened[bool(self._opened[True])]

    async def _options(self, stream: BytesStream) -> None:
        with self._counts.timed("GetDevicePluginOptions"):
            await received(stream)
            if self.registering:
                self._registering_connections.add(_connection(stream))
            await stream.send_message(OPTIONS)

    async def _preferred(self, stream: BytesStream) -> None:
        with self._counts.timed("GetPreferredAllocation"):
            await self._answer(stream, self.preferred_bytes)

    async def _allocate(self, stream: BytesStream) -> None:
        with self._counts.timed("Allocate"):
            await self._answer(stream, self.allocate_bytes)

    async def _pre_start(self, stream: BytesStream) -> None:
        with self._counts.timed("PreStartContainer"):
            await self._answer(stream, self.pre_start_bytes)

    async def _list_and_watch(self, stream: BytesStream) -> None:
        """Send the whole list, and again after each change, until the kubelet or `end_streams` ends the stream."""
        await received(stream)
        own = _connection(stream) in self._registering_connections
        self._make_room()
        self._opened[own] += 1
        sent = 0
        scope = anyio.CancelScope()
        self._streams[scope] = own
        self._counts.streams[self.resource] = self.streams
        self._streams_changed.ring()
        try:
            with scope:
                if self._ended:
                    scope.cancel()
                while True:
                    sent, payload = await self._feed.newer(sent)
                    await stream.send_message(payload)
                    self._counts.lists[self.resource] += 1
        finally:
            self._streams.pop(scope, None)
            self._counts.streams[self.resource] = self.streams
            self._streams_changed.ring()

    def _make_room(self) -> None:
        """If the limit of streams is reached, end the oldest stream that is not the kubelet's, or else the oldest stream."""
        if len(self._streams) < MAX_STREAMS:
            return
        level, more = self._crowded.next(self._clock())
        log.log(
            level,
            "%s: %d ListAndWatch streams are open, and a kubelet opens 1: ending the oldest%s",
            self.resource,
            len(self._streams),
            more,
        )
        oldest = next((scope for scope, own in self._streams.items() if not own), next(iter(self._streams)))
        del self._streams[oldest]
        oldest.cancel()

    async def _answer(self, stream: BytesStream, work: Callable[[bytes], bytes]) -> None:
        """Send the result of `work` for the request. Raises GRPCError for a refusal."""
        request = await received(stream)
        try:
            answer = await computed(work, request, apart=len(request) > OFF_LOOP_BYTES)
        except RequestRejectedError as error:
            raise self._refusal(error.status, str(error)) from None
        except ValueError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, f"{self.resource}: {error}") from None
        finally:
            foreign_list, self._foreign_list = self._foreign_list, False
            if _connection(stream) in self._registering_connections:  # other clients' requests do not count
                self._counts.requests[self.resource] += 1
                if foreign_list:
                    self._send_list_again()
        await stream.send_message(answer)

    def _send_list_again(self) -> None:
        """Send the kubelet our list again, at most once in `RESEND_SECONDS`.

        From 1.37 on, after another plugin of this resource has ended, the kubelet sends requests to this plugin again, but keeps
        the other plugin's list. While the other plugin serves the resource, it gets the requests itself, and its list is left
        alone.
        """
        now = self._clock()
        if not self._resends.take(now):
            return
        self._store.resend(self.resource)
        level, more = self._resent.next(now)
        log.log(
            level,
            "%s: the kubelet asked for devices that this plugin does not offer, as after another plugin has registered the "
            "resource and ended; sending this plugin's list again%s",
            self.resource,
            more,
        )

    def _refusal(self, status: Status, sentence: str) -> GRPCError:
        """Log a refusal, if few were logged recently, and return it."""
        level, more = self._refused.next(self._clock())
        log.log(level, "%s%s", sentence, more)
        return GRPCError(status, sentence)

    def allocate_bytes(self, request: bytes) -> bytes:
        """Answer an encoded AllocateRequest. Raises RequestRejectedError, or ValueError if the bytes are not such a message."""
        containers = wire.decode_allocate(request)
        answer = wire.encode_allocate(self.allocate(containers))
        self._counts.allocated(self.resource, sum(map(len, containers)))
        return answer

    def allocate(self, containers: Sequence[Sequence[str]]) -> list[ContainerEdits]:
        """Return the edits of each container, in order.

        Raises:
            UnknownDeviceError: a requested id is not a device of the resource.
            UnhealthyDeviceError: a device is unhealthy.
            RequestRejectedError: the resource is not served any more, or a container requests several shared devices, which the
                operator has forbidden.
        """
        now = self._clock()
        self._store.recent.note(self.resource, [i for ids in containers for i in self._listed(ids)], now)
        # Read the view after the devices are noted, so that their hardware is not offered again in between.
        view = self._view()
        answers = [container_edits(self._devices(view, ids), view.access) for ids in containers]
        if sentence := self._pairs.allocated(self.resource, view.access.strategies, now):
            log.warning("%s", sentence)
        return answers

    def preferred_bytes(self, request: bytes) -> bytes:
        """Answer an encoded PreferredAllocationRequest. Never raises.

        An error would fail the pod. After an empty answer the kubelet chooses the devices.
        """
        try:
            containers = wire.decode_preferred(request)
        except ValueError as error:
            level, more = self._unreadable.next(self._clock())
            log.log(
                level, "%s: GetPreferredAllocation: %s; leaving the choice to the kubelet%s", self.resource, error, more
            )
            return wire.encode_preferred([()])
        answers = self.preferred(containers)
        if log.isEnabledFor(logging.DEBUG):
            self._log_choices(containers, answers)
        return wire.encode_preferred(answers)

    def preferred(self, containers: Sequence[ContainerPreferredAllocationRequest]) -> list[tuple[str, ...]]:
        """Return the ids that each container should get, in order; no ids if it cannot be served, or after any error."""
        try:
            view = self._view()
            devices = view.resource.devices
            if not all(_offered(view, identifier) for c in containers for identifier in c.available_device_ids):
                self._foreign_list = True
            return [
                preferred(
                    c.available_device_ids,
                    c.must_include_device_ids,
                    c.allocation_size,
                    devices,
                    view.order,
                    view.placement,
                    view.policy,
                    CHOOSING,
                )
                for c in containers
            ]
        except Exception:
            log.exception("%s: choosing devices failed; leaving the choice to the kubelet", self.resource)
            return [() for _ in containers]

    def _log_choices(
        self, containers: Sequence[ContainerPreferredAllocationRequest], answers: Sequence[Sequence[str]]
    ) -> None:
        """Log requests and answers as options of `gpu-plugin simulate-allocation`, which explains the choice."""
        for asked, answer in zip(containers, answers, strict=True):
            log.debug(
                "%s: preferred %s of --available %s --size %d%s",
                self.resource,
                _joined(answer) or "none",
                _joined(sorted(asked.available_device_ids)),
                asked.allocation_size,
                f" --must {_joined(asked.must_include_device_ids)}" if asked.must_include_device_ids else "",
            )

    def pre_start_bytes(self, request: bytes) -> bytes:
        """Return an empty PreStartContainerResponse: our options do not request this call.

        Raises:
            ValueError: the bytes are not a PreStartContainerRequest.
        """
        wire.decode_pre_start(request)
        return wire.EMPTY

    def _view(self) -> ResourceView:
        view = self._store.current.resources.get(self.resource)
        if view is None:
            raise RequestRejectedError(f"{self.resource} is not served by this node any more")
        return view

    def _listed(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that this resource lists."""
        view = self._view()
        return [identifier for identifier in ids if identifier in view.order]

    def _devices(self, view: ResourceView, ids: Sequence[str]) -> list[Device]:
        """Return the devices of these ids, each once, in the order of the list. Raises as `allocate` does."""
        found = {}
        for identifier in ids:
            device = view.device(identifier)
            if not _offered(view, identifier):
                self._foreign_list = True
            if device is None:
                raise UnknownDeviceError(
                    f"invalid allocation request for {self.resource!r}: unknown device: "
                    f"{excerpt(identifier, MAX_SHOWN_ID)!r}",
                )
            if device.reason:
                raise UnhealthyDeviceError(
                    f"invalid allocation request for {self.resource!r}: device {identifier} is unhealthy: {device.reason}",
                )
            found[view.order[identifier]] = device
        if len(found) > 1 and any(d.sharing is not None and d.sharing.single_requests for d in found.values()):
            raise RequestRejectedError(
                f"invalid allocation request for {self.resource!r}: maximum request size for shared resources is 1; "
                f"found {len(found)}",
            )
        return [found[at] for at in sorted(found)]


def _offered(view: ResourceView, identifier: str) -> bool:
    """Whether our list has a healthy device with this id."""
    device = view.device(identifier)
    return device is not None and not device.reason


def _joined(ids: Sequence[str]) -> str:
    """Return the ids as text; if there are too many, the number for each GPU or MIG device, or only the total number."""
    if len(ids) <= MAX_LOGGED_IDS:
        return ",".join(ids)
    counts = Counter(identifier.partition(REPLICA)[0] for identifier in ids)
    return (
        ",".join(f"{of}:{count}" for of, count in counts.items())
        if len(counts) <= MAX_LOGGED_IDS
        else f"{len(ids)} devices"
    )


def _connection(stream: BytesStream) -> object:
    return stream._stream.connection  # noqa: SLF001 - grpclib has no public name for it


OPTIONS = wire.encode_options(pre_start=False, preferred=True)
