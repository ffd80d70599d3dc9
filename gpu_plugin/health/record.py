"""What the ledger knows of one GPU: facts, MIG devices, latches, and what signals are told beside an observation."""

from collections.abc import Iterable, Mapping

import msgspec

from gpu_plugin.health import background
from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import UNMARKED, AnyLatch, LatchKey, Marks
from gpu_plugin.health.signals import first_look

REMEMBER_XIDS = 600.0
"""Seconds for which the Xids of a GPU are remembered, for signals that tell a cause from what follows it."""

_MANY_XIDS, _STORM = 64, 1.0
"""Xids from which on old ones are forgotten; seconds within which another of a number is no news."""

MigUuids = Mapping[tuple[int, int], str]
"""Uuids of a GPU's MIG devices by GPU instance and compute instance."""


class GpuRecord(msgspec.Struct):
    """What is known of one GPU. Times are in seconds of Unix time."""

    facts: Facts
    slices: MigUuids = msgspec.field(default_factory=dict)
    devices: frozenset[str] = frozenset()
    latches: dict[LatchKey, AnyLatch] = msgspec.field(default_factory=dict)
    unseen: AnyLatch | None = msgspec.field(default_factory=first_look.unseen)
    marks: Marks = UNMARKED
    recalled: bool = False
    """Whether the marks are of an earlier process: no good look has come since."""
    action: int | None = None
    xids: dict[tuple[int, str], float] = msgspec.field(default_factory=dict)

    def take(self, number: int, devices: Iterable[str], now: float) -> bool:
        """Takes down that an Xid of these MIG devices ("" for the whole GPU) came now. Returns whether that is news.

        Once there are many, those of long ago are forgotten.
        """
        news = any(not 0 <= now - self.xids.get((number, device), -REMEMBER_XIDS) < _STORM for device in devices)
        for device in devices:
            self.xids[number, device] = now
        if len(self.xids) > _MANY_XIDS:
            for key in [key for key, at in self.xids.items() if now - at > REMEMBER_XIDS]:
                del self.xids[key]
        return news

    def background(self) -> tuple[tuple[LatchKey, AnyLatch], ...]:
        """What of it is evidence and no signal's: marks and the recovery action that it asks for."""
        latch = background.written(self.marks, self.action)
        return () if latch is None else ((background.KEY, latch),)
