"""Encode the device list of a resource: once for all streams, only after a change, and once for a burst of changes."""

import logging

import anyio

from gpu_plugin.devices.device import Device
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import computed

log = logging.getLogger(__name__)

# Seconds between two lists: the first change is sent at once, and the changes of a burst after it together.
QUIET = 0.05

# Encode this many or more new devices on a thread, so that the event loop is not blocked: each takes 20 µs.
OFF_LOOP_ENCODINGS = 2_000

# The list to send: the devices, and the number of requests to send the same list again.
ListRequest = tuple[tuple[Device, ...], int]


class ListFeed:
    """The newest list of a resource. Each stream waits for a list that it has not sent."""

    def __init__(self, resource: str, store: SnapshotStore) -> None:
        self.resource = resource
        self.version = 0
        self.payload = b""
        self._store = store
        self._encoder = wire.ListEncoder()
        self._changed = Pulse()
        self._done: ListRequest | None = None
        self._refreshing = anyio.Lock()

    async def run(self) -> None:
        """Encode the list after each change of the store. Never returns."""
        while True:
            if await self.refresh():
                await anyio.sleep(QUIET)
            elif self._store.lists_stopped or self._is_done(self._wanted()):
                await self._store.changed.wait()

    async def refresh(self) -> bool:
        """Update the list from the newest snapshot. Return whether there is a list to send, new or the same again."""
        async with self._refreshing:
            wanted = self._wanted()
            if self._store.lists_stopped or self._is_done(wanted):
                return False
            payload = await self._encoded(wanted[0])
            repeated = self._done is not None and wanted[1] > self._done[1]
            self._done = wanted
            if self.version and payload == self.payload and not repeated:
                return False
            self.payload = payload
            self.version += 1
            self._changed.ring()
            return True

    def _wanted(self) -> ListRequest:
        view = self._store.current.resources.get(self.resource)
        return view.resource.devices if view else (), self._store.resends(self.resource)

    def _is_done(self, wanted: ListRequest) -> bool:
        """Whether the list has these devices: the same tuple, because comparing each device would take too long."""
        return self._done is not None and wanted[0] is self._done[0] and wanted[1] == self._done[1]

    async def _encoded(self, devices: tuple[Device, ...]) -> bytes:
        """Return the encoded list of these devices, or the last list if it would be too long."""
        apart = self._encoder.fresh(devices) >= OFF_LOOP_ENCODINGS
        with anyio.CancelScope(shield=True):  # the encoder belongs to the thread until the encoding has ended
            payload = await computed(self._encoder.encode, devices, apart=apart)
        if len(payload) <= wire.MAX_MESSAGE_BYTES:
            return payload
        log.error(
            "%s: a list of %d devices has %d bytes, and the kubelet accepts %d: %s. Configure fewer replicas",
            self.resource,
            len(devices),
            len(payload),
            wire.MAX_MESSAGE_BYTES,
            "the last list stays" if self.version else "no device is offered",
        )
        return self.payload

    async def newer(self, than: int) -> tuple[int, bytes]:
        """Wait until the list is newer than version `than`, and return its version and its bytes."""
        while self.version <= than:
            await self._changed.wait()
        return self.version, self.payload
