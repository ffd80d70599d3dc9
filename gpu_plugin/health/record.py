"""The ledger's record of one GPU: facts, MIG devices, latches, and the surroundings of its observations."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpu_plugin.devices.nvml_h import FabricState
from gpu_plugin.health.evidence import BACKGROUND, Background, stored_marks, stored_parts
from gpu_plugin.health.latch import UNMARKED, AnyLatch, Latch, LatchKey, Marks, Recovery
from gpu_plugin.health.observation import Facts, Observation, Order, Sample, XidEvent
from gpu_plugin.health.signals import first_look

# Seconds for which the Xids of a GPU are kept, for signals that distinguish a cause from its consequences
REMEMBER_XIDS = 600.0

_MANY_XIDS = 64  # from this number on, old ones are dropped
_STORM = 1.0  # seconds within which another Xid of the same number is not stored

MigUuids = Mapping[tuple[int, int], str]  # Uuids of a GPU's MIG devices by GPU instance and compute instance

Changed = dict[LatchKey, AnyLatch | None]  # The former states of the latches that were changed


class GpuRecord(msgspec.Struct):
    """The state of one GPU. Times are in seconds of Unix time.

    Update methods return True if the change must be stored.
    """

    facts: Facts
    mig_devices: MigUuids = msgspec.field(default_factory=dict)
    latches: dict[LatchKey, AnyLatch] = msgspec.field(default_factory=dict)
    unseen: AnyLatch | None = msgspec.field(default_factory=first_look.unseen)
    marks: Marks = UNMARKED
    recalled: bool = False  # True if the marks are of an earlier process, because there was no good look since
    # The latest recovery action that the driver reported (`Sample.recovery_action`), None before the first.
    action: int | None = None
    xids: dict[tuple[int, str], float] = msgspec.field(default_factory=dict)
    joined: bool = False  # True if it had joined an NVLink fabric when it last reported its fabric

    def put(self, key: LatchKey, latch: AnyLatch | None, changed: Changed) -> bool:
        """Replace a latch, or remove it (None). `changed` gets the latch of before."""
        known = self.latches.get(key)
        if latch is known:
            return False
        changed.setdefault(key, known)
        if latch is None:
            del self.latches[key]
        else:
            self.latches[key] = latch
        return stored_parts(known) != stored_parts(latch)

    def note_xid(self, number: int, devices: Iterable[str], now: float) -> bool:
        """Record the time of an Xid of these MIG devices ("" for the whole GPU). Once there are many, old ones are dropped."""
        must_store = any(not 0 <= now - self.xids.get((number, device), -REMEMBER_XIDS) < _STORM for device in devices)
        for device in devices:
            self.xids[number, device] = now
        if len(self.xids) > _MANY_XIDS:
            for key in [key for key, at in self.xids.items() if now - at > REMEMBER_XIDS]:
                del self.xids[key]
        return must_store

    def look(self, seen: Sample, now: float) -> bool:
        """Update `unseen`: the GPU stays unseen until the first look that does not fail."""
        if self.unseen is None:
            return False
        self.unseen = first_look.unseen(seen.detail, self.unseen.since or now) if seen.failed else None
        return self.unseen is None

    def note(self, seen: Observation, now: float) -> bool:
        """Update the state that signals get with later observations: marks, recovery action and fabric."""
        before = self.marks, self.action
        if isinstance(seen, Sample):
            if seen.fabric is not None:
                self.joined = seen.fabric.state == FabricState.COMPLETED
            self.marks = self.marks.sure(seen, now)
            self.recalled = self.recalled and not seen.core_answered
            if not seen.fault and seen.asked_for("recovery_action"):
                self.action = seen.recovery_action
        elif isinstance(seen, Order) and seen.verb == "resume":
            # A reset during the release proves the end of earlier faults, and nothing about later ones
            self.marks, self.action = UNMARKED, None
        marks, action = before
        return action != self.action or (marks is not self.marks and stored_marks(marks) != stored_marks(self.marks))

    def aimed(self, seen: XidEvent, *, whole_gpu: bool) -> tuple[str, ...]:
        """Return the MIG devices that an Xid concerns; "" for the whole GPU, also if the policy says `whole_gpu` of the Xid.

        An unknown GPU instance refers to the whole GPU, and an unknown compute instance to all devices of its GPU instance.
        """
        if seen.gpu_instance is None or whole_gpu:
            return ("",)
        inside = {at: uuid for (instance, at), uuid in self.mig_devices.items() if instance == seen.gpu_instance}
        if seen.compute_instance in inside:
            return (inside[seen.compute_instance],)
        return tuple(inside.values()) or ("",)

    def written(self) -> Iterator[tuple[LatchKey, AnyLatch]]:
        """Yield the latches to store, in a stable order. The first has verdict OK, the marks and the recovery action."""
        if self.marks != UNMARKED or self.action is not None:
            yield BACKGROUND, Latch(Background(self.action), recovery=Recovery(self.marks))
        yield from sorted(self.latches.items(), key=lambda item: item[0])

    def recall(self, written: Latch[Background]) -> None:
        """Restore marks and recovery action that an earlier process stored, unless this process has read its own."""
        if self.marks == UNMARKED:
            self.marks, self.recalled = written.recovery.marks, True
        self.action = written.memory.action if self.action is None else self.action
