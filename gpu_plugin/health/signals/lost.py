"""The driver reports that the GPU is lost."""

from typing import ClassVar

from msgspec.structs import replace

from gpu_plugin.health.latch import REBOOT, Latch, LatchKey, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Fault, Order, Sample
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.signal import Context, OperatorInfluence, SignalKind, signal
from gpu_plugin.health.signals.orders import MAINTENANCE, released

# Words for people about the recoveries of a lost GPU
RECOVERY = "the GPU was reset, the node rebooted, or the driver bound to the GPU again"


# Words for people about the evidence of its recovery
SHOWN = (
    "The recovery shows in gpu-plugin release and gpu-plugin resume, in another binding, in an energy counter that restarted "
    "and, without persistence mode, in an answer to another process than the one that lost it."
)


class LostMemory(Memory, frozen=True):
    """`opening` is the opening of the driver in which the GPU was lost (`Sample.counting`), None if no number identifies it.

    `answers` is True if the last look reached the GPU.
    """

    opening: int | None = None
    answers: bool = False

    unstored: ClassVar[tuple[str, ...]] = ("answers",)


GONE = LostMemory()


def reached(latch: Latch[LostMemory]) -> bool:
    """Return True if the last look reached the GPU, so that an operator may override the latch."""
    return latch.memory.answers


@signal(
    "lost",
    SignalKind.READING,
    REBOOT,
    memory=GONE,
    sees=(Sample, Order),
    recovers=True,
    influence=OperatorInfluence.NONE,
    recovery=RECOVERY,
    shown=SHOWN,
    overridable=reached,
)
def lost(latch: Latch[LostMemory] | None, seen: Sample | Order, ctx: Context) -> Latch[LostMemory] | None:
    """Opens on NVML_ERROR_GPU_IS_LOST; closes when the GPU was enumerated again or reset, and answers.

    NVML does not reach a lost GPU until it is enumerated again. So an answer alone is the proof in three cases: neither energy
    nor binding was known when the GPU was lost, the driver was opened again since, or an operator released and resumed the GPU.
    """
    if isinstance(seen, Order):
        order = ctx.open.get(_RELEASE)
        if latch is None or seen.verb != "resume" or order is None or not released(order):
            return latch
        return replace(latch, memory=GONE, recovery=replace(latch.recovery, reset=True, clean=0))
    if seen.fault is not Fault.LOST:
        return latch and after_recovery(_answered(latch, seen), seen, ctx)
    opening = ctx.marks.counting if latch is None else latch.memory.opening
    memory = LostMemory((opening if seen.counting is None else seen.counting) or None)
    marks = ctx.marks.completed(seen, ctx.now) if latch is None else latch.recovery.marks
    # The marks stay: the binding may already differ while an old handle still reports lost, and must show later
    recovery = Recovery(marks, reset=marks.energy is None and marks.binding is None)
    if latch is None:
        return Latch(memory, Verdict.FATAL, seen.detail, ctx.now, Proof.RESET, recovery)
    again = replace(latch, memory=memory, recovery=recovery, overridden=False)
    return latch if again == latch else again


def _answered(latch: Latch[LostMemory], seen: Sample) -> Latch[LostMemory]:
    """Return the latch with the proof of a look that did not report the GPU as lost."""
    known, memory = latch.memory, replace(latch.memory, answers=seen.core_answered)
    reset = memory.answers and known.opening is not None and seen.counting not in (None, 0, known.opening)
    if reset and not latch.recovery.reset:
        latch = replace(latch, recovery=replace(latch.recovery, reset=True, clean=0))
    return latch if memory == known else replace(latch, memory=memory)


_RELEASE = LatchKey(MAINTENANCE)
