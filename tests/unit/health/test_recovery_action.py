"""recovery-action: the driver requests a recovery (field 230)."""

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Order, Sample, XidEvent
from tests.unit.health.shipped import shipped
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
RESET, REBOOT, IMEX = 1, 2, 5


def asks(*actions: int, **more: int) -> list[Sample]:
    return [Sample(counting=0, recovery_action=action, **more) for action in actions]  # type: ignore[arg-type]


@pytest.fixture
def gpu():
    return Watched("recovery-action")


@pytest.mark.parametrize(
    ("action", "verdict", "named"),
    [
        (1, FATAL, "reset of the GPU"),
        (2, FATAL, "reboot of the node"),
        (3, FATAL, "peer-to-peer"),
        (4, FATAL, "drain the GPU and then reset it"),
        (5, DEGRADED, "IMEX domain"),
        (6, FATAL, "reset of the GPU's bus"),
        (7, FATAL, "reboot of the whole system"),
        (8, FATAL, "recovery action 8"),
        (255, FATAL, "recovery action 255"),
    ],
)
def test_every_action_counts_at_once_and_is_named(gpu, action, verdict, named):
    assert gpu.see(*asks(0, 0, action)) is verdict
    assert named in gpu.latch.detail


@pytest.mark.parametrize("seen", [asks(0, 0), [Sample()] * 20])
def test_without_a_request_nothing_is_stored(gpu, seen):
    assert gpu.see(*seen) is OK
    assert gpu.stored is None


@pytest.mark.parametrize(
    ("first", "then", "verdicts"),
    [
        (RESET, asks(REBOOT), [FATAL]),
        (IMEX, asks(RESET), [FATAL]),  # a heavier action counts at once
        (RESET, asks(IMEX, IMEX, IMEX), [FATAL, FATAL, DEGRADED]),  # a lighter one once it lasts
        (RESET, asks(IMEX, IMEX, IMEX, 0, 0, 0), [FATAL, FATAL, DEGRADED, DEGRADED, DEGRADED, OK]),
    ],
)
def test_another_action_is_named_and_keeps_the_time_of_the_first(gpu, first, then, verdicts):
    gpu.see(*asks(first))
    since, detail = gpu.latch.since, gpu.latch.detail
    assert gpu.steps(*then) == verdicts
    if verdicts[-1] is not OK:
        assert gpu.latch.detail != detail
        assert gpu.latch.since == since
        revision = gpu.ledger.revision
        gpu.see(*[then[-1]] * 3)
        assert gpu.ledger.revision == revision


def test_looks_that_may_close_it_ask_for_another_look_soon(gpu):
    for action, suspicious in ((1, False), (1, False), (0, True)):
        gpu.see(*asks(action))
        assert gpu.ledger.suspicious(GPU) is suspicious


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("then", "verdict"),
    [
        (asks(1, 1), DEGRADED),
        (asks(2), FATAL),
        (asks(5, 5, 5, 5), DEGRADED),
        (asks(0, 0, 0), OK),
        (asks(0, 0, 0, 1), FATAL),
    ],
)
def test_an_override_lasts_until_another_request(gpu, then, verdict, restarts):
    gpu.see(*asks(1))
    gpu.override()
    if restarts:
        assert gpu.restart() is DEGRADED
    assert gpu.see(*then) is verdict


def test_the_look_that_closes_it_is_the_first_clean_look_for_other_signals():
    gpu = Watched("xid")
    gpu.see(*asks(0, energy=9_000), XidEvent(95), *asks(1, energy=9_100))
    after = [Sample(counting=0, energy=at, recovery_action=0) for at in range(10)]
    assert gpu.see(*after[:4]) is FATAL
    assert gpu.see(*after[4:]) is OK
    assert gpu.overall is OK


# Requests after an Xid that the operator calls no fault


def after_xids(disabled: str, *xids: int, later: float = 1.0) -> Watched:
    """Return a GPU whose driver requests a reset `later` seconds after these Xids, some of which are disabled."""
    gpu = Watched("recovery-action", Facts(says_action=True), shipped({"DP_DISABLE_HEALTHCHECKS": disabled}))
    gpu.see(*asks(0), *[XidEvent(xid) for xid in xids], every=0.0)
    gpu.now += later
    gpu.see(*asks(1))
    return gpu


@pytest.mark.parametrize(
    ("disabled", "xids", "later", "verdict"),
    [
        ("48", (48,), 1.0, DEGRADED),
        ("", (48,), 1.0, FATAL),
        ("48", (), 1.0, FATAL),
        ("48", (62,), 1.0, FATAL),
        ("48", (48, 62), 1.0, FATAL),
        ("48", (62, 48), 1.0, FATAL),
        ("48", (48,), 60.0, FATAL),
        *[(f"{xid}", (xid,), 1.0, FATAL) for xid in (8, 13, 31, 43, 45, 137, 154)],  # these never lead to a reset
        *[(f"{xid}", (xid,), 1.0, DEGRADED) for xid in (48, 63, 79, 94, 109, 142, 9999)],
        *[(f"{xid},13", (13, xid), 1.0, DEGRADED) for xid in (48, 63, 79, 94, 109, 142, 9999)],
    ],
)
def test_a_request_after_a_disabled_xid_is_degraded(disabled, xids, later, verdict):
    assert after_xids(disabled, *xids, later=later).verdict is verdict


@pytest.mark.parametrize(
    ("seconds", "xids", "verdict"), [(0.5, (48,), DEGRADED), (5.0, (48,), FATAL), (0.5, (48, 62), FATAL)]
)
def test_an_ignored_xid_excuses_a_request_that_a_poll_read_just_before_it(seconds, xids, verdict):
    gpu = after_xids("48")
    gpu.now += seconds - 5.0  # the look has added five
    gpu.see(*map(XidEvent, xids), every=0.0)
    assert gpu.see(*asks(1)) is verdict
    assert gpu.restart() is verdict
    gpu.now += 600.0
    assert gpu.see(*asks(1)) is FATAL


def test_the_excuse_lasts_for_ten_minutes_and_for_this_request():
    gpu = after_xids("48", 48)
    detail = gpu.latch.detail
    assert "configured not to be a fault" in detail
    assert gpu.see(*asks(*[1] * 20)) is DEGRADED
    assert gpu.restart() is DEGRADED
    gpu.now += 485
    assert gpu.see(*asks(1)) is DEGRADED
    gpu.now += 10
    assert gpu.see(*asks(1)) is FATAL
    assert detail.startswith(gpu.latch.detail)
    gpu = after_xids("48", 48)
    assert gpu.steps(*asks(*[1] * 20, 2))[-2:] == [DEGRADED, FATAL]
    assert gpu.see(*asks(0, 0, 0)) is OK
    gpu = after_xids("48", 62)
    assert gpu.see(XidEvent(48), *asks(*[1] * 10)) is FATAL, "the Xid came after the request"


@pytest.mark.parametrize(("later", "action"), [(0.0, 1), (600.0, 1), (60.0, 2)])
def test_an_excused_request_makes_no_other_fault_worse(later, action):
    gpu = Watched("xid", Facts(says_action=True), shipped({"DP_DISABLE_HEALTHCHECKS": "109"}))
    gpu.see(*asks(0, ecc_uncorrected=0), XidEvent(63), *asks(0, ecc_uncorrected=1), XidEvent(109))
    gpu.see(*asks(1, ecc_uncorrected=1), XidEvent(9999))
    gpu.now += later
    gpu.see(*asks(action, ecc_uncorrected=1))
    found = {(key.signal, key.part): verdict for key, _, verdict in gpu.ledger.standing(GPU)}
    verdict = FATAL if later else DEGRADED
    assert found == dict.fromkeys(
        [("recovery-action", ""), ("xid", "63"), ("xid", "9999"), ("ecc-uncorrected", "")], verdict
    )


@pytest.mark.parametrize("ended", ["resume", "boot"])
def test_a_request_from_before_a_reset_makes_no_xid_after_it_worse(ended):
    gpu = Watched("xid", Facts(says_action=True), shipped())
    gpu.see(*asks(0, 1), Order("release"))
    if ended == "boot":
        gpu.ledger.booted("next")
    gpu.see(Order("resume"))
    assert gpu.see(XidEvent(63)) is DEGRADED


def test_a_corrected_clock_makes_no_excuse(gpu):
    gpu.see(*asks(1))
    entry = next(entry for entry in gpu.ledger.evidence() if entry.signal == "recovery-action")
    stored = replace(entry, zero=1_000_000.0)
    for zero in (999_000.0, 1_001_000.0):
        assert stored.moved(zero).latch.memory.excused is None
