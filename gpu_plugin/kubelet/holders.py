"""Which devices pods hold, by the word of two witnesses: PodResources, and the kubelet's checkpoint."""

import logging
from collections.abc import Mapping
from pathlib import Path

import anyio

from gpu_plugin.devices.retirement import Allocated
from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.holding import Entries, History, Holding, Key, KubeletReadings, weigh
from gpu_plugin.kubelet.socket import identity
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES, Workers, computed

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that each witness may take."""

NOTHING: Mapping[Key, float] = {}

Written = tuple[Entries, checkpoint.Writing]
"""What the checkpoint says, and which writing of it that is."""


class Holders:
    """Asks both witnesses; `holding.weigh` weighs what they say."""

    def __init__(self, directory: Path) -> None:
        """Takes the device plugin directory, where kubelet.sock and the checkpoint lie."""
        self._directory = directory
        self._history = History()
        self._no_answer = ""
        self._threads = Workers("checkpoint")
        self._reading: SlowCall[Written] = SlowCall(self._threads.begin)
        self.unread = ""
        """Why the checkpoint could not be read the last time; empty where it could."""
        self.lacking = False
        """Whether that is because there is none."""

    async def ask(self, socket: Path, awaited: Mapping[Key, float] = NOTHING) -> Holding:
        """What pods hold or may hold. `socket` is that of PodResources, `awaited` as for `weigh`."""
        before = await self._written()
        kubelet = identity(socket)
        listed = await self._listed(socket)
        if kubelet != identity(socket):
            kubelet = None
        after = await self._written()
        entries, writing = (None, None) if after is None else after
        said = KubeletReadings(kubelet, listed, None if before is None else before[0], entries, writing)
        many = len(listed or ()) + len(entries or ()) >= OFF_LOOP_DEVICES
        holding, self._history = await computed(weigh, self._history, said, awaited, apart=many)
        return holding

    async def _listed(self, socket: Path) -> Allocated | None:
        try:
            listed = await pod_resources.allocated(socket, PATIENCE)
        except CallError as error:
            if str(error) != self._no_answer:
                log.warning("PodResources does not say which devices pods hold: %s", error)
            self._no_answer = str(error)
            return None
        self._no_answer = ""
        return listed

    def close(self) -> None:
        """Lets the thread that reads the checkpoint end; the next question begins another."""
        self._threads.close()

    async def _written(self) -> Written | None:
        """The checkpoint, None where it is no witness. While one reading hangs, no other is begun."""
        self.lacking = False
        if self._reading.back:  # it is out of date by now
            self._reading.forget()
        self._reading.begin(lambda: checkpoint.read(self._directory))
        assert self._reading.started is not None
        left = self._reading.started + PATIENCE - anyio.current_time()  # whoever began it may have been cancelled
        if not await self._reading.wait(max(0.0, left)):
            self.unread = f"reading it has not come back for more than {PATIENCE:g} s: does its disk answer?"
            return None
        reading = self._reading.take()
        error = reading.done.exception()
        self.unread = "" if error is None else str(error) or repr(error)
        self.lacking = isinstance(error, checkpoint.NoCheckpointError)
        return reading.done.result() if error is None else None
