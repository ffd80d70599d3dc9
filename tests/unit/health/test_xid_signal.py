"""xid: the verdict on each Xid, the rules that change it, and the proof that closes it. `test_xid_time_lines` covers hours."""

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import LatchKey, Proof, Verdict
from gpu_plugin.health.observation import Facts, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import advice
from gpu_plugin.health.xid_table import XID_TABLE
from tests.unit.health.shipped import SHIPPED, shipped
from tests.unit.health.watching import GPU, Watched

APP, DEGRADED, FATAL, OK = Verdict.APP, Verdict.DEGRADED, Verdict.FATAL, Verdict.OK
VERDICTS = {"ignore": OK, "app": APP, "degraded": DEGRADED, "fatal": FATAL}
BEYOND = 9999  # an Xid that the table does not have
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
BEFORE, AFTER_RESET = 50_000, 10  # energies


def look(action: int | None = None, energy: int = BEFORE, binding: int = 7, fault: Fault = Fault.NONE) -> Sample:
    return Sample(counting=0, energy=energy, binding=binding, recovery_action=action, fault=fault)


def watched(xid: int, before: int | None = None, policy: HealthPolicy = SHIPPED, *, nvswitch: bool = False) -> Watched:
    """Return a sound GPU under a driver of branch 580 after one look, for one Xid."""
    facts = Facts(says_action=before is not None, nvswitch=nvswitch, driver_branch=580)
    gpu = Watched("xid", facts, policy, str(xid))
    gpu.see(look(before))
    return gpu


def wait(gpu: Watched, seconds: float, action: int | None) -> Verdict:
    """Return the verdict after ten good looks in this time."""
    return gpu.see(*[look(action)] * 10, every=seconds / 10)


def prove(gpu: Watched, proof: Proof, action: int | None) -> Verdict:
    """Return the verdict after this proof, while the driver requests `action`."""
    if proof in (Proof.APPLICATION, Proof.QUIET):
        return wait(gpu, 10 * MINUTE + 70 if proof is Proof.APPLICATION else 30 * HOUR, action)
    binding = 7 if proof is Proof.RESET else 8
    return gpu.see(*[look(action, AFTER_RESET + at, binding) for at in range(8)])


# An Xid for each different row of the table
ONE_OF_EACH = {replace(row, codes=(0,), name="", action=""): xid for xid, row in XID_TABLE.items()}.values()

STRENGTH = [Proof.APPLICATION, Proof.QUIET, Proof.RESET, Proof.REBOOT, Proof.RMA]


# Every kind of Xid of the table, and one beyond it


def expected(xid: int, after: int | None) -> tuple[Verdict, Verdict, Proof]:
    """Return the verdict on the event, after two minutes of clean looks, and the proof that then closes it."""
    row = XID_TABLE.get(xid)
    first = row.verdict if row else DEGRADED
    if row and row.silent and after is None:
        first = row.silent
    last = first
    proof = row.recovery if row else Proof.RESET
    linked = row is not None and row.linked is not None
    if first is FATAL and after == 0 and linked and xid != 79:
        last = DEGRADED
    if first is DEGRADED and after and (linked or proof not in (Proof.APPLICATION, Proof.QUIET)):
        last = FATAL
    if proof in (Proof.APPLICATION, Proof.QUIET) and last is FATAL:
        proof = Proof.RESET
    if proof is Proof.APPLICATION and last is DEGRADED:
        proof = Proof.QUIET
    return first, last, proof


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), (0, 0), (0, 1)], ids=["no field 230", "no request", "a reset is requested"]
)
def test_each_xid_follows_the_table_and_the_driver_until_there_is_proof(before, after):
    for xid in (*ONE_OF_EACH, BEYOND):
        first, last, proof = expected(xid, after)
        gpu = watched(xid, before)
        assert gpu.see(XidEvent(xid)) is first, xid
        if first is OK:
            assert not gpu.written
            continue
        assert gpu.latch.detail.startswith(f"Xid {xid} (")
        assert gpu.see(look(after), look(after)) in (first, last)
        assert gpu.see(*[look(after)] * 26) is last
        calm = None if after is None else 0
        for weaker in STRENGTH[: STRENGTH.index(proof)]:
            tried = watched(xid, before)
            tried.see(XidEvent(xid), *[look(after)] * 26)
            assert prove(tried, weaker, calm) is last, (xid, weaker)
        assert proof is Proof.RMA or prove(gpu, proof, calm) is OK


@pytest.mark.parametrize("xid", [31, 92, 48, 79])
def test_time_without_good_looks_closes_nothing(xid):
    gpu = watched(xid)
    verdict = gpu.see(XidEvent(xid))
    gpu.now += 30 * DAY
    for odd in (look(fault=Fault.ERROR), replace(look(), refused=frozenset({"energy"}))):
        assert gpu.see(*[odd] * 20, every=HOUR) is verdict > OK


# The driver's requests

CALM = [0] * 25  # two minutes of looks without a request


@pytest.mark.parametrize(
    ("actions", "verdict"),
    [
        (CALM[1:], FATAL),
        (CALM, DEGRADED),
        ([None] * 100, FATAL),
        ([*CALM[1:], None], FATAL),
        ([*CALM[1:], None, *CALM[1:]], FATAL),
        ([*CALM[1:], None, *CALM], DEGRADED),
        ([1, *CALM * 4], FATAL),
        ([0, 0, 4, *CALM * 4], FATAL),
        ([*CALM, 1], FATAL),
        ([*CALM, 1, *CALM * 4], FATAL),
    ],
)
def test_a_fatal_xid_is_degraded_after_two_minutes_without_a_request(actions, verdict):
    gpu = watched(48, 0)
    gpu.see(XidEvent(48))
    assert gpu.see(*map(look, actions)) is verdict


def test_a_lowered_xid_stays_so_and_the_next_one_is_fatal():
    for xids in (1, 10):
        xid = 48 if xids == 1 else 74
        gpu = watched(xid, 0)
        gpu.see(*[XidEvent(xid)] * xids, every=6)
        fatal = gpu.latch
        assert gpu.verdict is FATAL
        assert gpu.see(*map(look, CALM)) is DEGRADED
        assert gpu.latch.detail != fatal.detail
        assert gpu.see(look(fault=Fault.ERROR), look(0), look(fault=Fault.ERROR)) is DEGRADED
        assert gpu.see(XidEvent(xid)) is FATAL
        assert (gpu.latch.detail, gpu.latch.since) == (fatal.detail, fatal.since)


@pytest.mark.parametrize(
    ("xid", "seen"),
    [
        (109, [look(1), look(0), *[look(0)] * 100]),  # the request is over
        (48, [Sample(counting=0, energy=BEFORE, recovery_action=0, unrepairable_memory=True)] * 100),
    ],
)
def test_a_request_or_a_bad_reading_keeps_an_xid_fatal(xid, seen):
    gpu = watched(xid, 0)
    assert gpu.see(XidEvent(xid), *seen) is FATAL
    assert xid != 109 or prove(gpu, Proof.RESET, 0) is OK


def test_the_drivers_request_outlives_a_kill():
    gpu = watched(48, 0)
    gpu.see(XidEvent(48))
    revision = gpu.ledger.revision
    gpu.see(look(1))
    assert gpu.ledger.revision > revision
    gpu.restart()
    assert gpu.see(*[look(0)] * 100) is FATAL


# Repetitions


@pytest.mark.parametrize(
    ("xid", "count", "within", "before", "after", "proof"),
    [
        (80, 3, HOUR, APP, DEGRADED, Proof.QUIET),
        (94, 3, DAY, APP, DEGRADED, Proof.QUIET),
        (32, 3, HOUR, APP, DEGRADED, Proof.QUIET),
        (74, 10, DAY, DEGRADED, FATAL, Proof.RESET),
    ],
)
def test_a_repeated_xid_is_worse(xid, count, within, before, after, proof):
    gpu = watched(xid)
    assert set(gpu.steps(*[XidEvent(xid)] * (count + 2), every=within / (count - 1) + 1)) == {before}, "too seldom"
    gpu = watched(xid)
    assert gpu.see(*[XidEvent(xid)] * (count - 1), every=within / count + 1) is before
    assert gpu.see(XidEvent(xid)) is after
    assert f"{count} times" in gpu.latch.detail
    assert gpu.latch.proof is proof
    gpu.see(look(), every=2 * within)
    assert gpu.see(XidEvent(xid), look()) is after, "it stays so when the first ones are long ago"
    assert gpu.restart() is after
    assert prove(gpu, proof, None) is OK


@pytest.mark.parametrize(
    ("xid", "every", "looks_apart", "after"),
    [
        (80, 29 * MINUTE, 5 * MINUTE, DEGRADED),
        (80, 31 * MINUTE, 5 * MINUTE, APP),
        (94, 11 * HOUR, 20 * MINUTE, DEGRADED),
        (94, 13 * HOUR, 20 * MINUTE, APP),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_repetitions_count_also_if_the_latch_closed_in_between(xid, every, looks_apart, after, restarts):
    gpu = watched(xid)
    for _ in range(2):
        until = gpu.now + 5 + every
        gpu.see(XidEvent(xid))
        while gpu.now + looks_apart < until:
            gpu.see(look(), every=looks_apart)
        assert gpu.verdict is OK
        if restarts:
            gpu.restart()
        gpu.now = until
    assert gpu.see(XidEvent(xid)) is after


@pytest.mark.parametrize(("xid", "count", "own"), [(32, 3, APP), (80, 3, APP), (94, 3, APP), (74, 10, DEGRADED)])
@pytest.mark.parametrize("looks", [2, 5])
def test_repetitions_from_before_a_reset_do_not_count(xid, count, own, looks):
    """The second look confirms the reset, before three looks prove it."""
    gpu = watched(xid)
    gpu.see(*[XidEvent(xid)] * (count - 1), every=6)
    gpu.see(*[look(energy=AFTER_RESET + at) for at in range(looks)])
    assert gpu.see(XidEvent(xid), every=6) is own
    assert gpu.see(*[XidEvent(xid)] * (count - 1), every=6) > own


def test_a_reset_without_confirmation_or_proof_ends_no_count():
    gpu = watched(74)
    assert gpu.see(*[XidEvent(74)] * 10, look(energy=AFTER_RESET), every=6) is FATAL
    assert gpu.see(XidEvent(74)) is FATAL
    gpu = watched(74)
    for _ in range(9):
        gpu.see(XidEvent(74), look(0), every=15.0)
    assert gpu.see(look(0, energy=5), XidEvent(74)) is FATAL, "one odd energy before the next Xid"
    gpu = watched(94)
    gpu.see(XidEvent(94), look(energy=10), look(energy=20), every=6)
    assert gpu.see(*[XidEvent(94)] * 3, *[look(energy=at) for at in (30, 40, 50)], every=6) is DEGRADED
    gpu.ledger.booted("next")
    assert gpu.verdict is OK
    assert gpu.see(XidEvent(94)) is APP, "a boot ends the count"


def test_times_that_no_longer_count_are_dropped():
    gpu = watched(80)
    gpu.see(XidEvent(80))
    for hours, stored in ((0.5, True), (0.6, False)):
        assert wait(gpu, hours * HOUR, None) is OK
        assert bool(gpu.written) is stored


@pytest.mark.parametrize(
    ("reports", "every", "verdict"),
    [(7, 1.0, APP), (7, 5.0, APP), (7, 5.1, DEGRADED), (122, 1.0, APP), (123, 1.0, DEGRADED)],
)
def test_reports_within_five_seconds_of_each_other_are_one_fault_for_a_minute(reports, every, verdict):
    assert watched(94).see(*[XidEvent(94)] * reports, every=every) is verdict


# Other Xids


@pytest.mark.parametrize(
    ("judged", "other", "together", "alone", "reverse"),
    [(48, 94, DEGRADED, FATAL, False), (48, 94, DEGRADED, FATAL, True), (122, 31, FATAL, DEGRADED, False)],
)
def test_xids_count_together_on_the_same_mig_device_or_on_the_whole_gpu(judged, other, together, alone, reverse):
    slices = not SHIPPED.xids.judge(judged).whole_gpu
    for one, two, verdict in (
        (None, None, together),
        (1, 1, together if slices else alone),
        (1, 2, alone),
        (None, 1, alone),
    ):
        gpu = Watched("xid", Facts(nvswitch=True), SHIPPED)
        gpu.ledger.watch(GPU, gpu.facts, {(1, 0): "MIG-1", (2, 0): "MIG-2"})
        events = [XidEvent(xid, at, None if at is None else 0) for xid, at in ((judged, one), (other, two))]
        gpu.see(*reversed(events) if reverse else events, look(), every=1.0)
        found = [each for key, _, each in gpu.ledger.standing(GPU, None) if key.part == str(judged)]
        assert found == [verdict], (one, two)


@pytest.mark.parametrize(
    ("first", "second", "verdict"), [(122, 31, FATAL), (31, 122, DEGRADED), (48, 94, DEGRADED), (94, 48, DEGRADED)]
)
@pytest.mark.parametrize("restart", [1, 2])
def test_two_xids_count_together_over_a_restart(first, second, verdict, restart):
    gpu = watched(122 if 122 in (first, second) else 48)
    for at, xid in enumerate((first, second), 1):
        gpu.see(XidEvent(xid), every=2.0)
        if at == restart:
            gpu.restart()
    assert gpu.verdict is verdict
    assert gpu.see(look()) is verdict


@pytest.mark.parametrize("later", [0.4, 3.0, 30.0])
def test_the_last_time_of_an_xid_that_others_depend_on_is_stored_to_the_second(later):
    gpu = watched(48)
    gpu.see(XidEvent(94), every=later)
    gpu.see(XidEvent(94), every=4.0)
    gpu.restart()
    assert gpu.see(XidEvent(48)) is DEGRADED


@pytest.mark.parametrize("others", [[94], [63, 94]])
def test_a_contained_memory_error_is_degraded_and_the_next_one_fatal(others):
    gpu = watched(48)
    assert gpu.see(XidEvent(48), every=0.1) is FATAL
    assert gpu.see(*map(XidEvent, others), look(), every=0.1) is DEGRADED
    assert gpu.restart() is DEGRADED
    gpu.see(look(), every=10 * MINUTE)
    assert gpu.see(XidEvent(48), look()) is FATAL
    assert watched(48, 0).see(XidEvent(48), XidEvent(94), look(1), every=0.1) is FATAL, "a reset is requested"
    assert watched(48).see(XidEvent(48), XidEvent(63), look(), XidEvent(94), look(), every=6) is FATAL, "another error"


# NVLinks, and Xids that follow from others


def links(*up: bool, energy: int = BEFORE, action: int | None = None) -> Sample:
    return Sample(counting=0, energy=energy, binding=7, nvlinks=up, recovery_action=action)


def test_an_nvlink_error_is_fatal_while_a_link_is_down_and_until_a_reset():
    gpu = watched(74)
    gpu.see(links(True, True), XidEvent(74))
    assert gpu.see(links(True, True)) is DEGRADED
    assert gpu.see(links(True, False), links(True, False)) is FATAL
    assert gpu.see(*[links(True, True)] * 10) is FATAL
    assert gpu.see(*[links(True, True, energy=AFTER_RESET + at) for at in (7, 8, 9)]) is OK
    gpu = watched(74, 0)
    gpu.see(links(True, action=0), *[links(False, action=0)] * 2)
    assert gpu.see(XidEvent(74), *[links(False, action=0)] * 40) is FATAL


def test_a_cleanup_counts_against_the_application_whatever_the_driver_requests():
    gpu = watched(45, 0, nvswitch=True)
    assert gpu.see(XidEvent(45), look(1), look(1), XidEvent(45), look(1)) is APP
    assert "a process ended or was killed" in advice(LatchKey("xid", "45"), SHIPPED, GPU, gpu.latch)
    assert wait(gpu, 11 * MINUTE, 0) is OK


def test_a_changed_recovery_action_asks_for_a_look_at_once():
    gpu = watched(154, 0)
    assert gpu.see(XidEvent(154)) is APP
    assert gpu.ledger.suspicious(GPU)
    gpu.see(look(0))
    assert not gpu.ledger.suspicious(GPU)


# Policies

FIRM = [
    shipped({"XID_CONFIG": "31"}),
    shipped({"DP_ENABLE_HEALTHCHECKS": "31"}),
    shipped({"DP_ENABLE_HEALTHCHECKS": "all"}),
    shipped(health={"xid": {"31": "fatal"}}),
    shipped(health={"xidClass": {"application": "fatal"}}),
]


@pytest.mark.parametrize("policy", FIRM)
def test_an_xid_that_the_operator_calls_fatal_takes_a_reset(policy):
    gpu = watched(31, 0, policy)
    assert gpu.see(XidEvent(31), *[look(0)] * 100) is FATAL
    assert prove(gpu, Proof.QUIET, 0) is FATAL
    assert prove(gpu, Proof.RESET, 0) is OK


@pytest.mark.parametrize("word", ["ignore", "app", "degraded"])
def test_an_xid_that_the_operator_calls_less_is_never_raised(word):
    gpu = watched(48, 0, shipped(health={"xid": {"48": word}}))
    assert gpu.see(XidEvent(48), XidEvent(48), *[look(1)] * 5) is VERDICTS[word]


def test_another_policy_applies_to_open_latches_at_the_next_look():
    gpu = watched(48)
    gpu.see(XidEvent(48), look())
    for policy, verdict in (
        (shipped(health={"xid": {"48": "degraded"}}), DEGRADED),
        (SHIPPED, FATAL),
        (shipped(health={"xid": {"48": "app"}}), APP),
        (SHIPPED, FATAL),
    ):
        gpu.ledger.policy = policy
        assert gpu.see(look()) is verdict
    assert gpu.see(*[look()] * 20) is FATAL
    assert gpu.see(*[look(energy=AFTER_RESET)] * 3) is OK
    gpu.see(XidEvent(48))
    gpu.ledger.policy = shipped({"DP_DISABLE_HEALTHCHECKS": "48"})
    assert gpu.see(look()) is OK
    assert not gpu.written


# Storms


def test_a_storm_of_an_applications_xids_stores_nothing():
    gpu = watched(13)
    gpu.see(XidEvent(13), every=0.001)
    revision = gpu.ledger.revision
    for _ in range(500):
        assert not gpu.ledger.observe(GPU, XidEvent(13), gpu.now)
        gpu.now += 0.003
    assert gpu.ledger.revision == revision
    assert len(gpu.latch.memory.times) == 1
    assert wait(gpu, 9 * MINUTE, None) is APP
    assert wait(gpu, 2 * MINUTE, None) is OK


@pytest.mark.parametrize("xid", [45, 48, 80, 92, 94, 109, BEYOND])
def test_a_storm_of_any_other_xid_is_reported_twice_at_most(xid):
    gpu = watched(xid, nvswitch=True)
    changes = sum(len(gpu.ledger.observe(GPU, XidEvent(xid), gpu.now + at * 0.003)) for at in range(2_000))
    assert changes <= 2
    assert gpu.ledger.revision <= 4
    assert len(gpu.latch.memory.times) <= 3


def test_an_applications_xid_changes_its_latch_once_a_second():
    gpu = watched(31)
    gpu.see(XidEvent(31), every=0.5)
    first = gpu.latch
    gpu.see(XidEvent(31), every=0.6)
    assert gpu.latch is first
    gpu.see(XidEvent(31))
    assert gpu.latch.memory.times == (1_006.1,)
