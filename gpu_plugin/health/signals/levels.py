"""Signals that judge one reading of a look by its own value: the table of them, and the function that judges its rows."""

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.hysteresis import LEVEL, Level, level, unproven
from gpu_plugin.health.latch import CLEAN_SAMPLES, REBOOT, RESET, Latch, Proof, Verdict
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.health.signal import DEFINED, REPLACE, Context, OperatorInfluence, Signal, SignalKind, signal

# Retired pages at which NVIDIA replaces a part; the driver can retire 64 (NVIDIA, Dynamic Page Retirement)
REPLACED_AT = 60


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A signal that opens at the `enter`th bad look in a row, and closes at the `leave`th good look in a row.

    A look is bad if it has this `fault`, and good if the driver answered; or it is bad if `field` of the sample is True, or less
    than its field `most`, and good otherwise. Other looks prove nothing. `words` are the reason, unless the driver gave its own
    for the fault. With `newest`, each bad look renews them. A fault with Proof.RMA closes only after the GPU was enumerated
    again. `action` and `clears` are those of `Signal`.
    """

    signal: str
    action: str
    clears: str = ""
    fault: Fault = Fault.NONE
    field: str = ""
    most: str = ""
    words: str = ""
    newest: bool = False
    enter: int = 1
    leave: int = CLEAN_SAMPLES
    verdict: Verdict = Verdict.FATAL
    proof: Proof = Proof.READING

    def judge(self, latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
        """Return the latch after a look."""
        if self.fault:
            bad = True if seen.fault is self.fault else False if seen.core_answered else None
            detail = seen.detail or self.words
        else:
            bad = self._reads_bad(seen)
            detail = self.words.format(seen=seen)
        if self.proof is Proof.RMA:
            return condemned(latch, seen, ctx, bad=bad, detail=detail)
        after = level(
            latch, ctx, LEVEL, bad=bad, verdict=self.verdict, detail=detail, enter=self.enter, leave=self.leave
        )
        if self.newest and bad and seen.detail and after is not None and after.verdict is not Verdict.OK:
            return replace(after, detail=seen.detail)
        return after

    def _reads_bad(self, seen: Sample) -> bool | None:
        value = getattr(seen, self.field)
        if not self.most:
            return None if value is None else bool(value)
        most = getattr(seen, self.most)
        return None if value is None or most is None else bool(value < most)


ROWS = (
    # The driver does not reach the GPU
    Row(signal="hung", action=REBOOT, clears="it answers three times in a row", fault=Fault.HUNG),
    Row(
        signal="reset-required",
        action=RESET,
        clears="no reset is required at three checks in a row",  # the driver itself reports the end
        fault=Fault.RESET_REQUIRED,
    ),
    Row(
        signal="driver",
        action="load the driver, or bring it and its library to the same version",
        clears="the driver answers three checks in a row",
        fault=Fault.DRIVER,
        words="the NVIDIA driver does not answer",
        newest=True,
    ),
    Row(
        signal="vanished",
        action="look at the kernel's log and at lspci; bind the driver to the GPU again, or have the GPU reseated",
        clears="three checks in a row find it",
        fault=Fault.VANISHED,
        words="the driver does not find the GPU any more",
        newest=True,
        enter=2,
    ),
    # Memory that neither remapping nor a reset repairs
    Row(
        signal="sram-threshold",
        action=REPLACE,
        field="sram_threshold",
        words="more SRAM errors than NVIDIA allows a part",
        proof=Proof.RMA,
    ),
    Row(
        signal="remap-failure",  # there is no spare row left
        action=REPLACE,
        field="remap_failure",
        words="a bad memory row could not be remapped",
        proof=Proof.RMA,
    ),
    Row(
        signal="unrepairable-memory",
        action=REPLACE,
        field="unrepairable_memory",
        words="memory beyond repair",
        proof=Proof.RMA,
    ),
    # The speed of the link does not count, because it drops whenever the GPU is idle
    Row(
        signal="pcie-width",
        action="have the GPU, its riser or its slot inspected",
        clears="four checks in a row find all its lanes",
        field="pcie_width",
        most="pcie_max_width",
        words="its PCIe link has {seen.pcie_width} of {seen.pcie_max_width} lanes",
        enter=4,
        leave=4,
        verdict=Verdict.DEGRADED,
    ),
)


def condemned(
    latch: Latch[Level] | None, seen: Sample, ctx: Context, *, bad: bool | None, detail: str
) -> Latch[Level] | None:
    """Return the latch of a part that must be replaced. Good readings only count if the GPU was enumerated again after the bad.

    `bad` and `detail` are as in `level`.
    """
    if latch is not None and not bad:
        known, binding = latch.recovery.marks.binding, seen.binding
        rebound = known is not None and binding is not None and known != binding
        latch = _noted(unproven(latch) if rebound else latch, seen, ctx, rebound=latch.recovery.rebound or rebound)
    after = level(
        latch, ctx, LEVEL, bad=bad, verdict=Verdict.FATAL, detail=detail, leave=CLEAN_SAMPLES, proof=Proof.RMA
    )
    return _noted(after, seen, ctx, rebound=False) if bad and after is not None else after


def _noted(latch: Latch[Level], seen: Sample, ctx: Context, *, rebound: bool) -> Latch[Level]:
    """Return the latch with this sample's binding and the proof that it gives."""
    known = latch.recovery
    if rebound is known.rebound and seen.binding in (None, known.marks.binding):
        return latch
    return replace(latch, recovery=replace(known, marks=known.marks.after(seen, ctx.now), rebound=rebound))


@signal(
    "retired-pages",
    SignalKind.READING,
    f"{RESET}; at {REPLACED_AT} pages {REPLACE}",
    memory=LEVEL,
    asks=("retired_pending", "retired_pages"),
    clears="no retirement waits for a reset",
)
def retired_pages(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """DEGRADED while a retirement waits for a reset, FATAL from `REPLACED_AT` pages on. Ampere and later remap rows instead."""
    pages = seen.retired_pages
    if pages is not None and pages >= REPLACED_AT:
        return condemned(latch, seen, ctx, bad=True, detail=f"{pages} memory pages retired, {REPLACED_AT} are too many")
    if latch is not None and latch.proof is Proof.RMA:
        return condemned(latch, seen, ctx, bad=None if pages is None else False, detail="")
    words = "the retirement of a memory page waits for a reset of the GPU"
    return level(latch, ctx, LEVEL, bad=seen.retired_pending, verdict=Verdict.DEGRADED, detail=words)


for _row in ROWS:
    _step = _row.judge
    DEFINED.enter(
        _row.signal,
        Signal(
            _step,
            SignalKind.READING,
            _row.action,
            memory=LEVEL,
            asks=tuple(name for name in (_row.field, _row.most) if name),
            clears=_row.clears,
            influence=OperatorInfluence.NONE if _row.fault else OperatorInfluence.FULL,
        ),
        _step,
    )
