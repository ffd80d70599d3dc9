"""Orders of operators: a GPU cordoned, or released for maintenance."""

from gpu_plugin.health.latch import NOTHING, AnyLatch, Latch, Memory, Proof, Verdict
from gpu_plugin.health.observation import Order, Sample
from gpu_plugin.health.signal import Case, Context, SignalKind, signal

CORDON = "cordon"
MAINTENANCE = "maintenance"

# A cordon by an annotation of the Node. It is a separate signal, so that lifting it does not lift an operator's own
# cordon.
ANNOTATED = "node-cordon"

ANNOTATION = "nvidia.com/gpu-plugin.cordon"

_CORDONED = "cordoned"
_RELEASED = "maintenance"
_RESUMED = "resumed; no good look at it yet"


class Reason(Memory, frozen=True):
    """The operator's `reason` of a cordon; it may be empty."""

    reason: str = ""


class Release(Memory, frozen=True):
    """`resumed` is True after the operator's `resume`: then the first good look closes the latch."""

    resumed: bool = False


def resuming(case: Case) -> str:
    """Return words for people about the end of a release."""
    return "an operator resumes it" if released(case.latch) else "a check succeeds"


def advice(case: Case) -> str:
    """Return advice to the operator about a release; empty if it was resumed."""
    return "resume it once the work on it is done" if released(case.latch) else ""


@signal(
    CORDON,
    SignalKind.ORDER,
    "lift it once new pods may have the GPU",
    memory=Reason(),
    sees=(Order,),
    clears="an operator lifts the cordon",
)
def cordon(latch: Latch[Reason] | None, seen: Order, ctx: Context) -> Latch[Reason] | None:
    """Opens and closes by order of the operator alone."""
    if seen.verb == "cordon":
        if latch is not None and seen.reason in ("", latch.memory.reason):
            return latch
        detail = f"{_CORDONED}: {seen.reason}" if seen.reason else _CORDONED
        since = latch.since if latch else ctx.now
        return Latch(Reason(seen.reason), Verdict.FATAL, detail, since, Proof.OPERATOR)
    return None if seen.verb == "uncordon" else latch


@signal(
    ANNOTATED,
    SignalKind.ORDER,
    "remove it from the annotation once new pods may have the GPU",
    sees=(Order,),
    clears=f"the Node's annotation {ANNOTATION} no longer names it",
)
def annotated(latch: Latch[Memory] | None, seen: Order, ctx: Context) -> Latch[Memory] | None:
    """Opens and closes by the Node's annotation."""
    if seen.verb == "annotate":
        words = f"{_CORDONED} by the Node's annotation {ANNOTATION}"
        return latch or Latch(NOTHING, Verdict.FATAL, words, ctx.now, Proof.OPERATOR)
    return None if seen.verb == "unannotate" else latch


@signal(MAINTENANCE, SignalKind.ORDER, advice, memory=Release(), sees=(Order, Sample), clears=resuming)
def maintenance(latch: Latch[Release] | None, seen: Sample | Order, ctx: Context) -> Latch[Release] | None:
    """Opens on release; closes on the first good look after resume."""
    if isinstance(seen, Order) and seen.verb == "release":
        return latch if latch is not None and released(latch) else release(latch.since if latch else ctx.now)
    if latch is None:
        return None
    if isinstance(seen, Order):
        resumed = seen.verb == "resume" and released(latch)
        return Latch(Release(resumed=True), Verdict.FATAL, _RESUMED, latch.since) if resumed else latch
    return None if not released(latch) and isinstance(seen, Sample) and not seen.fault else latch


def release(since: float) -> Latch[Release]:
    """Return the latch of a GPU, released since this Unix time in seconds."""
    return Latch(Release(), Verdict.FATAL, _RELEASED, since, Proof.OPERATOR)


def released(latch: AnyLatch) -> bool:
    """Return True for a latch of `maintenance` whose GPU was not resumed yet."""
    return isinstance(latch.memory, Release) and not latch.memory.resumed
