"""A GPU's NVLinks: those that were up and are down, and the errors on them."""

import re
from collections.abc import Sequence
from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import level
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Verdict
from gpu_plugin.health.observation import Observation, Sample
from gpu_plugin.health.totals import grown, nothing_new, tally, unread

CRC_ERRORS, WITHIN, QUIET = 100, 3600.0, 3600.0
"""More CRC errors than this within so many seconds are too many; so many seconds without close what was."""


def nvlink(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens when a link that was up is down at two looks in a row; closes on three looks at all of them up.

    `value` is a mask of the links that were ever seen up: what never was is no news. A GPU in MIG mode makes no use of its
    links (NVIDIA's MIG user guide: no peer-to-peer), which may be powered down then, and is judged afresh after that.
    """
    if not isinstance(seen, Sample):
        return latch
    if ctx.facts.mig:
        return None
    if seen.nvlinks is None:
        return replace(latch, streak=0) if latch is not None and latch.streak else latch
    known = latch or Latch(value=0)
    up = _mask(seen.nvlinks)
    were = int(known.value or 0) | up
    down = were & ~up
    before = ctx.before.nvlinks if down and ctx.before is not None else None
    twice = down & ~_mask(before) if before is not None else 0
    if known.verdict is Verdict.OK:
        if known.streak and twice:
            return Latch(Verdict.DEGRADED, _words(twice), ctx.now, value=were)
        changed = Latch(value=were, streak=1 if down else 0)
        return (latch if changed == latch else changed) if were else None
    named = _named(known.detail)
    if twice & ~named:
        return known.again(detail=_words(named | twice), value=were)
    if not down and known.streak + 1 >= CLEAN_SAMPLES:
        return Latch(value=were)
    changed = replace(known, streak=0 if down else known.streak + 1, value=were)
    return latch if changed == latch else changed


def nvlink_errors(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on a recovery that failed, or on too many CRC errors within an hour; closes on an hour without.

    `readings` are failed recoveries and CRC errors in total, `times` the last CRC errors.
    """
    if not isinstance(seen, Sample):
        return latch
    now = (seen.nvlink_failed_recoveries, seen.nvlink_crc_errors)
    if latch is not None and nothing_new(latch, now):
        return latch
    known = latch or Latch()
    (failed, errors), readings = grown(known.readings, now)
    times = tally(known.times, errors, ctx.now, WITHIN, CRC_ERRORS)
    bad = bool(failed) or (errors > 0 and len(times) > CRC_ERRORS)
    words = "an NVLink failed to recover" if failed else f"more than {CRC_ERRORS} CRC errors on NVLinks within an hour"
    judged = level(
        replace(known, readings=readings, times=times),
        ctx,
        bad=bad or (None if unread(readings, now) else False),
        verdict=Verdict.DEGRADED,
        detail=words,
        leave_seconds=QUIET,
    )
    if judged is None or (bad and known.verdict is Verdict.OK):
        fresh = replace(judged or Latch(), readings=readings, times=times)
        return None if fresh == Latch(readings=(None, None)) else latch if fresh == latch else fresh
    return latch if judged == latch else judged


def _mask(links: Sequence[bool]) -> int:
    if all(links):
        return (1 << len(links)) - 1
    return sum(1 << at for at, up in enumerate(links) if up)


def _words(links: int) -> str:
    numbers = [str(at) for at in range(links.bit_length()) if links >> at & 1]
    if len(numbers) == 1:
        return f"NVLink {numbers[0]} went down"
    return f"NVLinks {', '.join(numbers[:-1])} and {numbers[-1]} went down"


def _named(words: str) -> int:
    """The mask of the links that `_words` named: they are known from there alone, also after a restart."""
    return sum(1 << int(number) for number in re.findall(r"\d+", words))
