"""What the driver asks for (field 230): its word makes a GPU unfit, and its silence on three looks fit again."""

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Fault, Order, Sample, XidEvent
from tests.unit.health.looked_at import LookedAt
from tests.unit.health.shipped import shipped
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
RESET, REBOOT, DRAIN, IMEX = 1, 2, 3, 5
NONE, UNSAID, LOST = Sample(counting=0, recovery_action=0), Sample(), Sample(fault=Fault.LOST, detail="the GPU is lost")


def asks(*actions: int) -> list[Sample]:
    return [Sample(counting=0, recovery_action=action) for action in actions]


@pytest.fixture
def gpu():
    return LookedAt("recovery-action")


@pytest.mark.parametrize(
    ("action", "verdict", "words"),
    [
        (1, FATAL, "the driver asks for a reset of the GPU"),
        (2, FATAL, "the driver asks for a reboot of the node"),
        (3, FATAL, "peer-to-peer"),
        (4, FATAL, "the driver asks to drain the GPU and then reset it"),
        (5, DEGRADED, "the driver asks for the recovery of its IMEX domain"),
        (6, FATAL, "the driver asks for a reset of the GPU's bus"),
        (7, FATAL, "the driver asks for a reboot of the whole system"),
        (8, FATAL, "recovery action 8"),
        (255, FATAL, "recovery action 255"),
    ],
)
def test_every_action_counts_at_once(gpu, action, verdict, words):
    assert gpu.see(*asks(0, 0, action)) is verdict
    assert words in gpu.detail
    assert gpu.latch.since == gpu.now - 5
    assert [(change.before, change.verdict) for change in gpu.changes] == [(OK, verdict)]


def test_no_action_is_nothing_to_remember(gpu):
    assert gpu.told(NONE, NONE) == [OK, OK]
    assert gpu.remembered is None


def test_a_part_that_does_not_say_is_never_judged(gpu):
    assert gpu.see(*[UNSAID] * 20) is OK
    assert gpu.remembered is None


@pytest.mark.parametrize("action", [RESET, IMEX])
def test_it_stays_for_as_long_as_the_driver_asks(gpu, action):
    gpu.see(*asks(*[action] * 50))
    assert gpu.verdict is not OK
    assert len(gpu.changes) == 1


@pytest.mark.parametrize("action", [RESET, REBOOT, DRAIN, IMEX])
def test_three_looks_without_a_wish_end_it_and_two_do_not(gpu, action):
    gpu.see(*asks(action))
    held = gpu.verdict
    assert gpu.told(NONE, NONE, NONE) == [held, held, OK]
    assert gpu.remembered is None


def test_a_wish_in_between_begins_the_count_anew(gpu):
    assert gpu.see(*asks(1, 0, 0, 1, 0, 0)) is FATAL
    assert gpu.see(NONE) is OK


@pytest.mark.parametrize("unread", [UNSAID, LOST, Sample(fault=Fault.HUNG, detail="no answer for 30 s")])
def test_what_cannot_be_read_proves_nothing(gpu, unread):
    gpu.see(*asks(1))
    assert gpu.see(*[unread] * 20) is FATAL
    assert gpu.see(NONE, NONE, unread, NONE, NONE) is FATAL
    assert gpu.see(NONE) is OK


def test_coming_and_going_never_ends_it_and_is_told_once(gpu):
    assert gpu.see(*asks(*[1, 0] * 30)) is FATAL
    assert len(gpu.changes) == 1


def test_another_action_is_named_and_keeps_the_time_of_the_first(gpu):
    gpu.see(*asks(1))
    since = gpu.latch.since
    gpu.see(*asks(2))
    assert gpu.detail == "the driver asks for a reboot of the node"
    assert gpu.latch.since == since
    revision = gpu.ledger.revision
    gpu.see(*asks(2, 2, 2))
    assert gpu.ledger.revision == revision


def test_a_heavier_action_counts_at_once(gpu):
    assert gpu.told(*asks(5, 1)) == [DEGRADED, FATAL]
    assert gpu.detail == "the driver asks for a reset of the GPU"


def test_a_lighter_action_counts_once_it_lasted(gpu):
    assert gpu.told(*asks(1, 5, 5, 5)) == [FATAL, FATAL, FATAL, DEGRADED]
    assert gpu.detail == "the driver asks for the recovery of its IMEX domain"
    assert gpu.told(NONE, NONE, NONE) == [DEGRADED, DEGRADED, OK]


def test_it_is_looked_at_again_soon_only_while_its_end_is_made_out(gpu):
    gpu.see(*asks(1, 1, 1))
    assert not gpu.ledger.suspicious(GPU)
    gpu.see(NONE)
    assert gpu.ledger.suspicious(GPU)


def test_an_operator_may_vouch_for_a_gpu_until_the_driver_asks_for_something_else(gpu):
    gpu.see(*asks(1))
    gpu.vouch()
    assert gpu.told(*asks(1, 1)) == [DEGRADED, DEGRADED]
    assert gpu.see(*asks(2)) is FATAL


def test_a_lighter_action_does_not_end_what_an_operator_vouched_for(gpu):
    gpu.see(*asks(1))
    gpu.vouch()
    assert gpu.told(*asks(5, 5, 5, 5)) == [DEGRADED] * 4


def test_a_wish_after_the_one_vouched_for_had_gone_counts_again(gpu):
    gpu.see(*asks(1))
    gpu.vouch()
    assert gpu.see(NONE, NONE, NONE) is OK
    assert gpu.see(*asks(1)) is FATAL


def test_a_restart_changes_nothing_and_gathers_its_proof_anew(gpu):
    gpu.see(*asks(1), NONE, NONE)
    assert gpu.restart() is FATAL
    assert gpu.told(NONE, NONE, NONE) == [FATAL, FATAL, OK]


def test_a_restart_takes_the_same_wish_for_no_news(gpu):
    gpu.see(*asks(1))
    gpu.vouch()
    assert gpu.restart() is DEGRADED
    assert gpu.told(*asks(1, 1)) == [DEGRADED, DEGRADED]


def test_the_last_look_of_an_end_lets_the_proof_of_others_begin():
    gpu = LookedAt("xid")
    gpu.see(
        Sample(counting=0, energy=9_000, recovery_action=0),
        XidEvent(95),
        Sample(counting=0, energy=9_100, recovery_action=1),
    )
    after = [Sample(counting=0, energy=at, recovery_action=0) for at in range(10)]
    assert gpu.see(*after[:4]) is FATAL
    assert gpu.see(*after[4:]) is OK
    assert gpu.overall is OK


def asking(disabled: str, *xids: int, action: int = 1, later: float = 1.0) -> Watched:
    """A GPU whose driver asks for something so long after these Xids, of which the operator calls some no fault."""
    gpu = Watched("recovery-action", Facts(says_action=True), shipped({"DP_DISABLE_HEALTHCHECKS": disabled}))
    gpu.see(Sample(counting=0, recovery_action=0), *[XidEvent(xid) for xid in xids], every=0.0)
    gpu.now += later
    gpu.see(Sample(counting=0, recovery_action=action))
    return gpu


def test_what_the_driver_wants_after_an_xid_that_is_no_fault_is_worth_a_look_and_no_more():
    gpu = asking("48", 48)
    assert gpu.verdict is DEGRADED
    assert (
        gpu.latch.detail == "the driver asks for a reset of the GPU, after an Xid that is configured not to be a fault"
    )
    assert gpu.see(*[Sample(counting=0, recovery_action=1)] * 20) is DEGRADED
    assert gpu.restart() is DEGRADED
    assert gpu.see(Sample(counting=0, recovery_action=1)) is DEGRADED
    assert gpu.see(Sample(counting=0, recovery_action=2)) is FATAL, "another wish is another matter"
    assert gpu.see(*[Sample(counting=0, recovery_action=0)] * 3) is OK


@pytest.mark.parametrize(
    ("disabled", "xids", "later"),
    [
        ("", (48,), 1.0),
        ("48", (), 1.0),
        ("48", (62,), 1.0),
        ("48", (48, 62), 1.0),
        ("48", (62, 48), 1.0),
        ("48", (48,), 60.0),
    ],
)
def test_what_the_driver_wants_for_another_reason_makes_a_gpu_unfit(disabled, xids, later):
    assert asking(disabled, *xids, later=later).verdict is FATAL


def test_a_wish_that_stands_is_not_excused_by_an_xid_that_comes_later():
    gpu = asking("48", 62)
    gpu.see(XidEvent(48))
    assert gpu.see(*[Sample(counting=0, recovery_action=1)] * 10) is FATAL


@pytest.mark.parametrize(
    ("seconds", "xids", "verdict"), [(0.5, (48,), DEGRADED), (5.0, (48,), FATAL), (0.5, (48, 62), FATAL)]
)
def test_an_ignored_xid_excuses_a_request_that_a_poll_read_just_before_it(seconds, xids, verdict):
    gpu = asking("48")
    gpu.now += seconds - 5.0  # the look has added five
    gpu.see(*map(XidEvent, xids), every=0.0)
    assert gpu.see(Sample(counting=0, recovery_action=1)) is verdict
    assert gpu.restart() is verdict
    gpu.now += 600.0
    assert gpu.see(Sample(counting=0, recovery_action=1)) is FATAL


def test_what_the_driver_still_wants_after_ten_minutes_it_wants_for_the_gpu_itself():
    gpu = asking("48", 48)
    gpu.now += 590
    assert gpu.see(Sample(counting=0, recovery_action=1)) is DEGRADED
    gpu.now += 10
    assert gpu.see(Sample(counting=0, recovery_action=1)) is FATAL
    assert gpu.latch.detail == "the driver asks for a reset of the GPU"


@pytest.mark.parametrize("xid", [8, 13, 31, 43, 45, 137, 154])
def test_an_xid_that_never_leads_to_a_reset_excuses_none(xid):
    assert asking(f"{xid}", xid).verdict is FATAL


@pytest.mark.parametrize("xid", [48, 63, 79, 94, 109, 142, 9999])
def test_an_xid_that_can_lead_to_a_reset_excuses_it(xid):
    assert asking(f"{xid}", xid).verdict is DEGRADED
    assert asking(f"{xid},13", 13, xid).verdict is DEGRADED


def excused(then: float = 0.0) -> LookedAt:
    """A GPU held for a memory error that was contained and for a row to be remapped, of which the driver asks for something.

    On account of an Xid 109, which the operator calls no fault, and so long before.
    """
    gpu = LookedAt("xid", Facts(says_action=True), shipped({"DP_DISABLE_HEALTHCHECKS": "109"}))
    gpu.see(Sample(counting=0, recovery_action=0, ecc_uncorrected=0), XidEvent(63))
    gpu.see(Sample(counting=0, recovery_action=0, ecc_uncorrected=1), XidEvent(109))
    gpu.see(Sample(counting=0, recovery_action=1, ecc_uncorrected=1))
    gpu.now += then
    gpu.see(XidEvent(9999), Sample(counting=0, recovery_action=1, ecc_uncorrected=1))
    return gpu


def test_a_wish_that_is_excused_makes_no_other_fault_worse():
    gpu = excused()
    assert {(key.signal, key.part): verdict for key, _, verdict in gpu.ledger.standing(GPU)} == {
        ("recovery-action", ""): DEGRADED,
        ("xid", "63"): DEGRADED,
        ("xid", "9999"): DEGRADED,
        ("ecc-uncorrected", ""): DEGRADED,
    }
    gpu.now += 60
    gpu.see(Sample(counting=0, recovery_action=2, ecc_uncorrected=1))
    assert {verdict for _, _, verdict in gpu.ledger.standing(GPU)} == {FATAL}, "another wish is another matter"


def test_a_wish_that_is_excused_no_more_makes_other_faults_worse():
    assert {verdict for _, _, verdict in excused(600.0).ledger.standing(GPU)} == {FATAL}


@pytest.mark.parametrize("ended", ["resume", "boot"])
def test_what_the_driver_asked_for_before_a_reset_makes_no_xid_after_it_worse(ended):
    gpu = LookedAt("xid", Facts(says_action=True), shipped())
    gpu.see(*asks(0, 1), Order("release"))
    if ended == "boot":
        gpu.ledger.booted("next")
    gpu.see(Order("resume"))
    assert gpu.see(XidEvent(63)) is DEGRADED


def test_a_clock_that_is_corrected_makes_no_excuse_of_none(gpu):
    gpu.see(*asks(1))
    entry = next(entry for entry in gpu.ledger.evidence() if entry.signal == "recovery-action")
    by = replace(entry, zero=1_000_000.0)
    for zero in (999_000.0, 1_001_000.0):
        assert by.latch(zero).memory.excused is None
        assert by.moved(zero).possible
