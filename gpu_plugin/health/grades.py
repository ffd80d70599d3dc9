"""The rule of signals whose readings are graded: each look says OK, DEGRADED or FATAL, and the verdict follows what lasts."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Verdict


def graded(
    latch: Latch | None,
    ctx: Context,
    *,
    grade: Verdict | None,
    detail: str,
    enter: int = 1,
    leave: int = CLEAN_SAMPLES,
) -> Latch | None:
    """The latch after a look of this `grade`; None: it was not to be had, which ends every row and proves nothing.

    The verdict rises to what the last `enter` looks all came to at least, and falls to what the last `leave` came to at
    most: so FATAL becomes DEGRADED where that is what is left, and not only OK. `detail` is what this look says.
    """
    if latch is None and grade is Verdict.OK:
        return None
    held = latch is not None and latch.verdict is not Verdict.OK
    if grade is None:
        if latch is None or not held:
            return None
        return replace(latch, streak=0, readings=()) if latch.streak or latch.readings else latch
    known = latch or Latch()
    row = (*known.readings, int(grade))[-max(enter, leave) :]
    looks = [Verdict(look or 0) for look in row]
    risen = min(looks[-enter:]) if len(looks) >= enter else Verdict.OK
    if risen > known.verdict:
        if held:
            return known.again(verdict=risen, detail=detail, readings=row)
        return Latch(risen, detail, ctx.now, marks=ctx.marks, readings=row)
    if held and len(looks) >= leave and max(looks[-leave:]) < known.verdict and grade is max(looks[-leave:]):
        if grade is Verdict.OK:
            return None
        return replace(known, verdict=grade, detail=detail, streak=0, readings=row)
    if not held and max(looks) is Verdict.OK:
        return None
    words = detail if held and grade is known.verdict else known.detail
    changed = replace(known, detail=words, streak=_differing(looks, known.verdict), readings=row)
    return latch if changed == latch else changed


def _differing(looks: list[Verdict], verdict: Verdict) -> int:
    """How many of the last looks in a row were other than the verdict."""
    same = [at for at, look in enumerate(looks, 1) if look is verdict]
    return len(looks) - max(same, default=0)
