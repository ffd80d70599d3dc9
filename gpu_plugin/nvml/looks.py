"""Each GPU's turn: one question, and what became of it."""

import logging
from dataclasses import replace

import anyio

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.nvml.calls import DriverCalls, DriverSession
from gpu_plugin.nvml.finding import failed, looking
from gpu_plugin.nvml.port import Driver, Handle, HostView
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Roster
from gpu_plugin.nvml.sample import Look
from gpu_plugin.nvml.subscription import EventSubscription
from gpu_plugin.nvml.watched import Watched

log = logging.getLogger(__name__)


class Looks:
    """Looks at GPUs, one call for each at a time, and takes in what they say of themselves."""

    def __init__(
        self,
        driver: Driver,
        host: HostView,
        calls: DriverCalls,
        session: DriverSession,
        roster: Roster,
        reports: Reports,
        events: EventSubscription,
    ) -> None:
        self._driver = driver
        self._host = host
        self._calls = calls
        self._session = session
        self._roster = roster
        self._reports = reports
        self._events = events
        self.recut = False
        """Whether a GPU was found to be cut anew, """
        self.relinked = False
        """and whether the links between GPUs are to be read again. Set back by whoever sees to it."""

    async def turn(self, watched: Watched, patience: float, timeout: float) -> None:
        """One look, for `patience` seconds, unless an earlier one is still under way; after `timeout` it is said to hang."""
        roster = self._roster
        vanished = roster.bus.vanished(watched)
        binding = roster.bus.binding(watched.gpu)
        watched.binding = watched.binding if binding is None else binding
        if watched.pending is None:
            sample = self._unasked(watched, vanished=vanished)
            if sample is not None:
                watched.handle, watched.events = None, False
                self._saw(watched, sample)
                return
            call = looking(self._driver, self._host, watched, binding, alone=bool(roster.untouched))
            watched.asked_under = binding
            watched.pending = await self._calls.submit(call, patience)
        job = watched.pending
        if not job.done.done():
            if vanished:
                self._saw(watched, _gone(watched.gpu))
            elif anyio.current_time() - job.started >= timeout:
                self._saw(
                    watched, Sample(fault=Fault.HUNG, detail=f"the driver has not answered for over {timeout:g} s")
                )
            return
        watched.pending = None
        error = job.done.exception()
        if error is None:
            await self._take(watched, job.done.result())
            return
        watched.handle = None
        self._saw(watched, replace(failed(error), binding=binding))

    def _unasked(self, watched: Watched, *, vanished: bool) -> Sample | None:
        """The sample of a GPU that the driver need not, or must not, be asked about; None: ask it."""
        if vanished:
            return _gone(watched.gpu)
        if not self._session.is_open:
            trouble = self._session.trouble or "it is closed while GPUs are released"
            return Sample(fault=Fault.DRIVER, detail=f"the driver is not open: {trouble}")
        if self._roster.untouched and watched.handle is None and not watched.gpu.pci_bus_id:
            why = "its PCI bus id is not known, and any other way to it might wake GPUs that are released"
            return Sample(fault=Fault.ERROR, detail=why)
        return None

    async def _take(self, watched: Watched, result: Look | tuple[Handle, Gpu] | str) -> None:
        """Takes in what a call brought: a look, a new description, or the answer to the request for events."""
        if isinstance(result, Look):
            if watched.handle is None:
                watched.events = False  # a registration does not survive the reset that a new handle may come from
            # Handles from before a reset are worth nothing: after a fault, ask for a new one next time.
            watched.handle = None if result.sample.fault else result.handle
            watched.unsupported |= result.unsupported
            if watched.handle is not None:
                self._roster.by_handle[watched.handle] = watched.gpu.uuid
                before = watched.gpu
                self._reports.soon |= watched.recut(result)
                self.recut |= watched.gpu is not before
                self.relinked |= watched.relinked(result.sample)
                if not watched.events:
                    await self._events.ask(watched)
            self._saw(watched, result.sample)
        elif isinstance(result, tuple):
            self._take_probed(watched, *result)
        else:  # a registration for events that took its time
            self._events.settled(watched, result)

    def _take_probed(self, watched: Watched, handle: Handle, gpu: Gpu) -> None:
        """A GPU that could not be read was probed again."""
        if gpu.unreadable or any(other.gpu.uuid == gpu.uuid for other in self._roster.gpus if other is not watched):
            self._saw(watched, Sample(fault=Fault.ERROR, detail=gpu.unreadable or "another GPU answers for it"))
            return
        log.info("GPU %d (%s) can be read now", gpu.index, gpu.uuid)
        watched.described(handle, gpu)
        watched.vanished_since = None
        self._roster.by_handle[handle] = gpu.uuid
        self.relinked = True
        self._reports.soon = True  # it is looked at, and its events are asked for, once others know of it

    def _saw(self, watched: Watched, sample: Sample) -> None:
        if sample.fault is Fault.VANISHED:
            if watched.vanished_since is None:
                watched.vanished_since = anyio.current_time()
        elif sample.fault not in (Fault.DRIVER, Fault.HUNG):  # which say nothing of whether it is there
            watched.vanished_since = None
        self._reports.saw(watched.gpu.uuid, sample)


def _gone(gpu: Gpu) -> Sample:
    return Sample(fault=Fault.VANISHED, detail=f"the NVIDIA driver is not bound to {gpu.pci_bus_id} any more")
