"""The monitored GPUs: the state and handle of each, which are released, and which PCI devices the driver is bound to.

NVML finds GPUs only when it is opened, so a GPU that was bound to the driver since then is found by opening it again. A GPU
that the driver is not bound to counts as absent. Does no I/O; time is counted in rounds.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.device import is_placeholder
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Fabric, Fault, Sample
from gpu_plugin.nvml.events import Registered
from gpu_plugin.nvml.mig import UNREADABLE_LOOKS, with_partition
from gpu_plugin.nvml.plausible import CounterHistory
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.sample import Look
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)

Probed = tuple[Handle, Gpu]  # the result of a probe: the GPU's new handle and its description


class LookResult(msgspec.Struct, frozen=True):
    """The result of a GPU's turn.

    `sample` is None while a call is under way and has not timed out, and if the turn was a probe instead of a look.
    """

    sample: Sample | None = None
    repartitioned: bool = False  # its MIG devices changed, so there may be other device nodes
    links_changed: bool = False  # the links between GPUs must be read again
    register_events: bool = False  # The GPU has a new handle, or was reset, so it must be registered for events again
    look_soon: bool = False  # another look within a second would settle a question


class Watched(msgspec.Struct):
    """A GPU with its handle (None: out of reach) and the call about it that is under way: `looking` or `registering`."""

    gpu: Gpu
    handle: Handle | None
    looking: "Job[Look] | Job[Probed] | None" = None
    registering: "Job[Registered] | None" = None
    turn: int = 0  # number of looks that were begun; it determines which slow values a look reads
    counting: int | None = None  # the last value of `Sample.counting`: which counters can be compared
    # Whether it can be partitioned into MIG devices, as far as known. If False, the partition is not read again.
    partitionable: bool = True
    unreadable_looks: int = 0  # number of looks in a row with an unreadable MIG device
    partition_trouble: str = ""  # why the last look could not read the partition, logged once
    # Fields of a Sample that it does not support, found since it was described. Looks skip them.
    unsupported: frozenset[str] = frozenset()
    # `unsupported` for reports to people: kept while the GPU is out of reach; None before the first look.
    unanswered: frozenset[str] | None = None
    binding: int | None = None  # the last binding that the host reported
    asked_under: int | None = None  # the binding when the driver was last asked about this GPU
    # Which of its NVLinks were active according to the last answer since it was described.
    nvlinks: tuple[bool, ...] | None = None
    # Its last state of joining the fabric since it was described, without the fabric's health.
    fabric: Fabric | None = None
    counters: CounterHistory = msgspec.field(default_factory=CounterHistory)
    vanished_since: float | None = None  # Event loop time in seconds since which it is absent; None while it is present

    @property
    def named(self) -> bool:
        """Whether it has a uuid of its own rather than a made-up name."""
        return not is_placeholder(self.gpu.uuid)

    @property
    def pending(self) -> "Job[Any] | None":
        """The call about it whose result has not been processed yet."""
        return self.looking or self.registering

    def reached(self, now: float, timeout: float) -> bool:
        """Return whether its last call succeeded and no call has lasted `timeout` seconds since."""
        return self.handle is not None and (self.pending is None or now - self.pending.started < timeout)

    def reset(self) -> None:
        """Reset the state that depends on the opening of the driver."""
        self.handle, self.looking, self.registering, self.unsupported = None, None, None, frozenset()
        self.counting = None

    def update_description(self, handle: Handle, gpu: Gpu) -> None:
        """Store the driver's present description of the GPU, and its handle."""
        self.handle, self.gpu = handle, gpu
        self.nvlinks = self.fabric = None  # so that the next answer counts as a change: links may have been read before

    def set_out_of_reach(self, sample: Sample, now: float) -> LookResult:
        """Record that the GPU is out of reach according to this sample."""
        self.handle = None
        self.update_absence(sample, now)
        return LookResult(sample)

    def update_absence(self, sample: Sample, now: float) -> None:
        """Update since when the GPU is absent, from a sample at time `now` of the event loop."""
        if sample.fault is Fault.VANISHED:
            self.vanished_since = now if self.vanished_since is None else self.vanished_since
        elif sample.fault not in (Fault.DRIVER, Fault.HUNG):  # these do not show whether it is present
            self.vanished_since = None

    def store_look(self, found: Look, now: float) -> LookResult:
        """Store the result of a look at time `now` of the event loop."""
        if found.sample.fault:  # handles become invalid in a reset: the next look gets a new handle
            return self.set_out_of_reach(found.sample, now)
        new_handle = self.handle is None
        self.handle = found.handle
        self.unsupported |= found.unsupported
        self.counting = found.sample.counting
        self.update_absence(found.sample, now)
        before, was_enabled = self.gpu, self.gpu.mig_enabled
        if found.gpu is not before:  # the partition and the index may have changed during the look: keep them
            self.gpu = replace(
                found.gpu,
                index=before.index,
                mig_enabled=before.mig_enabled,
                mig_devices=before.mig_devices,
                mig_pending=before.mig_pending,
            )
        soon = self._take_partition(found)
        self.unanswered = self.unsupported
        sample = self.counters.confirmed(found.sample)
        return LookResult(
            sample,
            repartitioned=self.gpu is not before,
            links_changed=self.links_changed(found.sample),
            # A reset drops the registration. A reset also precedes a new handle, and switches the MIG mode.
            register_events=new_handle or self.gpu.mig_enabled != was_enabled,
            look_soon=soon or self.counters.doubtful,
        )

    def links_changed(self, seen: Sample) -> bool:
        """Store which NVLinks are active, and the state of joining the fabric. Return whether either changed."""
        before = self.nvlinks, self.fabric
        if seen.nvlinks is not None:
            self.nvlinks = seen.nvlinks
        if seen.fabric is not None:
            self.fabric = replace(seen.fabric, health_mask=0, summary=0)
        return (self.nvlinks, self.fabric) != before

    def _take_partition(self, found: Look) -> bool:
        """Store the partition that a look found. Return whether another look soon would settle a question."""
        self.partitionable = found.partitionable
        if found.partition_trouble and found.partition_trouble != self.partition_trouble:
            log.warning("GPU %s: its MIG devices cannot be read now: %s", self.gpu.uuid, found.partition_trouble)
        self.partition_trouble = found.partition_trouble
        partition = found.partition
        if partition is None:
            return False
        if partition.unreadable and not self.unreadable_looks:
            for index, why in partition.unreadable.items():
                log.warning("GPU %s: MIG device %d cannot be read: %s", self.gpu.uuid, index, why)
        self.unreadable_looks = self.unreadable_looks + 1 if partition.unreadable else 0
        gpu = with_partition(self.gpu, partition, hold=self.unreadable_looks < UNREADABLE_LOOKS)
        if gpu is self.gpu:
            return 0 < self.unreadable_looks < UNREADABLE_LOOKS
        self.unsupported = frozenset()  # a GPU refuses some values only while it is partitioned
        into = ", ".join(device.profile for device in gpu.mig_devices) or "no MIG devices"
        mode = f"MIG mode, partitioned into {into}" if gpu.mig_enabled else "MIG mode is off"
        if gpu.mig_pending is not None:
            mode += f"; MIG mode will be {'on' if gpu.mig_pending else 'off'} after a reset of the GPU"
        log.info("GPU %s: %s", gpu.uuid, mode)
        self.gpu = gpu
        return True


# Seconds that a request to release or resume GPUs waits: less than a command waits for the answer.
PATIENCE = 8.0

MAINTENANCE = "maintenance"  # the reason why a GPU that is released at the start cannot be read


class ReleaseError(Exception):
    """The driver's handles could not be closed yet; the text says why. They are closed as soon as the reason is gone."""


class Released(msgspec.Struct, frozen=True):
    """The GPUs that this process must not use: `every` GPU, or the GPUs with these uuids."""

    every: bool = False
    uuids: frozenset[str] = frozenset()

    @classmethod
    def of(cls, uuids: frozenset[str] | None) -> "Released":
        """Return a release of the GPUs with these uuids; None: of every GPU."""
        return cls(every=True) if uuids is None else cls(uuids=uuids)

    def __contains__(self, uuid: str) -> bool:
        return self.every or uuid in self.uuids

    def __bool__(self) -> bool:
        return self.every or bool(self.uuids)

    def covers(self, other: "Released") -> bool:
        """Return whether all GPUs released by `other` are released by this too."""
        return self.every or (not other.every and other.uuids <= self.uuids)

    def plus(self, uuids: frozenset[str] | None) -> "Released":
        """Return a release with these GPUs added; None: of every GPU."""
        return self if self.every else Released.of(None if uuids is None else self.uuids | uuids)

    def minus(self, uuids: frozenset[str] | None, known: Iterable[str]) -> "Released":
        """Return a release without these GPUs; None: of no GPU. `known` replaces `every` by the GPUs with these uuids."""
        if uuids is None:
            return Released()
        return Released(uuids=frozenset(known if self.every else self.uuids) - uuids)

    def leaves(self, gpus: Iterable[Gpu]) -> bool:
        """Return whether a GPU may be used and can be reached without affecting a released GPU."""
        return not self or (not self.every and any(gpu.pci_bus_id and gpu.uuid not in self.uuids for gpu in gpus))


# Openings of the driver for one binding: NVML always hides some GPUs, such as those excluded by a driver parameter
MAX_TRIES = 3

# Rounds from an opening that did not help to the next, and the factor by which each further wait is longer. Not a
# `Backoff`: this counts rounds rather than seconds, and ends after `MAX_TRIES`.
FIRST_WAIT = 6
WAIT_FACTOR = 4

_Binding = tuple[str, int]


class Bindings(msgspec.Struct):
    """The driver's bindings that the host reported last, by PCI bus id; empty if it does not report them."""

    bindings: Mapping[str, int] = msgspec.field(default_factory=dict)
    _found: Mapping[str, int] = msgspec.field(default_factory=dict)  # the bindings when the driver was opened last
    # For each binding the number of openings that did not help, and the first round for another opening.
    _tried: dict[_Binding, tuple[int, int]] = msgspec.field(default_factory=dict)

    def binding(self, gpu: Gpu) -> int | None:
        """Return the id of the driver's present binding to the GPU; None if it is not bound, or not reported."""
        return self.bindings.get(gpu.pci_bus_id.upper())

    def vanished(self, watched: Watched) -> bool:
        """Return whether the driver is no longer bound to the GPU.

        If the host never reported a binding of this GPU, it counts as unbound only if it is out of reach and the host reports
        bindings of other GPUs.
        """
        if not watched.gpu.pci_bus_id or self.binding(watched.gpu) is not None:
            return False
        return watched.binding is not None or (bool(self.bindings) and watched.handle is None)

    def due_bus_ids(self, gpus: Sequence[Watched], now: int) -> tuple[str, ...]:
        """Return the PCI bus ids that are reasons to open the driver again in round `now`."""
        due, tried = [], {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.bindings[bus_id])
            tries, at = self._tried.get(key, (0, now))
            if tries:
                tried[key] = (tries, at)
            new = gpu is None or tries or self._found.get(bus_id) != self.bindings[bus_id]
            if new and tries < MAX_TRIES and now >= at:
                due.append(bus_id)
        self._tried = tried  # drops bindings whose GPU answers now
        return tuple(due)

    def opened(self, gpus: Sequence[Watched], now: int) -> None:
        """Record that the driver was opened in round `now` with the present bindings, and found these GPUs."""
        tried: dict[_Binding, tuple[int, int]] = {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.bindings[bus_id])
            tries, _ = self._tried.get(key, (0, 0))
            # A lost GPU is a reason to open the driver again only if it was bound again since the last opening.
            if gpu is None or tries or (self._found and self._found.get(bus_id) != self.bindings[bus_id]):
                tried[key] = (tries + 1, now + FIRST_WAIT * WAIT_FACTOR**tries)
        self._tried, self._found = tried, dict(self.bindings)

    def _open_questions(self, gpus: Sequence[Watched]) -> Iterable[tuple[str, Watched | None]]:
        """Return bound PCI bus ids without a known GPU (None), or whose GPU is out of reach although it is bound."""
        by_bus = {watched.gpu.pci_bus_id.upper(): watched for watched in gpus if watched.gpu.pci_bus_id}
        strangers = [bus_id for bus_id in self.bindings if bus_id not in by_bus]
        nameless = sum(not watched.gpu.pci_bus_id for watched in gpus)
        if len(strangers) > nameless:  # else they may belong to the GPUs without a known bus id
            yield from ((bus_id, None) for bus_id in strangers)
        for bus_id, watched in by_bus.items():
            out = watched.handle is None and watched.pending is None
            if out and watched.asked_under is not None and watched.asked_under == self.bindings.get(bus_id):
                yield bus_id, watched


class Roster(msgspec.Struct):
    """State that the monitor's parts share. `wanted`: GPUs to release. `untouched`: GPUs without a handle in this opening."""

    wanted: Released
    untouched: Released = msgspec.field(default_factory=Released)
    gpus: list[Watched] = msgspec.field(default_factory=list)
    # The uuid for each handle of this opening of the driver: an event may have a handle that is not the newest.
    by_handle: dict[Handle, str] = msgspec.field(default_factory=dict)
    bus: Bindings = msgspec.field(default_factory=Bindings)

    def is_released(self, uuid: str) -> bool:
        """Return whether a GPU is released or not resumed yet: the driver is not asked about it, nothing is reported."""
        return uuid in self.wanted or uuid in self.untouched

    def watched(self) -> list[Watched]:
        """Return the GPUs that are not released."""
        return [watched for watched in self.gpus if not self.is_released(watched.gpu.uuid)]

    @property
    def in_use(self) -> bool:
        """Whether a GPU should be reached through the driver; if not, the driver should be closed."""
        return self.wanted.leaves(watched.gpu for watched in self.gpus)

    def owner(self, uuid: str) -> str:
        """Return the uuid of the GPU with this uuid, or with a MIG device of this uuid; empty if no GPU has it."""
        for watched in self.gpus:
            if watched.gpu.uuid == uuid or any(device.uuid == uuid for device in watched.gpu.mig_devices):
                return watched.gpu.uuid
        return ""

    def note_handles(self) -> None:
        """Record the present handles of the GPUs."""
        self.by_handle |= {watched.handle: watched.gpu.uuid for watched in self.gpus if watched.handle is not None}

    def reset(self) -> None:
        """Reset the state that depends on the opening of the driver; the next opening leaves the released GPUs alone."""
        self.untouched = self.wanted
        self.by_handle.clear()
        for watched in self.gpus:
            watched.reset()
