import pytest

from gpu_plugin.health.hysteresis import LEVEL, Level, level, recent, unproven
from gpu_plugin.health.latch import AnyLatch, Latch, LatchKey, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Facts
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Context

DEGRADED, FATAL = Verdict.DEGRADED, Verdict.FATAL
GOOD, BAD, UNREAD = False, True, None
MARKS = Marks(energy=7, binding=1)


def at(now: float) -> Context:
    return Context(now, LatchKey("x"), Facts(), HealthPolicy(), MARKS)


def read(*readings: bool | None, latch: AnyLatch | None = None, every: float = 1.0, **rule) -> AnyLatch | None:
    """The latch after these readings, one every so many seconds from 100 on."""
    rule = {"verdict": DEGRADED, "detail": "words", **rule}
    for step, bad in enumerate(readings):
        latch = level(latch, at(100.0 + step * every), LEVEL, bad=bad, **rule)
    return latch


def is_open(latch: AnyLatch | None) -> bool:
    return latch is not None and latch.verdict is not Verdict.OK


@pytest.mark.parametrize(
    ("readings", "enter", "opened"),
    [
        ([BAD], 1, True),
        ([BAD], 2, False),
        ([BAD, BAD], 2, True),
        ([BAD] * 3, 4, False),
        ([BAD] * 4, 4, True),
        ([BAD, GOOD, BAD], 2, False),
        ([BAD, UNREAD, BAD], 2, False),
        ([BAD, GOOD] * 20, 2, False),
        ([BAD, UNREAD, BAD, BAD], 2, True),
        ([UNREAD] * 5, 1, False),
    ],
)
def test_so_many_bad_readings_in_a_row_open(readings, enter, opened):
    assert is_open(read(*readings, enter=enter)) is opened


def test_what_opens_says_when_why_and_which_gpu_it_was():
    assert read(BAD, BAD, enter=2, proof=Proof.RESET) == Latch(
        LEVEL, DEGRADED, "words", 101.0, Proof.RESET, recovery=Recovery(MARKS)
    )


@pytest.mark.parametrize(("readings", "gone"), [([GOOD], True), ([UNREAD], True), ([BAD], False)])
def test_evidence_still_gathered_is_forgotten_with_the_row(readings, gone):
    assert (read(BAD, *readings, enter=3) is None) is gone


@pytest.mark.parametrize(
    ("readings", "closed"),
    [
        ([GOOD, GOOD], False),
        ([GOOD, GOOD, GOOD], True),
        ([GOOD, GOOD, BAD, GOOD, GOOD], False),
        ([GOOD, GOOD, UNREAD, GOOD, GOOD], False),
        ([GOOD, GOOD, UNREAD, GOOD, GOOD, GOOD], True),
        ([UNREAD] * 50, False),
        ([GOOD, GOOD, BAD] * 20, False),
    ],
)
def test_so_many_good_readings_in_a_row_close(readings, closed):
    assert (read(BAD, *readings, leave=3) is None) is closed


@pytest.mark.parametrize(
    ("readings", "closed"),
    [
        ([GOOD] * 10, False),  # 0 to 90 s after the first of them
        ([GOOD] * 11, True),
        ([GOOD] * 10 + [UNREAD] + [GOOD] * 10, False),
        ([GOOD] * 10 + [BAD] + [GOOD] * 10, False),
        ([GOOD] * 10 + [BAD] + [GOOD] * 11, True),
        ([UNREAD] * 50, False),
    ],
)
def test_readings_that_are_good_for_so_long_close(readings, closed):
    assert (read(BAD, *readings, leave_seconds=100.0, every=10.0) is None) is closed


def test_without_a_time_to_be_good_for_the_first_good_reading_closes():
    assert read(BAD, GOOD, leave_seconds=0.0) is None


def test_a_worse_verdict_is_taken_over_at_once_and_a_better_one_never():
    held = Latch(LEVEL, DEGRADED, "words", 100.0, recovery=Recovery(Marks(energy=1, binding=9)))
    worse = read(BAD, latch=held, verdict=FATAL, detail="worse", proof=Proof.RESET)
    assert worse == Latch(LEVEL, FATAL, "worse", 100.0, Proof.RESET, recovery=Recovery(MARKS))
    assert read(BAD, latch=worse, verdict=DEGRADED, detail="better") is worse


def test_what_an_operator_vouched_for_stays_so_until_it_is_worse():
    vouched = Latch(LEVEL, DEGRADED, "words", 1.0, overridden=True)
    assert read(BAD, BAD, latch=vouched) is vouched
    worse = read(BAD, latch=vouched, verdict=FATAL)
    assert worse is not None
    assert not worse.overridden


@pytest.mark.parametrize(
    ("rebound", "overridden", "closed"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_part_to_be_replaced_is_believed_only_as_another_one_or_on_an_operators_word(rebound, overridden, closed):
    held = Latch(LEVEL, FATAL, "words", 1.0, Proof.RMA, Recovery(rebound=rebound), overridden=overridden)
    assert (read(GOOD, GOOD, GOOD, latch=held, leave=3) is None) is closed
    assert is_open(read(*[BAD] * 5, latch=held, leave=3))


def test_a_latch_that_nothing_changes_is_the_same_object():
    held = Latch(LEVEL, DEGRADED, "words", 1.0)
    assert level(held, at(2.0), LEVEL, bad=BAD, verdict=DEGRADED, detail="x") is held
    assert level(held, at(2.0), LEVEL, bad=UNREAD, verdict=DEGRADED, detail="x") is held
    cooling = Latch(Level(quiet_since=2.0), DEGRADED, "words", 1.0)
    assert level(cooling, at(3.0), LEVEL, bad=GOOD, verdict=DEGRADED, detail="x", leave_seconds=10.0) is cooling


def test_what_was_gathered_is_unproven():
    held = Latch(LEVEL, DEGRADED, "words", 1.0)
    assert unproven(held) is held
    assert unproven(Latch(Level(2), DEGRADED, "words", 1.0)) == held
    assert unproven(Latch(Level(quiet_since=9.0), DEGRADED, "words", 1.0)) == held


@pytest.mark.parametrize(
    ("times", "kept"),
    [((), ()), ((40.0, 90.0), (90.0,)), ((50.0, 90.0), (50.0, 90.0)), ((96.0, 97.0, 98.0, 99.0), (97.0, 98.0, 99.0))],
)
def test_only_the_last_of_what_happened_lately_is_kept(times, kept):
    assert recent(times, 100.0, 50.0, most=3) == kept
