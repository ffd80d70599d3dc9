"""The health of every GPU of a node: latches by GPU and signal, and the evidence that must outlive this process."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gpu_plugin.health.evidence import BACKGROUND, Evidence
from gpu_plugin.health.latch import UNMARKED, AnyLatch, Health, LatchKey, Proof, Recovery, Transition, Verdict
from gpu_plugin.health.observation import DriverEvent, Facts, Observation, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.record import Changed, GpuRecord, MigUuids
from gpu_plugin.health.signal import Context
from gpu_plugin.health.signals import (
    SIGNALS,
    SignalKind,
    advice,
    application_errors,
    first_look,
    flapping,
    shown,
    standing,
    xid,
)

_FIRST_LOOK = LatchKey(first_look.NAME)
_WHOLE = LatchKey("")
_UNWATCHED = GpuRecord(Facts(), unseen=None)  # the record of every unknown GPU; never changed


class HealthLedger:
    """Updates latches from observations, and returns the reasons why a GPU or a MIG device is not fit for use.

    Health is the worst verdict of the open latches, not the verdict of the latest observation. An observation of a GPU affects
    no other GPU, except that a GPU without an NVLink fabric is compared with GPUs that have joined a fabric. A latch of a GPU
    applies to all its MIG devices and replicas, a latch of a MIG device only to that device. Once the MIG device is gone, its
    latches apply to the whole GPU until they close, because partitioning a GPU again repairs nothing.

    A watched GPU is unfit until its first good sample, also without an open latch (`first_look`).
    """

    def __init__(self, policy: HealthPolicy, boot_id: str = "", zero: float | None = None) -> None:
        """Create a ledger.

        Args:
            policy: the rules by which evidence is judged.
            boot_id: the boot of the node.
            zero: the Unix time at which the clock of that boot read 0, by the present wall clock. None: the wall clock was not
                corrected since earlier processes.
        """
        self.policy = policy
        self.boot_id = boot_id
        self.zero = zero
        self.revision = 0
        """Grows when evidence changed that must outlive the process: a verdict, its words, or the progress of a recovery."""
        self._records: dict[str, GpuRecord] = {}
        self._withheld = ""

    def withhold(self, why: str) -> None:
        """Withhold each GPU that the ledger begins to watch after this call. No look releases these GPUs.

        This is for a ledger that could not read the evidence of earlier processes. `why` is the reason, for people.
        """
        self._withheld = why

    def watch(self, uuid: str, facts: Facts, mig_devices: MigUuids | None = None) -> None:
        """Start to watch a GPU, or replace the facts and MIG devices of a watched GPU. Its latches stay."""
        record = self._records.setdefault(uuid, GpuRecord(facts, unseen=self._unseen()))
        record.facts = facts
        record.mig_devices = mig_devices or {}

    def observe(self, uuid: str, seen: Observation, now: float) -> tuple[Transition, ...]:
        """Update the latches of a watched GPU after an observation at Unix time `now`. Return the verdicts that changed."""
        record = self._records.get(uuid)
        if record is None:
            return ()
        changed: Changed = {}
        # The GPU may have been reset between the marks of an earlier process and this event
        marks = UNMARKED if record.recalled and not isinstance(seen, Sample) else record.marks
        aimed: tuple[str, ...] = ()
        if isinstance(seen, XidEvent):
            aimed = record.aimed(seen, whole_gpu=self.policy.xids.judge(seen.xid).whole_gpu)
            # Other Xids are judged by the time of the last one, to the second
            self.revision += record.note_xid(seen.xid, aimed, now) and seen.xid in self.policy.xids.companions
        ctx = Context(
            now,
            _WHOLE,
            record.facts,
            self.policy,
            marks,
            record.unseen is not None,
            record.action,
            record.latches,
            xids=record.xids,
            peers_joined=isinstance(seen, Sample) and self._peers_joined(record),
        )
        if isinstance(seen, Sample) and not self._withheld:
            self.revision += record.look(seen, now)  # the GPU may be fit now, which must be reported
        judged, event = False, isinstance(seen, XidEvent | DriverEvent)
        for whole, signal in shown(seen):
            if signal.recovers and not judged and not event:
                judged, ctx = True, replace(ctx, unfit=bool(self.unfit(uuid)))
            if signal.parts is None:
                known = record.latches.get(whole)
                stepped = signal.step(known, seen, ctx)
                if stepped is not known:
                    self.revision += record.put(whole, stepped, changed)
                continue
            for key in self._keys(whole.signal, record, seen, aimed):
                known = dated = record.latches.get(key)
                beside = isinstance(seen, XidEvent) and key.xid != seen.xid
                if event and not beside and known is not None and known.recovery.marks != marks:
                    # The event is new evidence: a reset before it proves nothing
                    dated = replace(known, recovery=replace(known.recovery, marks=marks))
                stepped = signal.step(dated, seen, replace(ctx, key=key))
                self.revision += record.put(key, known if stepped is dated else stepped, changed)
        self.revision += record.note(seen, now)
        if not changed:
            return ()
        self._guard(record, changed, now)
        return self._transitions(uuid, record, changed)

    def override(self, uuid: str) -> tuple[Transition, ...]:
        """Apply an operator's statement that a GPU is fit. Return the verdicts that changed.

        Latches of events are removed, and readings that are still bad count as DEGRADED at most. Signals of a GPU that cannot
        be served and the operator's own orders stay, except that a lost GPU that answers again is no longer lost.
        """
        record = self._known(uuid)
        changed: Changed = {}
        for key, latch in list(record.latches.items()):
            signal = SIGNALS[key.signal]
            removable = signal.kind in (SignalKind.EVENT, SignalKind.GUARD) or signal.essential
            if removable and signal.takes_override(latch):
                self.revision += record.put(key, None, changed)
            elif not signal.essential and Verdict.FATAL in (latch.verdict, self._standing(key, latch)):
                self.revision += record.put(key, replace(latch, overridden=True), changed)
        return self._transitions(uuid, record, changed)

    def judge_by(self, policy: HealthPolicy) -> tuple[Transition, ...]:
        """Judge by another policy from now on, including the open latches. Return the verdicts that changed."""
        before = [
            (uuid, record, key, latch, self._standing(key, latch))
            for uuid, record in self._records.items()
            for key, latch in record.latches.items()
        ]
        self.policy = policy
        return tuple(
            replace(self._transition(uuid, record, key, latch, {}), before=was)
            for uuid, record, key, latch, was in before
            if self._standing(key, latch) is not was
        )

    def booted(self, boot_id: str) -> tuple[Transition, ...]:
        """Update all latches after a boot of the node, which reset and enumerated every GPU. Return the verdicts that changed.

        An open latch that needs a recovery closes after good looks. Counts, baselines, errors of applications, overrides and
        releases of the boot before are dropped.
        """
        if boot_id == self.boot_id:
            return ()
        self.boot_id = boot_id
        self.revision += 1
        found: list[Transition] = []
        for uuid, record in self._records.items():
            record.marks, record.action, record.xids, record.unseen = UNMARKED, None, {}, self._unseen()
            changed: Changed = {}
            for key, latch in list(record.latches.items()):
                stays = latch.verdict is not Verdict.OK and not _of_its_boot(key, latch)
                recovery = Recovery(reset=True, rebound=True)  # counters of two boots do not compare
                after = latch.renewed(latch.memory.after_boot(), recovery=recovery) if stays else None
                self.revision += record.put(key, after, changed)
            found += self._transitions(uuid, record, changed)
        return tuple(found)

    def verdict(self, uuid: str, device: str = "") -> Verdict:
        """Return the worst verdict of a GPU or of one MIG device of it; OK for an unknown GPU."""
        return max((verdict for _, _, verdict in self.standing(uuid, device)), default=Verdict.OK)

    def health(self, uuid: str, device: str = "") -> Health:
        """Return the health of a GPU, or of one MIG device of it."""
        standing = tuple((key, verdict) for key, _, verdict in self.standing(uuid, device))
        return Health(standing, self.reason(uuid, device))

    def reason(self, uuid: str, device: str = "") -> str:
        """Return the reason why pods must not get a GPU or a MIG device of it, for people; empty if they may get it."""
        record = self._known(uuid)
        fatal = [
            (latch.since, latch.detail or k.signal) for k, latch, v in self._open(record, device) if v is Verdict.FATAL
        ]
        if not fatal and record.unseen is not None:  # any other reason says more
            return record.unseen.detail
        return "; ".join(dict.fromkeys(words for _, words in sorted(fatal)))

    def standing(self, uuid: str, device: str | None = "") -> list[tuple[LatchKey, AnyLatch, Verdict]]:
        """Return the open latches of a GPU, or of one MIG device of it, or (None) of the GPU and all its MIG devices."""
        record = self._known(uuid)
        latches = self._open(record, device)
        return latches if record.unseen is None else [*latches, (_FIRST_LOOK, record.unseen, Verdict.FATAL)]

    def unfit(self, uuid: str) -> tuple[str, ...]:
        """Return the signals, other than orders, that call a GPU FATAL by their own readings. They make every look unclean."""
        return tuple(
            key.signal
            for key, latch in self._known(uuid).latches.items()
            if latch.verdict is not Verdict.OK
            and latch.proof in (Proof.READING, Proof.RMA)
            and SIGNALS[key.signal].kind is SignalKind.READING
            and self._standing(key, latch) is Verdict.FATAL
        )

    def facts(self, uuid: str) -> Facts:
        """Return the facts of a GPU; empty facts for a GPU that is not watched."""
        return self._known(uuid).facts

    def suspicious(self, uuid: str) -> bool:
        """Return True if the next looks at a GPU would open or close a latch, so that it should be read again soon."""
        return any(latch.gathering for latch in self._known(uuid).latches.values())

    def rename(self, old: str, new: str) -> None:
        """Move the record of a GPU from a placeholder name to its real uuid `new`, and join it with the record there."""
        record = self._records.pop(old, None)
        if record is None:
            return
        self.revision += 1
        known = self._records.setdefault(new, record)
        if known is record:
            return
        for xid_and_device, at in record.xids.items():
            known.xids[xid_and_device] = max(at, known.xids.get(xid_and_device, at))
        for key, latch in record.latches.items():
            mine = known.latches.get(key, latch)
            worse, other = (latch, mine) if latch.verdict > mine.verdict else (mine, latch)
            known.latches[key] = replace(worse, memory=worse.memory.joined(other.memory))

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the entries to store: every open latch, lasting memories, marks and actions, in a stable order."""
        return tuple(
            Evidence.of(self.boot_id, uuid, key, latch, self.zero)
            for uuid, record in sorted(self._records.items())
            for key, latch in record.written()
            if latch.verdict is not Verdict.OK or latch.memory.lasting
        )

    def replay(self, evidence: Iterable[Evidence]) -> None:
        """Restore the latches of watched GPUs from stored entries. Entries of unknown signals are ignored."""
        for entry in evidence:
            record = self._records.get(entry.uuid)
            if record is None or not entry.known:
                continue
            latch = (entry.moved(self.zero) if entry.boot_id == self.boot_id else entry).latch
            if entry.key == BACKGROUND:
                record.recall(latch)
                continue
            if SIGNALS[entry.signal].of_process:
                continue
            several = SIGNALS[entry.signal].parts is not None
            key = entry.key if several else LatchKey(entry.signal)
            known = record.latches.get(key)
            if latch.verdict is Verdict.OK and not latch.memory.lasting:
                continue
            if known is None or known.verdict < latch.verdict:
                record.latches[key] = latch
            if key.xid is not None:
                record.xids[key.xid, key.device] = max(xid.last(latch), record.xids.get((key.xid, key.device), 0.0))

    def _peers_joined(self, record: GpuRecord) -> bool:
        """Return True if another GPU of the same model has joined an NVLink fabric; False if the model is unknown."""
        model = record.facts.model
        peers = (each for each in self._records.values() if model and each is not record)
        return any(each.joined and each.facts.model == model for each in peers)

    def _unseen(self) -> AnyLatch:
        return first_look.withheld(self._withheld) if self._withheld else first_look.unseen()

    def _known(self, uuid: str) -> GpuRecord:
        return self._records.get(uuid, _UNWATCHED)

    def _open(self, record: GpuRecord, device: str | None) -> list[tuple[LatchKey, AnyLatch, Verdict]]:
        """Return the latches of `standing` without the first look."""
        return [
            (key, latch, verdict)
            for key, latch in record.latches.items()
            if device is None or key.device in ("", device) or key.device not in record.mig_devices.values()
            if (verdict := self._standing(key, latch)) is not Verdict.OK
        ]

    def _keys(self, name: str, record: GpuRecord, seen: Observation, aimed: tuple[str, ...]) -> Sequence[LatchKey]:
        """Return the latches that an observation concerns, of a signal with several latches; `aimed` is of `GpuRecord.aimed`.

        An Xid also concerns the latches of other Xids whose verdict it may change; they check that it is of the same MIG device.
        """
        if isinstance(seen, XidEvent):
            accompanied = self.policy.xids.accompanied
            others = [key for key in record.latches if key.xid in accompanied and key.xid != seen.xid]
            return [*(LatchKey(name, str(seen.xid), device) for device in aimed), *others]
        if isinstance(seen, DriverEvent):
            return [LatchKey(name, f"{seen.kind:#x}")]
        return [key for key in record.latches if key.signal == name]

    def _standing(self, key: LatchKey, latch: AnyLatch | None) -> Verdict:
        return standing(key, latch, self.policy)

    def _guard(self, record: GpuRecord, changed: Changed, now: float) -> None:
        """Count drops, and hold a GPU back if they keep happening.

        A fault counts as a drop when it makes the GPU unfit. A fault that the driver may lower counts later, when a reset has
        ended it: if the driver lowers it, it is no drop.
        """
        if not self.policy.flap_hold:
            return
        for key, old in list(changed.items()):
            if SIGNALS[key.signal].kind in (SignalKind.ORDER, SignalKind.GUARD):
                continue
            fatal = self._standing(key, record.latches.get(key)) is Verdict.FATAL
            was_fatal = self._standing(key, old) is Verdict.FATAL
            ended = was_fatal and not fatal and old is not None and old.recovery.reset
            if ended if self._lowerable(record, key) else fatal and not was_fatal:
                guard = LatchKey(flapping.NAME, f"{key.signal} {key.part}".strip(), key.device)
                dropped = flapping.after_drop(record.latches.get(guard), guard.part, now, self.policy.flap_hold)
                self.revision += record.put(guard, dropped, changed)

    def _lowerable(self, record: GpuRecord, key: LatchKey) -> bool:
        """Return True if the verdict of this fault falls when the driver requests no recovery."""
        if key.xid is None:
            return key.signal == application_errors.NAME
        return self.policy.xids.judge(key.xid).answered_by(record.facts.driver_branch)

    def _transitions(self, uuid: str, record: GpuRecord, changed: Changed) -> tuple[Transition, ...]:
        """Return the changes of verdict, one after the other: each is judged by the former state of the later ones."""
        later, found = dict(changed), []
        for key, old in changed.items():
            del later[key]
            if self._standing(key, old) is not self._standing(key, record.latches.get(key)):
                found.append(self._transition(uuid, record, key, old, later))
        return tuple(found)

    def _transition(
        self, uuid: str, record: GpuRecord, key: LatchKey, old: AnyLatch | None, later: Changed
    ) -> Transition:
        new = record.latches.get(key)
        latch = new if new is not None and new.verdict is not Verdict.OK else old
        assert latch is not None
        verdict = self._standing(key, new)
        # A missing first look is no fault: the first fault of a GPU makes it Unhealthy
        open_ = {k: v for k, _, v in self.standing(uuid, key.device) if not SIGNALS[k.signal].of_process}
        open_ |= {k: self._standing(k, before) for k, before in later.items() if k.device in ("", key.device)}
        open_.pop(key, None)
        return Transition(
            uuid,
            key.signal,
            verdict,
            self._standing(key, old),
            latch.detail,
            latch.since,
            key.device,
            key.xid,
            "" if verdict is Verdict.OK else advice(key, self.policy, uuid, latch, record.facts),
            max(open_.values(), default=Verdict.OK),
            key.part,
        )


def _of_its_boot(key: LatchKey, latch: AnyLatch) -> bool:
    """Return True if a boot alone closes the latch: a release, or an event that needs no proof of recovery."""
    signal = SIGNALS[key.signal]
    if signal.kind is SignalKind.ORDER:
        return not signal.lasts
    return signal.kind is SignalKind.EVENT and latch.proof not in (Proof.RESET, Proof.REBOOT, Proof.RMA)
