"""The ledger's record of one GPU: facts, MIG devices, latches, and the surroundings of its observations."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpu_plugin.devices.nvml_h import FabricState
from gpu_plugin.health.evidence import BACKGROUND, Background, marks_news, news
from gpu_plugin.health.latch import UNMARKED, AnyLatch, Latch, LatchKey, Marks, Recovery
from gpu_plugin.health.observation import Facts, Observation, Order, Sample, XidEvent
from gpu_plugin.health.signals import first_look

REMEMBER_XIDS = 600.0
"""Seconds for which the Xids of a GPU are remembered, for signals that tell a cause from what follows it."""

_MANY_XIDS = 64  # from which on old ones are forgotten
_STORM = 1.0  # seconds within which another of a number is no news

MigUuids = Mapping[tuple[int, int], str]
"""Uuids of a GPU's MIG devices by GPU instance and compute instance."""

Changed = dict[LatchKey, AnyLatch | None]
"""The former states of the latches that were changed."""


class GpuRecord(msgspec.Struct):
    """The state of one GPU. Times are in seconds of Unix time.

    Methods that take something in return whether that is worth writing down.
    """

    facts: Facts
    mig_devices: MigUuids = msgspec.field(default_factory=dict)
    latches: dict[LatchKey, AnyLatch] = msgspec.field(default_factory=dict)
    unseen: AnyLatch | None = msgspec.field(default_factory=first_look.unseen)
    marks: Marks = UNMARKED
    recalled: bool = False
    """Whether the marks are of an earlier process: no good look has come since."""
    action: int | None = None
    """What the driver said last that it asks for (`Sample.recovery_action`); None: nothing yet."""
    xids: dict[tuple[int, str], float] = msgspec.field(default_factory=dict)
    joined: bool = False
    """Whether it had joined an NVLink fabric when it reported its fabric last."""

    def put(self, key: LatchKey, latch: AnyLatch | None, changed: Changed) -> bool:
        """Replaces or (None) removes a latch; `changed` gets what it was before."""
        known = self.latches.get(key)
        if latch is known:
            return False
        changed.setdefault(key, known)
        if latch is None:
            del self.latches[key]
        else:
            self.latches[key] = latch
        return news(known) != news(latch)

    def take_xid(self, number: int, devices: Iterable[str], now: float) -> bool:
        """Takes down that an Xid of these MIG devices ("" for the whole GPU) came now.

        Once there are many, those of long ago are forgotten.
        """
        worth = any(not 0 <= now - self.xids.get((number, device), -REMEMBER_XIDS) < _STORM for device in devices)
        for device in devices:
            self.xids[number, device] = now
        if len(self.xids) > _MANY_XIDS:
            for key in [key for key, at in self.xids.items() if now - at > REMEMBER_XIDS]:
                del self.xids[key]
        return worth

    def look(self, seen: Sample, now: float) -> bool:
        """Takes in whether this look is the first one that did not fail; else the GPU stays unseen."""
        if self.unseen is None:
            return False
        self.unseen = first_look.unseen(seen.detail, self.unseen.since or now) if seen.failed else None
        return self.unseen is None

    def note(self, seen: Observation, now: float) -> bool:
        """Remembers what the signals will be told with later observations."""
        before = self.marks, self.action
        if isinstance(seen, Sample):
            if seen.fabric is not None:
                self.joined = seen.fabric.state == FabricState.COMPLETED
            self.marks = self.marks.sure(seen, now)
            self.recalled = self.recalled and not seen.core_answered
            if not seen.fault and seen.asked_for("recovery_action"):
                self.action = seen.recovery_action
        elif isinstance(seen, Order) and seen.verb == "resume":
            # What was done meanwhile proves something for what was open before, and nothing for what comes
            self.marks, self.action = UNMARKED, None
        marks, action = before
        return action != self.action or (marks is not self.marks and marks_news(marks) != marks_news(self.marks))

    def aimed(self, seen: XidEvent, *, whole_gpu: bool) -> tuple[str, ...]:
        """The MIG devices that an Xid is about, "" for the whole GPU, as all are of an Xid that is the `whole_gpu`'s trouble.

        What names a GPU instance that is none of ours is the whole GPU's; what names a strange compute instance of one of
        ours is all of that GPU instance's.
        """
        if seen.gpu_instance is None or whole_gpu:
            return ("",)
        inside = {at: uuid for (instance, at), uuid in self.mig_devices.items() if instance == seen.gpu_instance}
        if seen.compute_instance in inside:
            return (inside[seen.compute_instance],)
        return tuple(inside.values()) or ("",)

    def written(self) -> Iterator[tuple[LatchKey, AnyLatch]]:
        """Latches to be written down, in a stable order; the first, of verdict OK, has the marks and the action."""
        if self.marks != UNMARKED or self.action is not None:
            yield BACKGROUND, Latch(Background(self.action), recovery=Recovery(self.marks))
        yield from sorted(self.latches.items(), key=lambda item: item[0])

    def recall(self, written: Latch[Background]) -> None:
        """Takes marks and action as an earlier process wrote them down, where none are known yet."""
        if self.marks == UNMARKED:
            self.marks, self.recalled = written.recovery.marks, True
        self.action = written.memory.action if self.action is None else self.action
