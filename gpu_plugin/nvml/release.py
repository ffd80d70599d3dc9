"""GPUs released for maintenance: a reset or a driver upgrade needs that nobody holds a handle of them."""

from collections.abc import Iterable

import msgspec

from gpu_plugin.devices.node import Gpu

PATIENCE = 8.0
"""Seconds that whoever releases or resumes GPUs is kept waiting: less than a command waits for its answer."""

MAINTENANCE = "maintenance"
"""Why a GPU that is released when we start cannot be read."""


class ReleaseError(Exception):
    """The driver's handles could not be dropped yet; the text says what holds them. They are dropped once that is over."""


class Released(msgspec.Struct, frozen=True):
    """Which GPUs nobody here may touch: `every` one, or those of these uuids."""

    every: bool = False
    uuids: frozenset[str] = frozenset()

    @classmethod
    def of(cls, uuids: frozenset[str] | None) -> "Released":
        """Those GPUs; None: all."""
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
