"""Finds the node's GPUs: probes them through the driver and merges the results with the GPUs that were known before.

A GPU that is slow, faulty or odd does not keep other GPUs from being found. Blocking calls run on driver threads.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from operator import attrgetter

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.device import is_placeholder, placeholder
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml import traits
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import Driver
from gpu_plugin.nvml.roster import MAINTENANCE, Probed, Released, Watched
from gpu_plugin.nvml.sample import fault
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)

# Seconds a GPU may take to describe itself before the node is served without it; the first call wakes a sleeping GPU
PROBE_PATIENCE = 5.0


class Finder:
    """Probes GPUs through the driver, all at once, since the first call about a GPU may take seconds."""

    def __init__(self, driver: Driver, host: HostView, calls: DriverCalls) -> None:
        self._driver = driver
        self._host = host
        self._calls = calls
        self._out: dict[tuple[Gpu, bool], Job[Probed]] = {}

    async def by_index(self, count: int, patience: float, before: Iterable[Gpu] = ()) -> list[Watched]:
        """Find all GPUs that the driver counts. A GPU that takes longer than `patience` seconds is `unreadable`.

        `before` are the GPUs of the last opening. The log names from it the GPU that had the index of an unreadable GPU.
        """
        placeholders = [Gpu(uuid=placeholder(index), index=index) for index in range(count)]
        names = {placeholder(gpu.index): f" (before: {gpu.uuid})" for gpu in before if not is_placeholder(gpu.uuid)}
        return distinct(await self._all(placeholders, patience, names))

    async def by_bus_id(self, gpus: Iterable[Gpu], patience: float) -> list[Watched]:
        """Find these GPUs by their PCI bus ids, which affects no other GPU."""
        asked = list(gpus)
        return await self._all(asked, patience, {gpu.uuid: f" ({gpu.uuid})" for gpu in asked}, by_bus_id=True)

    def reset(self) -> None:
        """Drop the probes under way after the driver was closed: their results do not apply to the next opening."""
        self._out.clear()

    async def _all(
        self, asked: Sequence[Gpu], patience: float, names: Mapping[str, str], *, by_bus_id: bool = False
    ) -> list[Watched]:
        for gpu in asked:  # do not repeat a probe that is still under way: its result is used when it arrives
            if (gpu, by_bus_id) not in self._out:
                probe = probing(self._driver, self._host, gpu, by_bus_id=by_bus_id)
                self._out[gpu, by_bus_id] = self._calls.begin(probe)
        until = anyio.current_time() + patience
        probed: list[Watched] = []
        for gpu in asked:
            job, called = self._out[gpu, by_bus_id], f"GPU {gpu.index}{names.get(gpu.uuid, '')}"
            if not await job.wait(max(0.0, until - anyio.current_time())):
                why = f"the driver has not described it within {patience:g} s"
                log.error("%s: %s", called, why)
                probed.append(Watched(replace(gpu, unreadable=why), None, job))
                continue
            del self._out[gpu, by_bus_id]
            error = job.done.exception()
            if error is None:
                handle, described = job.done.result()
                probed.append(Watched(described, handle))
            else:
                why = fault(error).detail
                log.error("%s cannot be read: %s", called, why)
                probed.append(Watched(replace(gpu, unreadable=why), None))
        return probed


def probing(driver: Driver, host: HostView, gpu: Gpu, *, by_bus_id: bool) -> Callable[[], Probed]:
    """Return a call that probes a GPU: by uuid if it has one, else by index. `by_bus_id`: by bus id, without other GPUs."""
    known, bus_id = "" if is_placeholder(gpu.uuid) else gpu.uuid, gpu.pci_bus_id if by_bus_id else ""
    return partial(traits.probe_gpu, driver, host, gpu.index, known, bus_id=bus_id)


def distinct(probed: list[Watched]) -> list[Watched]:
    """Give each GPU that reports another GPU's uuid a made-up name and withhold it."""
    seen: set[str] = set()
    for watched in probed:
        if watched.gpu.uuid in seen:
            why = f"it claims the uuid of another GPU, {watched.gpu.uuid}"
            log.error("GPU %d: %s; it is withheld", watched.gpu.index, why)
            name = placeholder(watched.gpu.index)
            watched.gpu, watched.handle = replace(watched.gpu, uuid=name, unreadable=why), None
        seen.add(watched.gpu.uuid)
    return probed


def with_remembered(probed: list[Watched], remembered: Sequence[Gpu], bound: Mapping[str, int]) -> list[Watched]:
    """Restore the names of GPUs that the driver cannot read, and list the remembered GPUs that the driver no longer has.

    `bound` are the PCI bus ids that the NVIDIA driver is bound to; empty if the host does not report them. If it is not
    empty, an unreadable GPU gets the name of a remembered GPU only if that GPU's bus id is in it.
    """
    present = {watched.gpu.uuid: watched for watched in probed}
    for gpu in remembered:
        lost = present.get(gpu.uuid)
        if lost is not None and lost.gpu.unreadable:  # lost during the probe: the driver reported only its name
            lost.gpu = replace(gpu, index=lost.gpu.index, unreadable=lost.gpu.unreadable)
    missing = [gpu for gpu in remembered if gpu.uuid not in present]
    candidates = [gpu for gpu in missing if not bound or gpu.pci_bus_id.upper() in bound]
    unread = {watched.gpu.index: watched for watched in probed if watched.handle is None}
    for index, known in _at_indices([*unread], candidates).items():
        unread[index].gpu = replace(known, index=index, unreadable=unread[index].gpu.unreadable)
        missing.remove(known)
    absent = []
    for gpu in missing:
        why = "the driver does not find it any more"
        log.error("GPU %s: %s; it stays listed and is withheld", gpu.uuid, why)
        absent.append(Watched(replace(gpu, unreadable=why), None))
    return _numbered(probed, absent)


def released_gpus(remembered: Iterable[Gpu], released: Released) -> list[Watched]:
    """Return the remembered GPUs that are released, as they are listed until `resume`."""
    return [Watched(replace(gpu, unreadable=MAINTENANCE), None) for gpu in remembered if gpu.uuid in released]


def merged(known: list[Watched], probed: list[Watched], *, every: bool) -> list[Watched]:
    """Return the known GPUs, updated with the GPUs found when the driver was opened again; unreadable GPUs add no facts.

    A made-up name is dropped once a GPU with that index is found under its own uuid, or if all GPUs were probed (`every`) and
    read.
    """
    by_uuid = {watched.gpu.uuid: watched for watched in known}
    found: list[Watched] = []
    for new in probed:
        old = by_uuid.get(new.gpu.uuid)
        readable = new.handle is not None and not new.gpu.unreadable
        if old is not None:
            _set_index(old, new.gpu.index)
            if new.handle is not None and readable:
                old.update_description(new.handle, new.gpu)
            old.looking = new.looking  # set if the probe is still under way
        elif readable:
            found.append(new)
    taken = {new.gpu.index for new in found}
    read = every and all(new.handle is not None and not new.gpu.unreadable for new in probed)
    kept = [old for old in known if old.named or not (read or old.gpu.index in taken)]
    if not every:
        return in_order([*kept, *found])
    uuids = {new.gpu.uuid for new in probed}
    away = [old for old in kept if old.gpu.uuid not in uuids]
    free = {new.gpu.index for new in probed if not new.named} - {old.gpu.index for old in away if not old.named}
    there = {old.gpu: old for old in away if old.named and old.vanished_since is None}
    for index, gpu in _at_indices([*free], [*there]).items():
        _set_index(there[gpu], index)
    numbered = [*(old for old in kept if old.gpu.uuid in uuids), *found]
    return _numbered(numbered, away)


def _at_indices(unread: Sequence[int], gpus: Sequence[Gpu]) -> Mapping[int, Gpu]:
    """Assign GPUs to the driver's indices that could not be read, as far as that is known.

    If there are equally many of both, by order, since NVML numbers GPUs by PCI bus id; else by the GPUs' last indices.
    """
    if len(unread) == len(gpus):
        return dict(zip(sorted(unread), sorted(gpus, key=attrgetter("pci_bus_id", "index")), strict=True))
    return {gpu.index: gpu for gpu in gpus if gpu.index in unread}


def _numbered(listed: Sequence[Watched], away: Sequence[Watched]) -> list[Watched]:
    """Return all GPUs by index. If a GPU missing in the driver's list (`away`) has a used index, it gets a free index."""
    used = {watched.gpu.index for watched in listed}
    kept = {watched.gpu.index for watched in away}
    for watched in in_order(away):
        if watched.gpu.index in used:
            free = next(index for index in count(len(listed)) if index not in used | kept)
            words = "GPU %s: the driver does not list it, and another GPU has its index %d now; it is listed as GPU %d"
            log.info(words, watched.gpu.uuid, watched.gpu.index, free)
            watched.gpu = replace(watched.gpu, index=free)
        used.add(watched.gpu.index)
    return in_order([*listed, *away])


def _set_index(watched: Watched, index: int) -> None:
    if index == watched.gpu.index:
        return
    if watched.named:
        log.info("GPU %s has index %d now, it was %d", watched.gpu.uuid, index, watched.gpu.index)
    watched.gpu = replace(watched.gpu, index=index)


def in_order(gpus: Iterable[Watched]) -> list[Watched]:
    """Sort GPUs by NVML index."""
    return sorted(gpus, key=lambda watched: (watched.gpu.index, watched.gpu.uuid))


class HostState(msgspec.Struct, frozen=True):
    """The host's state at one time. None means not read, or not readable."""

    device_roots: Mapping[str, str]
    mig_minors: Mapping[str, int] | None
    bindings: Mapping[str, int] | None
    boot_id: str
    pci_gpus: Mapping[str, str] | None


def read_host(host: HostView, *, sliced: bool) -> HostState:
    """Read the host's state; the minors of MIG devices only if GPUs are partitioned (`sliced`). Blocks."""
    try:
        bindings = host.bindings()
    except OSError as error:
        log.debug("the driver's bindings cannot be read now: %s", error)
        bindings = None
    return HostState(
        host.device_roots(), host.mig_minors() if sliced else None, bindings, host.boot_id(), host.pci_gpus()
    )
