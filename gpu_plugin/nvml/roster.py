"""The GPUs that are watched: what is kept of each, their handles, which are released, and what the driver is bound to.

NVML finds GPUs when it is opened and never again: one that the driver was bound to since, or bound to again, is found by
opening it once more. A GPU that the driver is not bound to is not there for anyone. Does no I/O; time is counted in rounds.
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

Probed = tuple[Handle, Gpu]  # what a probe brought: the handle that was got again, and the GPU as it describes itself


class LookResult(msgspec.Struct, frozen=True):
    """What a GPU's turn found.

    `sample` is None while a call is under way that has not been out for too long, and where the GPU was described instead.
    """

    sample: Sample | None = None
    repartitioned: bool = False  # it is repartitioned: there may be other device nodes
    links_changed: bool = False  # the links between GPUs are to be read again
    register_events: bool = False
    """It is reached through a new handle, or was reset: what it was asked to report is asked for again."""
    look_soon: bool = False  # another look within a second would settle something


class Watched(msgspec.Struct):
    """A GPU with its handle (None: out of reach) and the call about it that is under way: `looking` or `registering`."""

    gpu: Gpu
    handle: Handle | None
    looking: "Job[Look] | Job[Probed] | None" = None
    registering: "Job[Registered] | None" = None
    turn: int = 0  # looks that were begun, by which it is told which of them are full
    counting: int | None = None  # the last word on which counters can be compared (`Sample.counting`)
    partitionable: bool = True
    """Whether it can be partitioned into MIG devices, as far as is known: a part that never can is not asked again."""
    unreadable_looks: int = 0  # looks in a row in which a MIG device of it was unreadable
    partition_trouble: str = ""  # why the last look did not tell how it is partitioned, said once
    unsupported: frozenset[str] = frozenset()
    """Fields of a Sample that it never answers, learnt since it was described: not asked for again."""
    unanswered: frozenset[str] | None = None
    """The same for whoever asks what it tells: kept while it cannot be looked at; None before the first look at it."""
    binding: int | None = None  # the last binding that the host told of it
    asked_under: int | None = None  # the binding as of when the driver was asked about it last
    # Which of its NVLinks were active when it last said so, since it was described.
    nvlinks: tuple[bool, ...] | None = None
    # Likewise how far it had come in joining its fabric, without regard to how sound that is.
    fabric: Fabric | None = None
    counters: CounterHistory = msgspec.field(default_factory=CounterHistory)
    vanished_since: float | None = None
    """Since when it is not there any more, in seconds of the event loop's clock; None while it is."""

    @property
    def named(self) -> bool:
        """Whether it goes by a uuid of its own."""
        return not is_placeholder(self.gpu.uuid)

    @property
    def pending(self) -> "Job[Any] | None":
        """The call about it that was begun and whose outcome has not been taken in."""
        return self.looking or self.registering

    def reached(self, now: float, timeout: float) -> bool:
        """Whether it answered the last time, and has not let a call wait for `timeout` seconds since."""
        return self.handle is not None and (self.pending is None or now - self.pending.started < timeout)

    def forget(self) -> None:
        """Gives up what does not outlive a driver that is closed."""
        self.handle, self.looking, self.registering, self.unsupported = None, None, None, frozenset()
        self.counting = None

    def described(self, handle: Handle, gpu: Gpu) -> None:
        """Takes in how the driver describes it now, and through which handle it is reached."""
        self.handle, self.gpu = handle, gpu
        self.nvlinks = self.fabric = None  # whatever it says next, the links may have been read before that was so

    def saw(self, sample: Sample, now: float) -> LookResult:
        """Takes in that there is nothing to be had of it but this sample, by which it is out of reach."""
        self.handle = None
        self.dated(sample, now)
        return LookResult(sample)

    def dated(self, sample: Sample, now: float) -> None:
        """Takes in what a sample says of whether it is there, at time `now` of the event loop."""
        if sample.fault is Fault.VANISHED:
            self.vanished_since = now if self.vanished_since is None else self.vanished_since
        elif sample.fault not in (Fault.DRIVER, Fault.HUNG):  # which say nothing of whether it is there
            self.vanished_since = None

    def looked(self, found: Look, now: float) -> LookResult:
        """Takes in what a look brought at time `now` of the event loop."""
        if found.sample.fault:  # handles from before a reset are worth nothing: the next look asks for a new one
            return self.saw(found.sample, now)
        new_handle = self.handle is None
        self.handle = found.handle
        self.unsupported |= found.unsupported
        self.counting = found.sample.counting
        self.dated(found.sample, now)
        before, was_enabled = self.gpu, self.gpu.mig_enabled
        if found.gpu is not before:  # its partition or its index may have come from elsewhere meanwhile
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
            # A registration does not survive the reset that a new handle may come from, or that the MIG mode is switched by.
            register_events=new_handle or self.gpu.mig_enabled != was_enabled,
            look_soon=soon or self.counters.doubtful,
        )

    def links_changed(self, seen: Sample) -> bool:
        """Takes in which NVLinks are active, and how far it has joined its fabric. Returns whether that is news."""
        before = self.nvlinks, self.fabric
        if seen.nvlinks is not None:
            self.nvlinks = seen.nvlinks
        if seen.fabric is not None:
            self.fabric = replace(seen.fabric, health_mask=0, summary=0)
        return (self.nvlinks, self.fabric) != before

    def _take_partition(self, found: Look) -> bool:
        """Takes in how a look found the GPU to be partitioned. Returns whether another look soon would settle something."""
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
        self.unsupported = frozenset()  # some questions go unanswered while a GPU is partitioned, and only then
        into = ", ".join(device.profile for device in gpu.mig_devices) or "no MIG devices"
        mode = f"MIG mode, partitioned into {into}" if gpu.mig_enabled else "MIG mode is off"
        if gpu.mig_pending is not None:
            mode += f"; MIG mode will be {'on' if gpu.mig_pending else 'off'} after a reset of the GPU"
        log.info("GPU %s: %s", gpu.uuid, mode)
        self.gpu = gpu
        return True


# Seconds that whoever releases or resumes GPUs is kept waiting: less than a command waits for its answer.
PATIENCE = 8.0

MAINTENANCE = "maintenance"  # why a GPU that is released when we start cannot be read


class ReleaseError(Exception):
    """The driver's handles could not be dropped yet; the text says what holds them. They are dropped once that is over."""


class Released(msgspec.Struct, frozen=True):
    """Which GPUs nobody here may touch: `every` one, or those of these uuids."""

    every: bool = False
    uuids: frozenset[str] = frozenset()

    @classmethod
    def of(cls, uuids: frozenset[str] | None) -> "Released":
        """The release of the GPUs with these uuids; None: of every GPU."""
        return cls(every=True) if uuids is None else cls(uuids=uuids)

    def __contains__(self, uuid: str) -> bool:
        return self.every or uuid in self.uuids

    def __bool__(self) -> bool:
        return self.every or bool(self.uuids)

    def covers(self, other: "Released") -> bool:
        """Whether whatever is released by `other` is released here."""
        return self.every or (not other.every and other.uuids <= self.uuids)

    def plus(self, uuids: frozenset[str] | None) -> "Released":
        """With those as well; None: with all."""
        return self if self.every else Released.of(None if uuids is None else self.uuids | uuids)

    def minus(self, uuids: frozenset[str] | None, known: Iterable[str]) -> "Released":
        """Without those; None: without any. Where every GPU was released, those `known` are what remains."""
        if uuids is None:
            return Released()
        return Released(uuids=frozenset(known if self.every else self.uuids) - uuids)

    def leaves(self, gpus: Iterable[Gpu]) -> bool:
        """Whether there is a GPU that may be touched, and that can be reached without touching another."""
        return not self or (not self.every and any(gpu.pci_bus_id and gpu.uuid not in self.uuids for gpu in gpus))


MAX_TRIES = 3
"""Openings that a binding is worth: NVML hides some GPUs for good, such as those excluded by a parameter of the driver."""

FIRST_WAIT = 6
WAIT_FACTOR = 4
"""Rounds from an opening that did not help to the next, and how many times longer each wait is than the one before. No `Backoff`:
it counts rounds rather than seconds, and ends after `MAX_TRIES`."""

_Binding = tuple[str, int]


class Bindings(msgspec.Struct):
    """The bindings as the host told them last, by PCI bus id; none where it does not tell any."""

    bindings: Mapping[str, int] = msgspec.field(default_factory=dict)
    _found: Mapping[str, int] = msgspec.field(default_factory=dict)  # those of when the driver was opened last
    _tried: dict[_Binding, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Openings in vain for each, and the round as of which the next one makes sense."""

    def binding(self, gpu: Gpu) -> int | None:
        """What tells this binding of the driver to the GPU from any other; None where there is none, or none is told."""
        return self.bindings.get(gpu.pci_bus_id.upper())

    def vanished(self, watched: Watched) -> bool:
        """Whether the driver is not bound to the GPU any more.

        A host that never told of this GPU is believed only about one that is out of reach, and if it tells of others.
        """
        if not watched.gpu.pci_bus_id or self.binding(watched.gpu) is not None:
            return False
        return watched.binding is not None or (bool(self.bindings) and watched.handle is None)

    def news(self, gpus: Sequence[Watched], now: int) -> tuple[str, ...]:
        """Bus ids for whose sake the driver should be opened again in round `now`."""
        due, tried = [], {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.bindings[bus_id])
            tries, at = self._tried.get(key, (0, now))
            if tries:
                tried[key] = (tries, at)
            new = gpu is None or tries or self._found.get(bus_id) != self.bindings[bus_id]
            if new and tries < MAX_TRIES and now >= at:
                due.append(bus_id)
        self._tried = tried  # what answers by now is no open question any more
        return tuple(due)

    def opened(self, gpus: Sequence[Watched], now: int) -> None:
        """The driver was opened in round `now`, with the bindings as told last, and found these GPUs."""
        tried: dict[_Binding, tuple[int, int]] = {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.bindings[bus_id])
            tries, _ = self._tried.get(key, (0, 0))
            # One that is lost is no reason to open the driver again, unless it was bound again since the last time.
            if gpu is None or tries or (self._found and self._found.get(bus_id) != self.bindings[bus_id]):
                tried[key] = (tries + 1, now + FIRST_WAIT * WAIT_FACTOR**tries)
        self._tried, self._found = tried, dict(self.bindings)

    def _open_questions(self, gpus: Sequence[Watched]) -> Iterable[tuple[str, Watched | None]]:
        """Bus ids that the driver is bound to and that are of no GPU known (None), or of one out of reach even so."""
        by_bus = {watched.gpu.pci_bus_id.upper(): watched for watched in gpus if watched.gpu.pci_bus_id}
        strangers = [bus_id for bus_id in self.bindings if bus_id not in by_bus]
        nameless = sum(not watched.gpu.pci_bus_id for watched in gpus)
        if len(strangers) > nameless:  # else they are of those that do not say theirs
            yield from ((bus_id, None) for bus_id in strangers)
        for bus_id, watched in by_bus.items():
            out = watched.handle is None and watched.pending is None
            if out and watched.asked_under is not None and watched.asked_under == self.bindings.get(bus_id):
                yield bus_id, watched


class Roster(msgspec.Struct):
    """What the parts of the monitor share. `wanted` is released, `untouched` what the open driver has no handle of."""

    wanted: Released
    untouched: Released = msgspec.field(default_factory=Released)
    gpus: list[Watched] = msgspec.field(default_factory=list)
    by_handle: dict[Handle, str] = msgspec.field(default_factory=dict)
    """Uuids by every handle of this opening of the driver: an event may name one that is not the newest."""
    bus: Bindings = msgspec.field(default_factory=Bindings)

    def is_released(self, uuid: str) -> bool:
        """Whether a GPU is released, or not resumed yet: neither is it asked anything, nor is anything told of it."""
        return uuid in self.wanted or uuid in self.untouched

    def watched(self) -> list[Watched]:
        """The GPUs that are asked, and told of, now."""
        return [watched for watched in self.gpus if not self.is_released(watched.gpu.uuid)]

    @property
    def in_use(self) -> bool:
        """Whether there is a GPU to be reached through the driver: else nobody is to have it open."""
        return self.wanted.leaves(watched.gpu for watched in self.gpus)

    def owner(self, uuid: str) -> str:
        """The uuid of the GPU that goes by it, or that has a MIG device which does; empty if none."""
        for watched in self.gpus:
            if watched.gpu.uuid == uuid or any(device.uuid == uuid for device in watched.gpu.mig_devices):
                return watched.gpu.uuid
        return ""

    def note_handles(self) -> None:
        """Takes note of the handles that GPUs have now."""
        self.by_handle |= {watched.handle: watched.gpu.uuid for watched in self.gpus if watched.handle is not None}

    def forget(self) -> None:
        """Gives up what does not outlive a driver that is closed: what comes next leaves alone what is released now."""
        self.untouched = self.wanted
        self.by_handle.clear()
        for watched in self.gpus:
            watched.forget()
