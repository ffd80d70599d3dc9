"""The health of every GPU of a node: latches by GPU and signal, and what of them must outlive this process."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpu_plugin.health.latch import Latch, Limits, Verdict
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.xids import XidPolicy


@dataclass(frozen=True, slots=True)
class Transition:
    """A signal's verdict on a GPU changed. `since` is Unix time in seconds."""

    uuid: str
    signal: str
    verdict: Verdict
    before: Verdict
    detail: str
    since: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """An open latch as it is written down: enough to hold the same verdict after a restart."""

    uuid: str
    signal: str
    verdict: str
    detail: str
    since: float
    energy: int | None = None
    reset: bool = False


@dataclass(slots=True)
class _Record:
    limits: Limits
    latches: dict[str, Latch] = field(default_factory=dict)
    energy: int | None = None


class HealthLedger:
    """Takes observations, keeps latches, says why a GPU is not fit for use.

    A GPU's health is the worst verdict among its latches, whatever came last. One GPU's observations reach no other.
    """

    def __init__(self, policy: XidPolicy) -> None:
        self.policy = policy
        self.revision = 0
        """Grows whenever evidence that must outlive the process changed: a verdict, its words, or a reset that was seen."""
        self._records: dict[str, _Record] = {}

    def watch(self, uuid: str, limits: Limits) -> None:
        """Begins to keep a GPU's health, or gives it new limits; what is known of it stays."""
        record = self._records.get(uuid)
        if record is None:
            self._records[uuid] = _Record(limits)
        else:
            record.limits = limits

    def observe(self, uuid: str, seen: Observation, now: float) -> tuple[Transition, ...]:
        """Takes in one observation of a watched GPU at Unix time `now`. Returns the verdicts it changed."""
        record = self._records.get(uuid)
        if record is None:
            return ()
        changes = []
        for name, step in SIGNALS.items():
            before = record.latches.get(name)
            after = step(before, seen, now, record.limits, self.policy, record.energy)
            if after is None:
                record.latches.pop(name, None)
            else:
                record.latches[name] = after
            self.revision += _told(before) != _told(after)
            was = before.verdict if before else Verdict.OK
            verdict = after.verdict if after else Verdict.OK
            if was is not verdict:
                known = after if after and verdict is not Verdict.OK else before
                assert known is not None
                changes.append(Transition(uuid, name, verdict, was, known.detail, known.since))
        if isinstance(seen, Sample) and seen.energy is not None:
            record.energy = seen.energy
        return tuple(changes)

    def application_xid(self, seen: Observation) -> bool:
        """Whether this observation is an Xid that the policy lays at an application's door."""
        return isinstance(seen, XidEvent) and not self.policy.fatal(seen.xid)

    def verdict(self, uuid: str) -> Verdict:
        """The worst open verdict on a GPU; OK for one never heard of."""
        record = self._records.get(uuid)
        return max((latch.verdict for latch in record.latches.values()), default=Verdict.OK) if record else Verdict.OK

    def reason(self, uuid: str) -> str:
        """Why a GPU is not to be handed out, worded for people; empty where it may be."""
        record = self._records.get(uuid)
        if record is None:
            return ""
        fatal = sorted((latch.since, name) for name, latch in record.latches.items() if latch.verdict is Verdict.FATAL)
        return "; ".join(record.latches[name].detail or name for _, name in fatal)

    def suspicious(self, uuid: str) -> bool:
        """Whether evidence against a GPU, or proof for it, is being gathered: another look soon would tell."""
        record = self._records.get(uuid)
        return record is not None and any(latch.streak for latch in record.latches.values())

    def rename(self, old: str, new: str) -> None:
        """A GPU known under a made-up name turned out to be `new`: what is held against it goes with it."""
        record = self._records.pop(old, None)
        if record is not None:
            self.revision += 1
            known = self._records.setdefault(new, record)
            for name, latch in record.latches.items():
                known.latches.setdefault(name, latch)

    def evidence(self) -> tuple[Evidence, ...]:
        """Every open latch, in a stable order."""
        return tuple(
            Evidence(uuid, name, latch.verdict.name, latch.detail, latch.since, latch.energy, latch.reset)
            for uuid, record in sorted(self._records.items())
            for name, latch in sorted(record.latches.items())
            if latch.verdict is not Verdict.OK
        )

    def replay(self, evidence: Iterable[Evidence]) -> None:
        """Opens again what was open when it was written down, for GPUs that are watched. Unknown signals are left out."""
        for entry in evidence:
            record = self._records.get(entry.uuid)
            if record is not None and entry.signal in SIGNALS:
                known, verdict = record.latches.get(entry.signal, Latch()), _verdict(entry.verdict)
                if known.verdict is Verdict.OK and verdict is not Verdict.OK:
                    record.latches[entry.signal] = Latch(
                        verdict, entry.detail, entry.since, energy=entry.energy, reset=entry.reset
                    )


def _told(latch: Latch | None) -> tuple[Verdict, str, bool]:
    """What of a latch others are told and a restart must remember; its counters may be measured anew."""
    if latch is None or latch.verdict is Verdict.OK:
        return Verdict.OK, "", False
    return latch.verdict, latch.detail, latch.reset


_VERDICTS: Mapping[str, Verdict] = {verdict.name: verdict for verdict in Verdict}


def _verdict(name: str) -> Verdict:
    return _VERDICTS.get(name, Verdict.FATAL)
