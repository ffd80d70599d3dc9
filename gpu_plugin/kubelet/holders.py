"""Read which devices pods hold from two sources: PodResources, and the kubelet's checkpoint."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio

from gpu_plugin.devices.retirement import Allocated
from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.holding import Entries, History, Holding, Key, KubeletReadings, weigh
from gpu_plugin.kubelet.socket import identity
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES, Job, begin, computed

log = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds to wait for each source

NOTHING: Mapping[Key, float] = {}

Written = tuple[Entries, checkpoint.Writing]  # the content of the checkpoint, and the version of the file


class Holders:
    """Reads both sources, and combines them with `holding.weigh`."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the device plugin directory, with kubelet.sock and the checkpoint."""
        self._directory = directory
        self._history = History()
        self._no_answer = LogOnChange(log, "PodResources does not say which devices pods hold: %s")
        self._reading: Job[Written] | None = None
        self.unread = ""
        """Why the checkpoint could not be read the last time; empty if it could."""
        self.lacking = False
        """Whether the checkpoint did not exist the last time."""

    async def ask(self, socket: Path, awaited: Mapping[Key, float] = NOTHING) -> Holding:
        """Return the devices that pods hold or may hold. `socket` is the PodResources socket, and `awaited` as for `weigh`."""
        before = await self._read_checkpoint()
        kubelet = identity(socket)
        listed = await self._list_allocated(socket)
        if kubelet != identity(socket):
            kubelet = None
        after = await self._read_checkpoint()
        entries, writing = (None, None) if after is None else after
        readings = KubeletReadings(kubelet, listed, None if before is None else before[0], entries, writing)
        many = len(listed or ()) + len(entries or ()) >= OFF_LOOP_DEVICES
        holding, self._history = await computed(weigh, self._history, readings, awaited, apart=many)
        return holding

    async def _list_allocated(self, socket: Path) -> Allocated | None:
        try:
            listed = await pod_resources.allocated(socket, PATIENCE)
        except CallError as error:
            self._no_answer.update(str(error))
            return None
        self._no_answer.update("")
        return listed

    async def _read_checkpoint(self) -> Written | None:
        """Read the checkpoint; None if it cannot be read. While a read hangs, no other read is started."""
        self.lacking = False
        if self._reading is None or self._reading.returned:  # the result of an earlier read is out of date
            self._reading = begin(partial(checkpoint.read, self._directory), "checkpoint")
        reading = self._reading
        left = reading.started + PATIENCE - anyio.current_time()  # an earlier, cancelled call may have started it
        if not await reading.wait(max(0.0, left)):
            self.unread = f"reading it has taken more than {PATIENCE:g} s: does its disk answer?"
            return None
        error = reading.done.exception()
        self.unread = "" if error is None else str(error) or repr(error)
        self.lacking = isinstance(error, checkpoint.NoCheckpointError)
        return reading.done.result() if error is None else None
