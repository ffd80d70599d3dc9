"""Histories of one GPU: no fault that only a reset ends closes without a reset."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import DRAWN, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import CORE, DriverEvent, Fault, Observation, Sample, XidEvent
from tests.unit.health.ledgers import GUARDED, H200, A

# A part that does not report a recovery action: only a reset proves a recovery
FACTS = replace(H200, says_action=False)

UNJUDGED = replace(GUARDED, judging=False)
FAULTS: list[Observation] = [*map(XidEvent, (48, 64, 95, 119)), DriverEvent(0x800)]
FIRST_ZERO = 1_000_000.0  # the Unix time at which the clock of the boot read 0


class History:
    """A GPU, its driver, and processes that watch it one after another and store their evidence.

    A process looks at the GPU after each change of persistence mode, because it cannot know of a change that it never sees.
    """

    def __init__(self) -> None:
        self.clock, self.zero = 1_000.0, FIRST_ZERO
        self.energy, self.errors, self.binding, self.power = 5_000_000_000, 3, 1, DRAWN // 4
        self.persistent, self.opening = True, 1
        self.lost = self.broken = False
        self.judging, self.anew, self.unseen = True, False, True
        self.written: tuple[Evidence, ...] = ()
        self.revision = 0
        self.ledger = self.started()
        self.look()

    def started(self) -> HealthLedger:
        ledger = HealthLedger(GUARDED if self.judging else UNJUDGED, "boot-1", self.zero)
        ledger.watch(A, FACTS)
        ledger.replay(self.written)
        self.revision = ledger.revision
        return ledger

    def observe(self, seen: Observation) -> None:
        self.ledger.observe(A, seen, self.zero + self.clock)
        if self.ledger.revision != self.revision:
            self.written, self.revision = self.ledger.evidence(), self.ledger.revision
        if self.broken and self.judging:
            assert self.ledger.verdict(A) is Verdict.FATAL, "nothing has repaired it"

    def wait(self, seconds: float) -> None:
        self.clock += seconds
        self.energy += int(self.power * seconds)

    def look(self, **odd: object) -> None:
        self.wait(1.0)
        self.anew, self.unseen = bool(odd), False
        if self.lost:
            return self.observe(Sample(fault=Fault.LOST, binding=self.binding, opening=self.opening))
        counting = 0 if self.persistent and self.judging else self.opening
        seen = Sample(30, self.energy, ecc_uncorrected=self.errors, binding=self.binding, counting=counting)
        changes: dict[str, Any] = {"opening": self.opening, "asked": None if self.judging else CORE, **odd}
        seen = replace(seen, **changes)
        return self.observe(seen)

    def close(self) -> None:
        """The driver closes: a GPU without persistence mode starts its counters again."""
        if not self.persistent:
            self.energy = self.errors = 0
        self.opening += 1

    # What happens

    def looks(self, often: int) -> None:
        for _ in range(often):
            self.look()

    def misread(self, what: str, value: int) -> None:
        if self.anew:
            self.look()  # an odd reading is accepted without an earlier reading to compare with, or if the next confirms it
        self.look(**{what: value})

    def refuse(self, often: int) -> None:
        for _ in range(often):
            self.look(temperature=None, energy=None, refused=frozenset({"temperature", "energy"}))

    def fail(self, how: Observation) -> None:
        self.broken = True
        self.observe(how)
        if self.unseen:
            self.look()  # the first reading is accepted

    def lose(self) -> None:
        self.broken = self.lost = True
        self.look()

    def restart(self, seconds: float, corrected: float) -> None:
        self.close()
        self.wait(seconds)
        self.zero += corrected
        self.ledger, self.unseen, self.anew = self.started(), True, self.anew or not (self.persistent and self.judging)

    def reopen(self, seconds: float) -> None:
        self.close()
        self.wait(seconds)
        self.anew = True

    def persist(self, on: bool) -> None:
        self.persistent = on
        self.look()

    def judge(self, on: bool) -> None:
        self.judging, self.anew = on, True
        self.ledger.judge_by(GUARDED if on else UNJUDGED)

    def slice(self, on: bool) -> None:
        self.ledger.watch(A, replace(FACTS, mig=on), {(1, 0): "MIG-1"} if on else None)

    def reset(self, rebound: bool) -> None:
        self.energy = self.errors = 0
        self.binding += rebound
        self.lost = self.broken = False
        self.looks(2)  # a fault before the first look counts as older than the reset; the first reading is accepted


often = st.integers(1, 4)
flag = st.booleans()
seconds = st.sampled_from([0.0, 1.0, 60.0, 4_000.0, 100_000.0])
happening = st.one_of(
    st.tuples(st.just("looks"), often),
    st.tuples(st.just("looks"), often),
    st.tuples(
        st.just("misread"),
        st.sampled_from(["energy"]),
        st.sampled_from([0, 1, 1_000_000, 2_000_000_000, 10**10, 10**12, 10**15]),
    ),
    st.tuples(st.just("misread"), st.just("binding"), st.sampled_from([1, 2, 7])),
    st.tuples(st.just("misread"), st.just("ecc_uncorrected"), st.just(0)),
    st.tuples(st.just("refuse"), often),
    st.tuples(st.just("fail"), st.sampled_from(FAULTS)),
    st.tuples(st.just("lose")),
    st.tuples(st.just("restart"), seconds, st.sampled_from([0.0, 0.0, -50_000.0, 3_600.0, 10**7])),
    st.tuples(st.just("reopen"), seconds),
    st.tuples(st.just("persist"), flag),
    st.tuples(st.just("judge"), flag),
    st.tuples(st.just("slice"), flag),
    st.tuples(st.just("reset"), flag),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(happening, max_size=25))
def test_no_fault_that_a_reset_ends_closes_without_one(happenings):
    history = History()
    for name, *arguments in happenings:
        getattr(history, name)(*arguments)
    history.looks(4)
