"""The rule `level`, where no signal shows it: worse and better verdicts, and latches that stay the same object."""

import pytest

from gpu_plugin.health.hysteresis import LEVEL, Level, level, recent, unproven
from gpu_plugin.health.latch import AnyLatch, Latch, LatchKey, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Facts
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Context

DEGRADED, FATAL = Verdict.DEGRADED, Verdict.FATAL
MARKS = Marks(energy=7, binding=1)
OPEN = Latch(LEVEL, DEGRADED, "words", 1.0)


def read(*readings: bool | None, latch: AnyLatch | None = None, verdict: Verdict = DEGRADED, **rule) -> AnyLatch | None:
    """Return the latch after these readings, one every second from 100 on."""
    rule = {"detail": "words", **rule}
    for at, bad in enumerate(readings):
        ctx = Context(100.0 + at, LatchKey("x"), Facts(), HealthPolicy(), MARKS)
        latch = level(latch, ctx, LEVEL, bad=bad, verdict=verdict, **rule)
    return latch


def test_a_new_latch_has_the_words_the_time_the_proof_and_the_marks_of_its_last_reading():
    recovery = Recovery(MARKS)
    assert read(True, True, enter=2, proof=Proof.RESET) == Latch(LEVEL, DEGRADED, "words", 101.0, Proof.RESET, recovery)


@pytest.mark.parametrize(("reading", "dropped"), [(False, True), (None, True), (True, False)])
def test_a_row_that_ends_before_it_opens_leaves_no_latch(reading, dropped):
    assert (read(True, reading, enter=3) is None) is dropped


def test_a_worse_verdict_applies_at_once_and_a_better_one_never():
    held = Latch(LEVEL, DEGRADED, "words", 100.0, recovery=Recovery(Marks(energy=1, binding=9)), overridden=True)
    assert read(True, True, latch=held) is held
    worse = read(True, latch=held, verdict=FATAL, detail="worse", proof=Proof.RESET)
    assert worse == Latch(LEVEL, FATAL, "worse", 100.0, Proof.RESET, recovery=Recovery(MARKS))
    assert read(True, latch=worse, detail="better") is worse


@pytest.mark.parametrize(
    ("rebound", "overridden", "closed"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_part_to_be_replaced_closes_only_by_another_binding_or_an_override(rebound, overridden, closed):
    held = Latch(LEVEL, FATAL, "words", 1.0, Proof.RMA, Recovery(rebound=rebound), overridden=overridden)
    assert (read(False, False, False, latch=held, leave=3) is None) is closed
    assert read(*[True] * 5, latch=held, leave=3) is not None


def test_a_latch_that_does_not_change_is_the_same_object():
    for reading in (True, None):
        assert read(reading, latch=OPEN) is OPEN
    cooling = Latch(Level(quiet_since=100.0), DEGRADED, "words", 1.0)
    assert read(False, latch=cooling, leave_seconds=10.0) is cooling
    assert read(False, latch=OPEN, leave_seconds=0.0) is None
    assert unproven(OPEN) is OPEN
    for memory in (Level(2), Level(quiet_since=9.0)):
        assert unproven(Latch(memory, DEGRADED, "words", 1.0)) == OPEN


@pytest.mark.parametrize(
    ("times", "kept"),
    [((), ()), ((40.0, 90.0), (90.0,)), ((50.0, 90.0), (50.0, 90.0)), ((96.0, 97.0, 98.0, 99.0), (97.0, 98.0, 99.0))],
)
def test_only_the_last_recent_times_are_kept(times, kept):
    assert recent(times, 100.0, 50.0, most=3) == kept
