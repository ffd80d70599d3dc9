"""A latch as it is written down: enough to hold the same verdict after a restart."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_plugin.health.latch import Latch, LatchKey, Marks, Proof, Verdict


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is held against a GPU: where, by which signal, since when (Unix seconds), and what proof of recovery it needs.

    `boot_id` is the boot in which it was true. The rest is what `Latch` says of the same names. A `verdict` of OK holds
    nothing against it: some signals remember a count or a baseline.
    """

    boot_id: str
    uuid: str
    signal: str
    verdict: str
    detail: str
    since: float
    proof: str = Proof.READING.value
    part: str = ""
    device: str = ""
    energy: int | None = None
    ecc: int | None = None
    binding: int | None = None
    reset: bool = False
    rebound: bool = False
    asked: bool = False
    overridden: bool = False
    value: float | None = None
    times: tuple[float, ...] = ()
    pods: tuple[tuple[float, str], ...] = ()
    counting: int | None = None
    taken: float | None = None

    @classmethod
    def of(cls, boot_id: str, uuid: str, key: LatchKey, latch: Latch) -> "Evidence":
        """A latch of a GPU."""
        return cls(
            boot_id,
            uuid,
            key.signal,
            latch.verdict.name,
            latch.detail,
            latch.since,
            latch.proof.value,
            key.part,
            key.device,
            latch.marks.energy,
            latch.marks.ecc,
            latch.marks.binding,
            latch.reset,
            latch.rebound,
            latch.asked,
            latch.overridden,
            latch.value,
            latch.times,
            latch.pods,
            latch.marks.counting,
            latch.marks.taken,
        )

    @property
    def key(self) -> LatchKey:
        """Which latch it was."""
        return LatchKey(self.signal, self.part, self.device)

    def latch(self) -> Latch:
        """The latch as it was. A verdict that another version wrote is taken for the worst, a proof for that of a reset."""
        return Latch(
            _VERDICTS.get(self.verdict, Verdict.FATAL),
            self.detail,
            self.since,
            _PROOFS.get(self.proof, Proof.RESET),
            times=self.times,
            pods=self.pods,
            value=self.value,
            marks=Marks(self.energy, self.ecc, self.binding, self.counting, self.taken),
            reset=self.reset,
            rebound=self.rebound,
            asked=self.asked,
            overridden=self.overridden,
        )


def news(latch: Latch | None, *, remembers: bool) -> tuple[object, ...]:
    """What of a latch others are told and a restart must remember: worth writing down when it changed.

    Counters may be measured anew. Of a latch that is not open a signal that `remembers` keeps the value. Energy counts up all
    the time: each doubling is written down, which is seldom and enough: a reset while nobody looks shows until a quarter of
    what had been used then was used again.
    """
    if latch is None:
        return ()
    if latch.verdict is Verdict.OK:
        return (latch.value,) if remembers else ()
    marks, done = latch.marks, (latch.reset, latch.rebound, latch.asked, latch.overridden)
    energy = None if marks.energy is None else marks.energy.bit_length()
    return latch.verdict, latch.detail, latch.proof, done, marks.ecc, marks.binding, marks.counting, energy


_VERDICTS: Mapping[str, Verdict] = {verdict.name: verdict for verdict in Verdict}
_PROOFS: Mapping[str, Proof] = {proof.value: proof for proof in Proof}
