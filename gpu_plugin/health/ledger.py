"""The health of every GPU of a node: latches by GPU and signal, and what of them must outlive this process."""

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
    xid_number,
)

_FIRST_LOOK = LatchKey(first_look.NAME)
_WHOLE = LatchKey("")
_UNWATCHED = GpuRecord(Facts(), unseen=None)  # nothing is ever put into it


class HealthLedger:
    """Takes observations, keeps latches, says why a GPU or a MIG device is not fit for use.

    Health is the worst standing among the latches, whatever came last. One GPU's observations reach no other, except that a
    GPU without an NVLink fabric is compared with those that have joined one. What reaches a GPU reaches every MIG device and
    replica of it, what reaches a MIG device only that one. Once that one is gone, what is held against it counts against its
    GPU, until it is proven over: repartitioning a GPU repairs nothing.

    A GPU that is watched and of which no good sample has come yet is unfit, whatever else is known of it (`first_look`).
    """

    def __init__(self, policy: HealthPolicy, boot_id: str = "", zero: float | None = None) -> None:
        """Takes the policy, the boot, and the Unix time at which that boot's clock stood at 0 by the wall clock in use.

        None: the wall clock is taken for the one that earlier processes had.
        """
        self.policy = policy
        self.boot_id = boot_id
        self.zero = zero
        self.revision = 0
        """Grows whenever evidence that must outlive the process changed: a verdict, its words, or a recovery that was seen."""
        self._records: dict[str, GpuRecord] = {}
        self._withheld = ""

    def withhold(self, why: str) -> None:
        """Withhold every GPU that is watched from now on, whatever looks at it tell, for as long as this ledger is in use.

        It is for a ledger that cannot know what earlier processes held against GPUs. `why` is the reason, for people.
        """
        self._withheld = why

    def watch(self, uuid: str, facts: Facts, mig_devices: MigUuids | None = None) -> None:
        """Begins to keep a GPU's health, or gives it new facts and MIG devices; what is known of it stays."""
        record = self._records.setdefault(uuid, GpuRecord(facts, unseen=self._unseen()))
        record.facts = facts
        record.mig_devices = mig_devices or {}

    def observe(self, uuid: str, seen: Observation, now: float) -> tuple[Transition, ...]:
        """Takes in one observation of a watched GPU at Unix time `now`. Returns the verdicts it changed."""
        record = self._records.get(uuid)
        if record is None:
            return ()
        changed: Changed = {}
        # Those of an earlier process date from before what is told now: between them the GPU may have been reset
        marks = UNMARKED if record.recalled and not isinstance(seen, Sample) else record.marks
        aimed: tuple[str, ...] = ()
        if isinstance(seen, XidEvent):
            aimed = record.aimed(seen, whole_gpu=self.policy.xids.judge(seen.xid).whole_gpu)
            # When it came last, to the second, is what others are judged by
            self.revision += record.take_xid(seen.xid, aimed, now) and seen.xid in self.policy.xids.heeded
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
            self.revision += record.look(seen, now)  # others are to be told
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
            own = self._keys(whole.signal, record, seen, aimed)
            for key in own:
                known = dated = record.latches.get(key)
                if event and known is not None and known.recovery.marks != marks:
                    # It is evidence of now: a reset before it proves nothing
                    dated = replace(known, recovery=replace(known.recovery, marks=marks))
                stepped = signal.step(dated, seen, replace(ctx, key=key))
                self.revision += record.put(key, known if stepped is dated else stepped, changed)
            if isinstance(seen, XidEvent):
                self._beside(record, whole.signal, seen, ctx, changed)
        self.revision += record.note(seen, now)
        if not changed:
            return ()
        self._guard(record, changed, now)
        return self._transitions(uuid, record, changed)

    def override(self, uuid: str) -> tuple[Transition, ...]:
        """An operator states that a GPU is fit. Events held against it are forgotten; what still reads badly is at most DEGRADED.

        What makes a GPU impossible to serve, and the operator's own orders, stay; but one that answers again is lost no more.
        Returns the verdicts it changed.
        """
        record = self._known(uuid)
        changed: Changed = {}
        for key, latch in list(record.latches.items()):
            signal = SIGNALS[key.signal]
            forgotten = signal.kind in (SignalKind.EVENT, SignalKind.GUARD) or signal.essential
            if forgotten and signal.takes_override(latch):
                self.revision += record.put(key, None, changed)
            elif not signal.essential and Verdict.FATAL in (latch.verdict, self._standing(key, latch)):
                self.revision += record.put(key, replace(latch, overridden=True), changed)
        return self._transitions(uuid, record, changed)

    def judge_by(self, policy: HealthPolicy) -> tuple[Transition, ...]:
        """Judges by another policy from now on, what is open already included. Returns the verdicts that it changed."""
        before = [
            (uuid, record, key, latch, self._standing(key, latch))
            for uuid, record in self._records.items()
            for key, latch in record.latches.items()
        ]
        self.policy = policy
        return tuple(
            replace(self._transition(uuid, record, key, latch), before=was)
            for uuid, record, key, latch, was in before
            if self._standing(key, latch) is not was
        )

    def booted(self, boot_id: str) -> tuple[Transition, ...]:
        """The node was booted: every GPU was reset and enumerated, and is believed after good looks.

        Counts and baselines are of the boot before, and so are errors of applications, overrides, and
        what was released. Returns the verdicts it changed.
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
        """The worst standing of a GPU or of one MIG device of it; OK for one never heard of."""
        return max((verdict for _, _, verdict in self.standing(uuid, device)), default=Verdict.OK)

    def health(self, uuid: str, device: str = "") -> Health:
        """The health of a GPU, or of one MIG device of it."""
        standing = tuple((key, verdict) for key, _, verdict in self.standing(uuid, device))
        return Health(standing, self.reason(uuid, device))

    def reason(self, uuid: str, device: str = "") -> str:
        """Why a GPU, or one MIG device of it, is not to be handed out, worded for people; empty where it may be."""
        record = self._known(uuid)
        fatal = [
            (latch.since, latch.detail or k.signal) for k, latch, v in self._open(record, device) if v is Verdict.FATAL
        ]
        if not fatal and record.unseen is not None:  # what else there is says more
            return record.unseen.detail
        return "; ".join(dict.fromkeys(words for _, words in sorted(fatal)))

    def standing(self, uuid: str, device: str | None = "") -> list[tuple[LatchKey, AnyLatch, Verdict]]:
        """The latches that stand against a GPU, or against one MIG device of it, or (None) against it and all of them."""
        record = self._known(uuid)
        latches = self._open(record, device)
        return latches if record.unseen is None else [*latches, (_FIRST_LOOK, record.unseen, Verdict.FATAL)]

    def unfit(self, uuid: str) -> tuple[str, ...]:
        """The signals that call a GPU FATAL by their own readings, and not by the operator's word: no look is clean then."""
        return tuple(
            key.signal
            for key, latch in self._known(uuid).latches.items()
            if latch.verdict is not Verdict.OK
            and latch.proof in (Proof.READING, Proof.RMA)
            and SIGNALS[key.signal].kind is SignalKind.READING
            and self._standing(key, latch) is Verdict.FATAL
        )

    def facts(self, uuid: str) -> Facts:
        """The facts of a GPU; none for one that is not watched."""
        return self._known(uuid).facts

    def suspicious(self, uuid: str) -> bool:
        """Whether evidence against a GPU, or proof for it, is being gathered: another look soon would tell."""
        return any(latch.gathering for latch in self._known(uuid).latches.values())

    def rename(self, old: str, new: str) -> None:
        """A GPU known under a made-up name turned out to be `new`: what is held against it goes with it."""
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
        """Every open latch, and what else is remembered of a GPU, in a stable order."""
        return tuple(
            Evidence.of(self.boot_id, uuid, key, latch, self.zero)
            for uuid, record in sorted(self._records.items())
            for key, latch in record.written()
            if latch.verdict is not Verdict.OK or latch.memory.lasting
        )

    def replay(self, evidence: Iterable[Evidence]) -> None:
        """Holds again what was held when it was written down, for GPUs that are watched. Unknown signals are left out."""
        for entry in evidence:
            record = self._records.get(entry.uuid)
            if record is None or not entry.known:
                continue
            latch = entry.latch(self.zero if entry.boot_id == self.boot_id else None)
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
            if (number := xid_number(key)) is not None:
                record.xids[number, key.device] = max(xid.last(latch), record.xids.get((number, key.device), 0.0))

    def _peers_joined(self, record: GpuRecord) -> bool:
        """Whether another GPU of the same model, if that is known, has joined an NVLink fabric."""
        model = record.facts.model
        peers = (each for each in self._records.values() if model and each is not record)
        return any(each.joined and each.facts.model == model for each in peers)

    def _unseen(self) -> AnyLatch:
        return first_look.withheld(self._withheld) if self._withheld else first_look.unseen()

    def _known(self, uuid: str) -> GpuRecord:
        return self._records.get(uuid, _UNWATCHED)

    def _open(self, record: GpuRecord, device: str | None) -> list[tuple[LatchKey, AnyLatch, Verdict]]:
        """The latches of `standing`, but for the first look."""
        return [
            (key, latch, verdict)
            for key, latch in record.latches.items()
            if device is None or key.device in ("", device) or key.device not in record.mig_devices.values()
            if (verdict := self._standing(key, latch)) is not Verdict.OK
        ]

    def _beside(self, record: GpuRecord, name: str, seen: XidEvent, ctx: Context, changed: Changed) -> None:
        """Shows an Xid to the latches of other Xids, which it may make more or less of: of another MIG device it says nothing."""
        swayed = self.policy.xids.swayed
        others = [
            key for key in record.latches if key.part in swayed and key.signal == name and key.part != str(seen.xid)
        ]
        for key in others:
            self.revision += record.put(
                key, SIGNALS[name].step(record.latches[key], seen, replace(ctx, key=key)), changed
            )

    def _keys(self, name: str, record: GpuRecord, seen: Observation, aimed: tuple[str, ...]) -> Sequence[LatchKey]:
        """The latches of a signal that keeps several of a GPU which an observation is about; `aimed` as of `GpuRecord.aimed`."""
        if isinstance(seen, XidEvent):
            return [LatchKey(name, str(seen.xid), device) for device in aimed]
        if isinstance(seen, DriverEvent):
            return [LatchKey(name, f"{seen.kind:#x}")]
        return [key for key in record.latches if key.signal == name]

    def _standing(self, key: LatchKey, latch: AnyLatch | None) -> Verdict:
        return standing(key, latch, self.policy)

    def _guard(self, record: GpuRecord, changed: Changed, now: float) -> None:
        """Counts drops, and holds a GPU back if they keep happening.

        A fault counts when it makes the GPU unfit. One that the driver may lower counts when a reset has ended it instead: if
        the driver did lower it, it was no drop.
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
        """Whether a driver that asks for nothing may make this fault less."""
        number = xid_number(key)
        if number is None:
            return key.signal == application_errors.NAME
        return self.policy.xids.judge(number).answered_by(record.facts.driver_branch)

    def _transitions(self, uuid: str, record: GpuRecord, changed: Changed) -> tuple[Transition, ...]:
        return tuple(
            self._transition(uuid, record, key, old)
            for key, old in changed.items()
            if self._standing(key, old) is not self._standing(key, record.latches.get(key))
        )

    def _transition(self, uuid: str, record: GpuRecord, key: LatchKey, old: AnyLatch | None) -> Transition:
        new = record.latches.get(key)
        latch = new if new is not None and new.verdict is not Verdict.OK else old
        assert latch is not None
        verdict, standing, number = self._standing(key, new), self.verdict(uuid, key.device), xid_number(key)
        return Transition(
            uuid,
            key.signal,
            verdict,
            self._standing(key, old),
            latch.detail,
            latch.since,
            key.device,
            number,
            "" if verdict is Verdict.OK else advice(key, self.policy, uuid, latch, record.facts),
            "" if number is None else self.policy.xids.judge(number).name,
            standing,
            key.part,
        )


def _of_its_boot(key: LatchKey, latch: AnyLatch) -> bool:
    """Whether a boot alone ends it: a release, and events that no recovery is asked of."""
    signal = SIGNALS[key.signal]
    if signal.kind is SignalKind.ORDER:
        return not signal.lasts
    return signal.kind is SignalKind.EVENT and latch.proof not in (Proof.RESET, Proof.REBOOT, Proof.RMA)
