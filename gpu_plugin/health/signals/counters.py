"""Errors of links, by two counters each that only grow until a reset sets them back: a table, and the function for its rows.

Any growth of the first counter counts. Growth of the second counts if it exceeds a limit within a time.
"""

from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.hysteresis import MINUTE, Level, level, recent, unproven
from gpu_plugin.health.latch import RESET, Count, Latch, Moment, Proof, Verdict, merged
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import RECOVERIES, after_recovery
from gpu_plugin.health.signal import DEFINED, Context, Signal, SignalKind

# The readings of both counters, None for a missing reading
Totals = tuple[Count | None, Count | None]


class Counted(Level, frozen=True):
    """The last readings of the counters, and the Unix times in seconds of the latest events of the second one.

    `noted` is the Unix time in seconds of the last change that had to be stored. Growth since then, and growth while no process
    runs, is counted at the first look after a restart. The counters are compared over openings of the driver, too: after a reset
    a counter starts at 0, so a greater value is always of new errors.
    """

    totals: Totals = (None, None)
    times: tuple[Moment, ...] = ()
    noted: Moment | None = None

    gathering: ClassVar[bool] = False  # an early look decides nothing

    @property
    def lasting(self) -> bool:
        """True if a counter was read, so that the next look can be compared with it."""
        return any(total is not None for total in self.totals)

    @property
    def counted_closed(self) -> object:
        """The time of the last change that had to be stored."""
        return self.noted

    counted = counted_closed

    def joined(self, other: Self) -> Self:
        """Return the memory with the other's events added."""
        return replace(self, times=merged(self.times, other.times))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A signal on two counters, by their fields of `Sample`. More than `limit` of the second in `within` seconds are too many.

    The signal is DEGRADED until `quiet` seconds pass without too many. With `fatal`, growth of the first counter is FATAL until
    a reset. The words are for people. `action` and `clears` are as in `Signal`.
    """

    signal: str
    action: str
    clears: str
    first: str
    second: str
    limit: int
    within: float
    quiet: float
    first_words: str
    second_words: str
    fatal: bool = False

    def judge(self, latch: Latch[Counted] | None, seen: Sample, ctx: Context) -> Latch[Counted] | None:
        """Return the latch after a look."""
        known = latch or Latch(Counted())
        now = self._read(known.memory, seen)
        if latch is not None and latch.verdict is Verdict.OK and now == latch.memory.totals and not latch.memory.times:
            return latch
        growth, memory = self._counted(known.memory, now, ctx.now)
        known = replace(known, memory=memory)
        fresh = unproven(known).memory
        unread = memory.totals == (None, None)
        after: Latch[Counted] | None
        if growth[0] and self.fatal:
            since = known.since if known.verdict is not Verdict.OK else ctx.now
            marks = ctx.marks.sure(seen, ctx.now)  # a reset that the same look shows came before the error
            after = known.renewed(
                fresh, marks, verdict=Verdict.FATAL, detail=self.first_words, since=since, proof=Proof.RESET
            )
        elif known.proof in RECOVERIES:
            after = after_recovery(known, seen, ctx)
        else:
            lacking = any(new is None and old is not None for old, new in zip(memory.totals, now, strict=True))
            bad: bool | None = bool(growth[0]) or (growth[1] > 0 and len(memory.times) > self.limit)
            after = level(
                known,
                ctx,
                fresh,
                bad=bad or (None if lacking or unread else False),
                verdict=Verdict.DEGRADED,
                detail=self.first_words if growth[0] else self.second_words,
                leave_seconds=self.quiet,
            )
        if after is None and not unread:
            after = Latch(fresh)
        return latch if after == latch else after

    def _read(self, memory: Counted, seen: Sample) -> Totals:
        """Return both counters after this look. A counter that the look did not request keeps its last reading."""
        first, second = (
            getattr(seen, name) if seen.asked_for(name) else old
            for name, old in zip((self.first, self.second), memory.totals, strict=True)
        )
        return first, second

    def _counted(self, memory: Counted, now: Totals, at: float) -> tuple[tuple[int, ...], Counted]:
        """Return the growth of each counter at these readings of Unix time `at`, and the new memory.

        A counter has not grown at its first reading, while it is missing, and after a reset. A missing counter keeps its last
        reading. A first reading, a reset of a counter and growth of the first counter are stored at once, growth of the
        second counter once a minute.
        """
        pairs = list(zip(memory.totals, now, strict=True))
        growth = tuple(0 if new is None or old is None else max(0, new - old) for old, new in pairs)
        first, second = (old if new is None else new for old, new in pairs)
        totals = first, second
        most = self.limit + 1
        times = recent((*memory.times, *(at,) * min(growth[1], most)), at, self.within, most)
        due = totals != memory.totals and (memory.noted is None or not 0 <= at - memory.noted < MINUTE)
        begun = any(new is not None and (old is None or new < old) for old, new in pairs)
        noted = at if due or growth[0] or begun else memory.noted
        return growth, replace(memory, totals=totals, times=times, noted=noted)


ROWS = (
    # The PCI Express Base Specification (6.2.2.2.1, Fatal Errors) calls link and hardware unreliable after a single fatal
    # error, until a reset. No recovery action follows such an error, so a driver that requests nothing proves nothing. An
    # operator can set `health.signals: {pcie-errors: degraded}`.
    Row(
        signal="pcie-errors",
        action=f"have the GPU, its riser or its slot inspected; {RESET}",
        clears="ten minutes pass without many replays",
        first="pcie_fatal_errors",
        second="pcie_replays",
        limit=50,
        within=60.0,
        quiet=600.0,
        first_words="fatal errors on its PCIe link",
        second_words="more than 50 replays on its PCIe link within a minute",
        fatal=True,
    ),
    Row(
        signal="nvlink-errors",
        action="look at nvidia-smi nvlink --errorcounters -i {gpu}, and at the links' cables or bridges",
        clears="an hour passes without a failed recovery and with few CRC errors",
        first="nvlink_failed_recoveries",
        second="nvlink_crc_errors",
        limit=100,
        within=3600.0,
        quiet=3600.0,
        first_words="an NVLink failed to recover",
        second_words="more than 100 CRC errors on NVLinks within an hour",
    ),
)

for _row in ROWS:
    _step = _row.judge
    DEFINED.enter(
        _row.signal,
        Signal(
            _step,
            SignalKind.EVENT,
            _row.action,
            memory=Counted(),
            asks=(_row.first, _row.second),
            clears=_row.clears,
            recovers=_row.fatal,
        ),
        _step,
    )
