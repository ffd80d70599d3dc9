"""One resource's device list as bytes: encoded once for all streams, only where something changed, bursts as one."""

import logging

import anyio
import anyio.to_thread

from gpu_plugin.devices.device import Device
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

QUIET = 0.05
"""Seconds between two lists: the first change goes out at once, those of a burst after it together."""

OFF_LOOP_ENCODINGS = 2_000
"""From so many devices never encoded before on (20 µs each) the work is done on a thread, so that the loop runs on."""


ListRequest = tuple[tuple[Device, ...], int]
"""What the store wants sent: the devices, and how often the same list was asked for once more."""


class ListFeed:
    """The newest list of a resource; streams wait for one they have not sent."""

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
        """Follows the store for as long as the process lives. Never returns."""
        while True:
            if await self.refresh():
                await anyio.sleep(QUIET)
            elif self._is_done(self._wanted()):
                await self._store.changed.wait()

    async def refresh(self) -> bool:
        """Takes in the newest snapshot. Returns whether there is a list to send, another than before or the same once more."""
        async with self._refreshing:
            wanted = self._wanted()
            if self._is_done(wanted):
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
        """Whether these very devices, which are not compared one by one, were taken in."""
        return self._done is not None and wanted[0] is self._done[0] and wanted[1] == self._done[1]

    async def _encoded(self, devices: tuple[Device, ...]) -> bytes:
        """A list of these devices; the last one where it would be too long."""
        if self._encoder.fresh(devices) >= OFF_LOOP_ENCODINGS:
            payload = await anyio.to_thread.run_sync(self._encoder.encode, devices)
        else:
            payload = self._encoder.encode(devices)
        if len(payload) <= wire.MAX_MESSAGE_BYTES:
            return payload
        log.error(
            "%s: a list of %d devices is %d bytes and the kubelet takes %d: %s. Ask for fewer replicas",
            self.resource,
            len(devices),
            len(payload),
            wire.MAX_MESSAGE_BYTES,
            "the last list stays" if self.version else "no device is offered",
        )
        return self.payload

    async def newer(self, than: int) -> tuple[int, bytes]:
        """The list once it is newer than version `than`."""
        while self.version <= than:
            await self._changed.wait()
        return self.version, self.payload
