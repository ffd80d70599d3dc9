"""The GPUs that are watched: their handles, which of them are released, and what the driver is bound to.

NVML finds GPUs when it is opened and never again: one that the driver was bound to since, or bound to again, is found by
opening it once more. A GPU that the driver is not bound to is not there for anyone. Does no I/O; time is counted in rounds.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.watched import Watched

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
"""Rounds from an opening that did not help to the next, and how many times longer each wait is than the one before."""

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
