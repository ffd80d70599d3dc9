"""Looks at single GPUs, with one driver call for a GPU at a time, and returns the results as values."""

import logging

import anyio

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.finding import probing
from gpu_plugin.nvml.port import Driver, Handle
from gpu_plugin.nvml.roster import LookResult, Probed, Roster, Watched
from gpu_plugin.nvml.sample import Look, fault, look
from gpu_plugin.nvml.session import DriverSession
from gpu_plugin.nvml.traits import reach
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)


class Poller:
    """Looks at GPUs, with at most one call for each GPU at a time."""

    def __init__(
        self, driver: Driver, host: HostView, calls: DriverCalls, session: DriverSession, roster: Roster
    ) -> None:
        self._driver = driver
        self._host = host
        self._calls = calls
        self._session = session
        self._roster = roster

    async def look(
        self, watched: Watched, patience: float, timeout: float, *, full: bool = True, judging: bool = True
    ) -> LookResult:
        """Look at a GPU, or return the state of the look that is under way.

        Args:
            watched: the GPU, which is updated.
            patience: seconds to wait for a call that this begins. After that the call continues in the background.
            timeout: seconds after which a call counts as hung.
            full: whether to read everything. Some looks read everything in any case.
            judging: if False, read only the core values and how the GPU is partitioned.
        """
        bus, now = self._roster.bus, anyio.current_time()
        vanished, binding = bus.vanished(watched), bus.binding(watched.gpu)
        watched.binding = watched.binding if binding is None else binding
        if watched.pending is None:
            if not vanished and self._session.opens(timeout):
                return LookResult()  # the driver is still being opened, which is no fault of the GPU yet
            sample = self._sample_without_call(watched, vanished=vanished)
            if sample is not None:
                return watched.set_out_of_reach(sample, now)
            watched.asked_under = binding
            watched.looking = self._begin(watched, binding, full=full, judging=judging)
            await watched.looking.wait(patience)
        job, now = watched.pending, anyio.current_time()
        if job is None or not job.returned:
            return self._under_way(watched, now, timeout, vanished=vanished)
        if watched.looking is None:
            return LookResult(look_soon=True)  # the finished call was the registration for events: look next time
        watched.looking = None
        error = job.done.exception()
        if error is not None:
            return watched.set_out_of_reach(fault(error, binding), now)
        answer: Look | Probed = job.done.result()
        return self._looked(watched, answer, now) if isinstance(answer, Look) else self._probed(watched, *answer, now)

    def _sample_without_call(self, watched: Watched, *, vanished: bool) -> Sample | None:
        """Return the sample of a GPU that the driver cannot or must not be asked about; None: ask the driver."""
        if vanished:
            return _gone(watched.gpu)
        if not self._session.is_open:
            trouble = self._session.trouble or "it is closed while GPUs are released"
            return Sample(fault=Fault.DRIVER, detail=f"the driver is not open: {trouble}")
        if self._roster.untouched and watched.handle is None and not watched.gpu.pci_bus_id:
            why = "its PCI bus id is not known, and any other way to it might wake GPUs that are released"
            return Sample(fault=Fault.ERROR, detail=why)
        return None

    def _begin(self, watched: Watched, binding: int | None, *, full: bool, judging: bool) -> "Job[Look] | Job[Probed]":
        """Start a probe if the GPU could not be read so far; else a look, which gets a new handle if there is none."""
        driver, gpu, handle = self._driver, watched.gpu, watched.handle
        # The turns of GPUs are offset, so that not all GPUs read everything, or the same slow values, in one round.
        by_bus_id, opening, turn = bool(self._roster.untouched), self._session.opening, watched.turn + gpu.index
        bus_id = gpu.pci_bus_id if by_bus_id else ""
        if gpu.unreadable:
            return self._calls.begin(probing(driver, self._host, gpu, by_bus_id=by_bus_id))
        skip = watched.unsupported
        full = full or handle is None
        partitionable, counting = watched.partitionable or handle is None, watched.counting
        watched.turn += 1
        return self._calls.begin(
            lambda: look(
                driver,
                reach(driver, gpu.index, gpu.uuid, bus_id)[0] if handle is None else handle,
                gpu,
                opening=opening,
                full=full,
                judging=judging,
                turn=turn,
                partitionable=partitionable,
                skip=skip,
                binding=binding,
                counting=counting,
            )
        )

    def _under_way(self, watched: Watched, now: float, timeout: float, *, vanished: bool) -> LookResult:
        if vanished:
            gone = _gone(watched.gpu)
            watched.update_absence(gone, now)
            return LookResult(gone)
        if watched.pending is not None and now - watched.pending.started >= timeout:
            return LookResult(Sample(fault=Fault.HUNG, detail=f"the driver has not answered for over {timeout:g} s"))
        return LookResult()

    def _looked(self, watched: Watched, answer: Look, now: float) -> LookResult:
        found = watched.store_look(answer, now)
        if watched.handle is not None:
            self._roster.by_handle[watched.handle] = watched.gpu.uuid
        return found

    def _probed(self, watched: Watched, handle: Handle, gpu: Gpu, now: float) -> LookResult:
        if gpu.unreadable or any(other.gpu.uuid == gpu.uuid for other in self._roster.gpus if other is not watched):
            sample = Sample(fault=Fault.ERROR, detail=gpu.unreadable or "another GPU has its uuid")
            return watched.set_out_of_reach(sample, now)
        log.info("GPU %d (%s) can be read now", gpu.index, gpu.uuid)
        watched.update_description(handle, gpu)
        watched.vanished_since = None
        self._roster.by_handle[handle] = gpu.uuid
        # It gets its first look, and is registered for events, after the node with it is passed on.
        return LookResult(links_changed=True, look_soon=True)


def _gone(gpu: Gpu) -> Sample:
    return Sample(fault=Fault.VANISHED, detail=f"the NVIDIA driver is not bound to {gpu.pci_bus_id} any more")
