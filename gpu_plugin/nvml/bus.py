"""What the host tells of the NVIDIA driver's bindings, and what follows from it. Does no I/O; time is counted in rounds.

NVML finds GPUs when it is opened and never again: one that the driver was bound to since, or bound to anew, is found by
opening it once more. A GPU that the driver is not bound to is not there for anyone.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.watched import Watched

MAX_TRIES = 3
"""Openings that a binding is worth: NVML hides some GPUs for good, such as those excluded by a parameter of the driver."""

FIRST_WAIT, LONGER = 6, 4
"""Rounds from an opening that did not help to the next, and how many times longer each wait is than the one before."""

_Binding = tuple[str, int]


class Bus(msgspec.Struct):
    """The bindings as the host told them last, by PCI bus id; none where it does not tell any."""

    told: Mapping[str, int] = msgspec.field(default_factory=dict)
    _found: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Those of when the driver was opened last."""
    _tried: dict[_Binding, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Openings in vain for each, and the round as of which the next one makes sense."""

    def binding(self, gpu: Gpu) -> int | None:
        """What tells this binding of the driver to the GPU from any other; None where there is none, or none is told."""
        return self.told.get(gpu.pci_bus_id.upper())

    def vanished(self, watched: Watched) -> bool:
        """Whether the driver is not bound to the GPU any more.

        A host that never told of this GPU is believed only about one that is out of reach, and if it tells of others.
        """
        if not watched.gpu.pci_bus_id or self.binding(watched.gpu) is not None:
            return False
        return watched.binding is not None or (bool(self.told) and watched.handle is None)

    def news(self, gpus: Sequence[Watched], now: int) -> tuple[str, ...]:
        """Bus ids for whose sake the driver should be opened anew in round `now`."""
        due, tried = [], {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.told[bus_id])
            tries, at = self._tried.get(key, (0, now))
            if tries:
                tried[key] = (tries, at)
            new = gpu is None or tries or self._found.get(bus_id) != self.told[bus_id]
            if new and tries < MAX_TRIES and now >= at:
                due.append(bus_id)
        self._tried = tried  # what answers by now is no open question any more
        return tuple(due)

    def opened(self, gpus: Sequence[Watched], now: int) -> None:
        """The driver was opened in round `now`, with the bindings as told last, and found these GPUs."""
        tried: dict[_Binding, tuple[int, int]] = {}
        for bus_id, gpu in self._open_questions(gpus):
            key = (bus_id, self.told[bus_id])
            tries, _ = self._tried.get(key, (0, 0))
            # One that is lost is no reason to open the driver again, unless it was bound anew since the last time.
            if gpu is None or tries or (self._found and self._found.get(bus_id) != self.told[bus_id]):
                tried[key] = (tries + 1, now + FIRST_WAIT * LONGER**tries)
        self._tried, self._found = tried, dict(self.told)

    def _open_questions(self, gpus: Sequence[Watched]) -> Iterable[tuple[str, Watched | None]]:
        """Bus ids that the driver is bound to and that are of no GPU known (None), or of one out of reach even so."""
        by_bus = {watched.gpu.pci_bus_id.upper(): watched for watched in gpus if watched.gpu.pci_bus_id}
        strangers = [bus_id for bus_id in self.told if bus_id not in by_bus]
        nameless = sum(not watched.gpu.pci_bus_id for watched in gpus)
        if len(strangers) > nameless:  # else they are of those that do not say theirs
            yield from ((bus_id, None) for bus_id in strangers)
        for bus_id, watched in by_bus.items():
            out = watched.handle is None and watched.pending is None
            if out and watched.asked_under is not None and watched.asked_under == self.told.get(bus_id):
                yield bus_id, watched
