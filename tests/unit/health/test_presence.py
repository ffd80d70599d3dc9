"""GPUs that are gone, drivers that are, and events that do not come."""

import pytest

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import DriverEvent, EventDelivery, Facts, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import ERROR, GUARDED, A, B
from tests.unit.health.looked_at import LookedAt
from tests.unit.health.watching import GPU

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
GOOD = Sample()
GONE = Sample(fault=Fault.VANISHED, detail="no driver is bound to it")
UNLOADED = Sample(fault=Fault.DRIVER, detail="the driver is not loaded")
OTHERS = [Sample(fault=fault, detail=fault) for fault in (Fault.LOST, Fault.RESET_REQUIRED, Fault.HUNG, Fault.ERROR)]


@pytest.fixture
def gone():
    return LookedAt("vanished")


@pytest.fixture
def unloaded():
    return LookedAt("driver")


def test_a_gpu_has_vanished_at_the_second_look(gone):
    assert gone.told(GOOD, GONE, GONE) == [OK, OK, FATAL]
    assert (gone.detail, gone.latch.since) == ("no driver is bound to it", gone.now - 5)


def test_a_gpu_that_vanished_without_words_has_a_reason(gone):
    gone.see(*[Sample(fault=Fault.VANISHED)] * 2)
    assert gone.detail == "the driver does not find the GPU any more"
    assert gone.ledger.reason(GPU) == gone.detail


def test_a_gpu_that_is_away_for_one_look_at_a_time_has_not_vanished(gone):
    assert gone.see(*[GONE, GOOD] * 20) is OK


def test_a_gpu_is_back_after_three_looks_that_reach_it(gone):
    gone.see(GONE, GONE)
    assert gone.see(*[GONE] * 50) is FATAL
    assert gone.told(GOOD, GOOD, GONE, GOOD, GOOD, GOOD) == [FATAL] * 5 + [OK]
    assert len(gone.changes) == 2


@pytest.mark.parametrize("other", [*OTHERS, UNLOADED])
def test_another_fault_says_neither_that_it_vanished_nor_that_it_is_back(gone, other):
    assert gone.see(GONE, other, GONE) is OK
    assert gone.see(GONE) is FATAL
    assert gone.see(*[other] * 20, GOOD, GOOD, other, GOOD, GOOD) is FATAL
    assert gone.see(GOOD) is OK


def test_a_driver_that_is_not_there_counts_at_once(unloaded):
    assert unloaded.told(GOOD, UNLOADED) == [OK, FATAL]
    assert unloaded.detail == "the driver is not loaded"


def test_the_newest_words_on_a_driver_are_kept_with_the_first_time(unloaded):
    unloaded.see(UNLOADED)
    since = unloaded.latch.since
    unloaded.see(Sample(fault=Fault.DRIVER, detail="the driver is another version than its library"))
    assert (unloaded.detail, unloaded.latch.since) == ("the driver is another version than its library", since)


def test_a_driver_is_back_after_three_good_looks(unloaded):
    assert unloaded.told(UNLOADED, GOOD, GOOD, UNLOADED, GOOD, GOOD, GOOD) == [FATAL] * 6 + [OK]


@pytest.mark.parametrize("other", [*OTHERS, GONE])
def test_another_fault_says_nothing_of_the_driver(unloaded, other):
    assert unloaded.see(*[other] * 5) is OK
    assert unloaded.see(UNLOADED, *[other] * 5, GOOD, GOOD, other, GOOD, GOOD) is FATAL
    assert unloaded.see(GOOD) is OK


def test_a_driver_that_comes_and_goes_stays_away(unloaded):
    assert unloaded.see(*[UNLOADED, GOOD, GOOD] * 20) is FATAL
    assert len(unloaded.changes) == 1


@pytest.mark.parametrize(("signal", "fault"), [("vanished", GONE), ("driver", UNLOADED)])
def test_neither_an_operator_nor_a_policy_makes_it_usable(signal, fault):
    gpu = LookedAt(signal, policy=HealthPolicy(flap_hold=0, judging=False, signals={signal: OK}))
    gpu.see(fault, fault)
    gpu.vouch()
    assert gpu.see(fault) is FATAL
    assert gpu.overall is FATAL


@pytest.mark.parametrize(("signal", "fault"), [("vanished", GONE), ("driver", UNLOADED)])
def test_a_restart_changes_nothing(signal, fault):
    gpu = LookedAt(signal)
    gpu.see(fault, fault, GOOD, GOOD)
    assert gpu.restart() is FATAL
    assert gpu.told(GOOD, GOOD, GOOD) == [FATAL, FATAL, OK]


# events

DEAF = EventDelivery("Unknown Error")


@pytest.fixture
def events():
    return LookedAt("events")


def test_a_wait_that_keeps_failing_degrades_and_no_more(events):
    assert events.see(*[DEAF] * 100) is DEGRADED
    assert "health relies on polling: Unknown Error" in events.detail
    assert events.overall is DEGRADED
    assert len(events.changes) == 1


def test_the_newest_reason_is_kept_with_the_first_time(events):
    events.see(DEAF)
    since = events.latch.since
    events.see(EventDelivery("GPU is lost"))
    assert events.detail.endswith("GPU is lost")
    assert events.latch.since == since


def test_a_wait_that_works_again_ends_it(events):
    assert events.told(DEAF, EventDelivery()) == [DEGRADED, OK]
    assert events.remembered is None


@pytest.mark.parametrize("event", [XidEvent(31), DriverEvent(0x1)])
def test_an_event_that_came_ends_it(events, event):
    assert events.told(DEAF, event) == [DEGRADED, OK]


def test_a_wait_that_works_is_nothing_to_remember(events):
    assert events.see(EventDelivery(), XidEvent(31)) is OK
    assert events.remembered is None


def test_looks_say_nothing_of_events(events):
    assert events.see(DEAF, *[GOOD] * 20, *OTHERS) is DEGRADED


def test_it_comes_and_goes_with_the_wait(events):
    assert events.told(DEAF, EventDelivery(), DEAF, EventDelivery()) == [DEGRADED, OK, DEGRADED, OK]


def test_a_restart_stays_deaf_until_the_wait_works(events):
    events.see(DEAF)
    assert events.restart() is DEGRADED
    assert events.told(GOOD, EventDelivery()) == [DEGRADED, OK]


# The first look


def watching(*policies: HealthPolicy) -> HealthLedger:
    new = HealthLedger(policies[0] if policies else GUARDED, "boot-1")
    new.watch(A, Facts())
    return new


def test_a_gpu_that_nobody_has_seen_at_work_is_not_handed_out_whatever_is_told_of_it():
    new = watching()
    assert (new.verdict(A), new.reason(A)) == (FATAL, "there has been no good look at it yet")
    assert new.observe(A, XidEvent(31), 1.0)[0].verdict is Verdict.APP
    for at, fault in enumerate([GONE, UNLOADED, *OTHERS] * 3):
        new.observe(A, fault, 2.0 + at)
        assert new.verdict(A) is FATAL
    new.watch(A, Facts())
    assert new.verdict(A) is FATAL
    (first,) = [latch for key, latch, _ in new.standing(A) if key.signal == "first-look"]
    assert first.since == 2.0


def test_one_good_look_is_enough_and_is_told_without_a_change_of_verdict():
    new = watching()
    new.observe(A, ERROR, 1.0)
    assert new.reason(A) == "there has been no good look at it yet: Unknown Error"
    revision = new.revision
    assert new.observe(A, Sample(temperature=40), 2.0) == ()
    assert (new.verdict(A), new.revision > revision) == (OK, True), "others hear of it"
    new.observe(A, ERROR, 3.0)
    assert new.verdict(A) is OK, "an error now and then is borne with"


def test_it_is_a_state_of_the_process_and_no_evidence():
    new = watching()
    assert new.observe(A, ERROR, 1.0) == (), "no change of verdict"
    assert new.unfit(A) == (), "nothing to hold up a proof"
    assert [entry.signal for entry in new.evidence()] == ["unanswered"], "nothing to write down, nor to count"
    seen = watching()
    seen.observe(A, GOOD, 1.0)
    again = watching()
    again.replay(
        (*seen.evidence(), Evidence("boot-1", A, "first-look", "FATAL", "of a version that wrote it down", 1.0))
    )
    assert again.verdict(A) is FATAL
    again.observe(A, GOOD, 2.0)
    assert again.verdict(A) is OK
    seen.booted("boot-2")
    assert seen.verdict(A) is FATAL, "every GPU is unseen in a new boot"


def test_a_gpu_known_by_another_name_was_seen_under_that():
    new = watching()
    new.watch("GPU-index-0", Facts())
    new.observe("GPU-index-0", GOOD, 1.0)
    new.rename("GPU-index-0", B)
    assert (new.verdict(B), new.verdict(A)) == (OK, FATAL)


def test_neither_the_policy_nor_a_vouch_hands_out_what_nobody_has_seen():
    new = watching(HealthPolicy(judging=False))
    new.override(A)
    assert new.verdict(A) is FATAL
    assert [key.signal for key, _, _ in new.standing(A, "MIG-1")] == ["first-look"]
    new.observe(A, GOOD, 1.0)
    assert new.verdict(A) is OK
