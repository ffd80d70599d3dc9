from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import AnyLatch, LatchKey, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import advice
from gpu_plugin.health.xid_table import XID_TABLE
from tests.unit.health.shipped import SHIPPED, shipped
from tests.unit.health.watching import GPU, Watched

APP, DEGRADED, FATAL, OK = Verdict.APP, Verdict.DEGRADED, Verdict.FATAL, Verdict.OK
TABLE = XID_TABLE
VERDICTS = {"ignore": OK, "app": APP, "degraded": DEGRADED, "fatal": FATAL}
BEYOND = 9999

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
BEFORE, AFTER_RESET = 50_000, 10
BOUND, BOUND_ANEW = 7, 8

ANSWERS = {"no field 230": (None, None), "the driver asks for nothing": (0, 0), "the driver asks for a reset": (0, 1)}
"""What field 230 says before an Xid and after it."""
answers = pytest.mark.parametrize(("before", "after"), ANSWERS.values(), ids=ANSWERS)


def look(action: int | None = None, energy: int = BEFORE, binding: int = BOUND, fault: Fault = Fault.NONE) -> Sample:
    return Sample(counting=0, energy=energy, binding=binding, recovery_action=action, fault=fault)


def watched(xid: int, before: int | None = None, policy: HealthPolicy = SHIPPED, *, nvswitch: bool = False) -> Watched:
    """A sound GPU under a driver of branch 580, seen once, of which one Xid is looked at."""
    facts = Facts(says_action=before is not None, nvswitch=nvswitch, driver_branch=580)
    gpu = Watched("xid", facts, policy, str(xid))
    gpu.see(look(before))
    return gpu


def wait(gpu: Watched, seconds: float, action: int | None) -> Verdict:
    """Good looks for so long, ten of them."""
    return gpu.see(*[look(action)] * 10, every=seconds / 10)


def answers_for(seconds: float, action: int | None) -> list[Sample]:
    """Looks at which the driver asks for this, one every five seconds."""
    return [look(action)] * round(seconds / 5)


def quiet(seconds: float) -> Iterable[Sample]:
    return [look()] * 10 if seconds else []


# What each kind of proof looks like, the weaker before the stronger: after it the driver asks for nothing any more.
PROOFS = {
    Proof.APPLICATION: lambda gpu, action: wait(gpu, 10 * MINUTE + 70, action),
    Proof.QUIET: lambda gpu, action: wait(gpu, 30 * HOUR, action),
    Proof.RESET: lambda gpu, action: gpu.see(*[look(action, AFTER_RESET + n) for n in range(8)]),
    Proof.REBOOT: lambda gpu, action: gpu.see(*[look(action, AFTER_RESET + n, BOUND_ANEW) for n in range(8)]),
}
STRENGTH = [*PROOFS, Proof.RMA]


def expected(xid: int, after: int | None) -> tuple[Verdict, Verdict, Proof]:
    """The verdict on the event, after two minutes of clean looks, and what then closes it, by the policy's words alone."""
    row = TABLE.get(xid)
    first = VERDICTS[row.verdict] if row else DEGRADED
    if row and row.silent and after is None:
        first = VERDICTS[row.silent]
    last = first
    proof = Proof(row.recovery) if row else Proof.RESET
    linked = row is not None and row.linked_since is not None
    if first is FATAL and after == 0 and linked and xid != 79:
        last = DEGRADED
    if first is DEGRADED and after and (linked or proof not in (Proof.APPLICATION, Proof.QUIET)):
        last = FATAL
    if proof in (Proof.APPLICATION, Proof.QUIET) and last is FATAL:
        proof = Proof.RESET
    if proof is Proof.APPLICATION and last is DEGRADED:
        proof = Proof.QUIET
    return first, last, proof


# Every Xid of the table, and one beyond it


@answers
def test_each_xid_means_what_the_policy_and_the_driver_say_until_there_is_proof(before, after):
    for xid in (*sorted(TABLE), BEYOND):
        means_what_is_said(xid, before, after)


def means_what_is_said(xid, before, after):
    first, last, proof = expected(xid, after)
    gpu = watched(xid, before)
    assert gpu.see(XidEvent(xid)) is first
    if first is OK:
        assert not gpu.written
        return
    assert gpu.latch.detail.startswith(f"Xid {xid} (")
    assert gpu.see(look(after), look(after)) in (first, last)
    assert gpu.see(*answers_for(130.0, after)) is last
    calm = None if after is None else 0
    for weaker in STRENGTH[: STRENGTH.index(proof)]:
        tried = watched(xid, before)
        tried.see(XidEvent(xid), *answers_for(130.0, after))
        assert PROOFS[weaker](tried, calm) is last, weaker
    if proof is not Proof.RMA:
        assert PROOFS[proof](gpu, calm) is OK


@pytest.mark.parametrize("xid", [31, 92, 48, 79])
def test_silence_closes_nothing(xid):
    gpu = watched(xid)
    verdict = gpu.see(XidEvent(xid))
    assert verdict is not OK
    gpu.now += 30 * DAY
    assert gpu.verdict is verdict
    assert gpu.see(*[look(fault=Fault.ERROR)] * 20, every=HOUR) is verdict
    assert gpu.see(*[replace(look(), refused=frozenset({"energy"}))] * 20, every=HOUR) is verdict


@pytest.mark.parametrize("xid", [31, 92, 48])
def test_a_new_boot_closes_what_a_reset_would(xid):
    gpu = watched(xid)
    gpu.see(XidEvent(xid))
    gpu.ledger.booted("next")
    gpu.see(look(None, AFTER_RESET), look(None, AFTER_RESET))
    assert gpu.see(look(None, AFTER_RESET), *quiet(11 * MINUTE), every=70.0) is OK


def test_energy_that_goes_on_is_no_reset():
    gpu = watched(48)
    gpu.see(XidEvent(48))
    assert gpu.see(*[look(energy=BEFORE + n) for n in range(100)]) is FATAL


# What the driver asks for


CALM = [0] * 25  # looks in which the driver asks for nothing: two minutes


@pytest.mark.parametrize(
    ("said", "verdict"),
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
def test_a_fatal_xid_is_lowered_once_the_driver_has_asked_for_nothing_for_two_minutes(said, verdict):
    gpu = watched(48, 0)
    gpu.see(XidEvent(48))
    assert gpu.see(*map(look, said)) is verdict


def test_what_was_lowered_stays_so_and_is_fatal_again_with_the_next_one():
    gpu = watched(48, 0)
    gpu.see(XidEvent(48), *map(look, CALM))
    assert gpu.latch.detail == "Xid 48 (double-bit ECC error), after which the driver asks for no recovery"
    assert gpu.see(look(fault=Fault.ERROR), look(0), look(fault=Fault.ERROR)) is DEGRADED
    assert gpu.see(XidEvent(48)) is FATAL
    assert gpu.latch.detail == "Xid 48 (double-bit ECC error)"
    assert gpu.latch.since == 1_005.0


@pytest.mark.parametrize("asked", [1, 2, 4, 99])
def test_an_unknown_xid_is_fatal_at_once_where_the_driver_asks_already(asked):
    gpu = watched(BEYOND, 0)
    gpu.see(look(asked))
    assert gpu.see(XidEvent(BEYOND)) is FATAL
    assert gpu.latch.detail == "Xid 9999 (unknown to this version)"
    assert gpu.latch.proof is Proof.RESET


def test_a_wish_of_the_driver_that_has_passed_leaves_the_xid_fatal_until_a_reset():
    gpu = watched(109, 0)
    assert gpu.see(XidEvent(109), look(1), look(0)) is FATAL
    assert gpu.see(*[look(0)] * 100) is FATAL
    assert PROOFS[Proof.RESET](gpu, 0) is OK


def test_nothing_lowers_an_xid_while_the_gpu_reads_badly():
    gpu = watched(48, 0)
    gpu.see(XidEvent(48), *[Sample(counting=0, energy=BEFORE, recovery_action=0, unrepairable_memory=True)] * 100)
    assert gpu.verdict is FATAL


# Several of them


@pytest.mark.parametrize(
    ("xid", "count", "within", "before", "after", "proof"),
    [
        (80, 3, HOUR, APP, DEGRADED, Proof.QUIET),
        (94, 3, DAY, APP, DEGRADED, Proof.QUIET),
        (32, 3, HOUR, APP, DEGRADED, Proof.QUIET),
        (74, 10, DAY, DEGRADED, FATAL, Proof.RESET),
    ],
)
def test_what_repeats_within_a_time_means_more(xid, count, within, before, after, proof):
    apart = within / count + 1
    gpu = watched(xid)
    for _ in range(count + 2):  # one after the other, too seldom
        assert gpu.see(XidEvent(xid), every=within / (count - 1) + 1) is before
    gpu = watched(xid)
    assert gpu.see(*[XidEvent(xid)] * (count - 1), every=apart) is before
    assert gpu.see(XidEvent(xid)) is after
    assert f", {count} times within " in gpu.latch.detail
    assert gpu.latch.proof is proof
    gpu.see(look(), every=2 * within)
    assert gpu.see(XidEvent(xid), look()) is after  # and stays so, however long ago the first ones are
    assert gpu.restart() is after
    assert PROOFS[proof](gpu, None) is OK


@pytest.mark.parametrize(
    ("xid", "count", "every", "looks_apart", "after"),
    [
        (80, 3, 29 * MINUTE, 5 * MINUTE, DEGRADED),
        (80, 3, 31 * MINUTE, 5 * MINUTE, APP),
        (94, 3, 11 * HOUR, 20 * MINUTE, DEGRADED),
        (94, 3, 13 * HOUR, 20 * MINUTE, APP),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_repeats_counts_though_nothing_is_held_in_between(xid, count, every, looks_apart, after, restarts):
    """The GPU is looked at all the time; an application's error is over after ten minutes, and another after a day."""
    gpu = watched(xid)
    for at in range(count):
        verdict = gpu.see(XidEvent(xid))
        until = gpu.now + every
        while at < count - 1 and gpu.now + looks_apart < until:
            gpu.see(look(), every=looks_apart)
        if at < count - 1:
            assert gpu.verdict is OK
            if restarts:
                gpu.restart()
            gpu.now = until
    assert verdict is after


@pytest.mark.parametrize(("xid", "count", "own"), [(32, 3, APP), (80, 3, APP), (94, 3, APP), (74, 10, DEGRADED)])
@pytest.mark.parametrize("looks", [2, 5])
def test_what_was_before_a_reset_does_not_count_after_it(xid, count, own, looks):
    """Neither once the reset is proven, nor while good looks after it are still missing: the second look confirms it."""
    gpu = watched(xid)
    gpu.see(*[XidEvent(xid)] * (count - 1), every=6)
    gpu.see(*[look(energy=AFTER_RESET + n) for n in range(looks)])
    assert gpu.see(XidEvent(xid), every=6) is own
    assert gpu.see(*[XidEvent(xid)] * (count - 1), every=6) > own, "those since count"


def test_an_event_after_a_reset_makes_nothing_better_that_is_still_to_be_proven():
    gpu = watched(74)
    assert gpu.see(*[XidEvent(74)] * 10, look(energy=AFTER_RESET), every=6) is FATAL
    assert gpu.see(XidEvent(74)) is FATAL


def test_times_that_count_no_more_are_forgotten():
    gpu = watched(80)
    gpu.see(XidEvent(80))
    assert wait(gpu, 0.5 * HOUR, None) is OK
    assert gpu.written
    assert wait(gpu, 0.6 * HOUR, None) is OK
    assert not gpu.written


@pytest.mark.parametrize(("xid", "count"), [(32, 3), (94, 3), (74, 10)])
def test_what_a_driver_tells_many_times_at_once_counts_once(xid, count):
    """As a line for each link or channel that met the same fault; in a storm that goes on they do add up."""
    gpu = watched(xid)
    own = SHIPPED.xids.judge(xid).verdict
    assert gpu.see(*[XidEvent(xid)] * 40, every=0.1) is own
    assert gpu.restart() is own
    assert gpu.see(*[XidEvent(xid)] * 62 * (count - 1), every=1.0) > own


@pytest.mark.parametrize(("every", "verdict"), [(1.0, APP), (5.0, APP), (5.1, DEGRADED)])
def test_a_fault_that_is_told_for_longer_than_five_seconds_is_one_while_it_goes_on(every, verdict):
    assert watched(94).see(*[XidEvent(94)] * 7, every=every) is verdict


@pytest.mark.parametrize(("lasting", "verdict"), [(121, APP), (122, DEGRADED)])
def test_a_fault_that_does_not_end_within_a_minute_counts_anew(lasting, verdict):
    assert watched(94).see(*[XidEvent(94)] * (lasting + 1), every=1.0) is verdict


def test_what_repeats_is_lowered_by_the_driver_too_and_raised_by_the_next():
    gpu = watched(74, 0)
    assert gpu.see(*[XidEvent(74)] * 10, every=6) is FATAL
    assert gpu.see(*map(look, CALM)) is DEGRADED
    assert gpu.see(XidEvent(74)) is FATAL


def test_xids_of_other_numbers_have_latches_of_their_own():
    gpu = Watched("xid", Facts(), SHIPPED)
    gpu.see(XidEvent(95), XidEvent(48), XidEvent(31), XidEvent(95))
    assert {(key.part, verdict) for key, _, verdict in gpu.ledger.standing(GPU)} == {
        ("95", FATAL),
        ("48", FATAL),
        ("31", APP),
    }
    assert gpu.ledger.reason(GPU) == "Xid 95 (uncontained ECC error); Xid 48 (double-bit ECC error)"


def test_an_xid_after_a_reset_needs_another_reset():
    gpu = watched(48)
    gpu.see(XidEvent(48), look(energy=10), look(energy=20), XidEvent(48))
    assert gpu.see(*[look(energy=30 + n) for n in range(10)]) is FATAL
    assert gpu.see(look(energy=5), look(energy=6), look(energy=7)) is OK


def test_a_reset_while_nobody_looked_ends_what_was_before_it_and_not_what_came_after():
    gpu = watched(48)
    gpu.see(XidEvent(48), look(energy=60_000))
    assert gpu.restart() is FATAL
    assert gpu.see(look(energy=10), look(energy=20)) is FATAL
    assert gpu.see(look(energy=30)) is OK
    gpu.see(XidEvent(48), look(energy=60_000))
    gpu.restart()
    assert gpu.see(XidEvent(48), *[look(energy=10 + n) for n in range(10)]) is FATAL
    assert gpu.see(*[look(energy=n) for n in range(3)]) is OK


def test_a_reset_from_before_an_xid_was_worth_a_proof_proves_nothing():
    gpu = watched(94)
    gpu.see(XidEvent(94), look(energy=10), look(energy=20), every=6)
    again: list[Observation] = [*[XidEvent(94)] * 3, look(energy=30), look(energy=40), look(energy=50)]
    assert gpu.see(*again, every=6) is DEGRADED


def test_errors_of_applications_are_of_their_boot():
    gpu = watched(94)
    assert gpu.see(XidEvent(94), XidEvent(94), XidEvent(94), every=6) is DEGRADED
    gpu.ledger.booted("next")
    assert gpu.verdict is OK
    assert gpu.see(XidEvent(94)) is APP


@pytest.mark.parametrize(
    ("first", "apart", "verdict"), [(122, 0.5, FATAL), (122, 6.0, DEGRADED), (31, 0.5, DEGRADED), (31, 6.0, DEGRADED)]
)
def test_what_brings_page_faults_makes_the_gpu_unfit_and_alone_is_worth_a_look(first, apart, verdict):
    gpu = watched(122, 0)
    assert gpu.see(XidEvent(122), look(0)) is DEGRADED
    gpu = watched(122, 0)
    gpu.see(XidEvent(first), XidEvent(153 - first), every=apart)
    assert gpu.see(look(None)) is verdict
    assert gpu.restart() is verdict
    if verdict is FATAL:
        latch = next(latch for key, latch, _ in gpu.ledger.standing(GPU) if key.part == "122")
        assert latch.detail.endswith(", together with Xid 31")
        assert latch.proof is Proof.RESET
        assert gpu.see(*map(look, CALM * 4)) is FATAL, "no recovery action follows it"


def sliced(*seen: XidEvent, every: float = 1.0) -> dict[tuple[str, str], Verdict]:
    """What these Xids come to, by number and slice."""
    gpu = Watched("xid", Facts(nvswitch=True), SHIPPED)
    gpu.ledger.watch(GPU, gpu.facts, {(1, 0): "MIG-1", (2, 0): "MIG-2"})
    gpu.see(*seen, look(), every=every)
    return {(key.part, key.device): verdict for key, _, verdict in gpu.ledger.standing(GPU, None)}


def on(xid: int, instance: int | None = None) -> XidEvent:
    return XidEvent(xid, instance, None if instance is None else 0)


@pytest.mark.parametrize(
    ("judged", "other", "here", "apart", "backwards"),
    [(48, 94, DEGRADED, FATAL, False), (48, 94, DEGRADED, FATAL, True), (122, 31, FATAL, DEGRADED, False)],
)
def test_what_comes_with_another_xid_does_so_on_the_same_slice_or_the_whole_gpu(judged, other, here, apart, backwards):
    def come(*seen: XidEvent) -> Verdict:
        found = sliced(*reversed(seen) if backwards else seen)
        return next(verdict for (part, _), verdict in found.items() if part == str(judged))

    slices = not SHIPPED.xids.judge(judged).whole_gpu
    assert come(on(judged), on(other)) is here
    assert come(on(judged, 1), on(other, 1)) is (here if slices else apart)
    assert come(on(judged, 1), on(other, 2)) is apart
    assert come(on(judged), on(other, 1)) is apart


@pytest.mark.parametrize(
    ("first", "second", "verdict"), [(122, 31, FATAL), (31, 122, DEGRADED), (48, 94, DEGRADED), (94, 48, DEGRADED)]
)
@pytest.mark.parametrize("restart", [1, 2])
def test_what_two_xids_come_to_is_decided_at_the_second_and_outlives_a_restart(first, second, verdict, restart):
    """Whether it comes between the two of them, or before the next look."""
    gpu = watched(122 if 122 in (first, second) else 48)
    for at, xid in enumerate((first, second), 1):
        gpu.see(XidEvent(xid), every=2.0)
        if at == restart:
            gpu.restart()
    assert gpu.verdict is verdict
    assert gpu.see(look()) is verdict


@pytest.mark.parametrize("then", [0.4, 3.0, 30.0])
def test_when_what_brings_another_came_last_is_written_down_to_the_second(then):
    gpu = watched(48)
    gpu.see(XidEvent(94), every=then)
    gpu.see(XidEvent(94), every=4.0)
    gpu.restart()
    assert gpu.see(XidEvent(48)) is DEGRADED


def test_what_the_driver_asked_for_outlives_a_kill():
    gpu = watched(48, 0)
    gpu.see(XidEvent(48))
    revision = gpu.ledger.revision
    gpu.see(look(1))
    assert gpu.ledger.revision > revision
    gpu.restart()
    assert gpu.see(*[look(0)] * 100) is FATAL


@pytest.mark.parametrize("others", [[94], [63, 94]])
def test_an_uncorrectable_error_that_was_contained_is_worth_a_look_and_another_makes_the_gpu_unfit(others):
    gpu = watched(48)
    assert gpu.see(XidEvent(48), every=0.1) is FATAL
    assert gpu.see(*map(XidEvent, others), look(), every=0.1) is DEGRADED
    assert gpu.restart() is DEGRADED
    gpu.see(look(), every=10 * MINUTE)
    assert gpu.see(XidEvent(48), look()) is FATAL, "the next is not"
    gpu = watched(48, 0)
    assert gpu.see(XidEvent(48), XidEvent(94), look(1), every=0.1) is FATAL, "the driver asks for a reset"
    gpu = watched(48)
    assert gpu.see(XidEvent(48), XidEvent(63), look(), XidEvent(94), look(), every=6) is FATAL, "of another error"


# Of NVLinks, and of what follows from others


def links(*up: bool) -> Sample:
    return Sample(counting=0, energy=BEFORE, binding=BOUND, nvlinks=up)


def test_an_nvlink_error_is_fatal_while_a_link_that_was_up_is_down():
    gpu = watched(74)
    gpu.see(links(True, True), XidEvent(74))
    assert gpu.see(links(True, True)) is DEGRADED
    assert gpu.see(links(True, False), links(True, False)) is FATAL
    assert gpu.see(*[links(True, True)] * 10) is FATAL, "that it is up again proves no reset"
    assert gpu.see(*[replace(links(True, True), energy=AFTER_RESET + n) for n in (7, 8, 9)]) is OK
    gpu = watched(74)
    gpu.see(links(True, True), links(True, False), links(True, False))
    assert gpu.see(XidEvent(74)) is FATAL


def test_a_driver_that_asks_for_nothing_does_not_mend_a_link():
    gpu = watched(74, 0)
    down = Sample(counting=0, energy=BEFORE, binding=BOUND, nvlinks=(False,), recovery_action=0)
    gpu.see(Sample(counting=0, energy=BEFORE, nvlinks=(True,), recovery_action=0), down, down)
    assert gpu.see(XidEvent(74), *[down] * 40) is FATAL


def test_a_cleanup_is_an_applications_and_the_driver_makes_it_no_worse():
    gpu = watched(45, 0, nvswitch=True)
    assert gpu.see(XidEvent(45), look(1), look(1), XidEvent(45), look(1)) is APP
    assert "a process ended or was killed" in advice(LatchKey("xid", "45"), SHIPPED, GPU, gpu.latch)
    assert wait(gpu, 11 * MINUTE, 0) is OK


def test_a_changed_recovery_action_has_the_driver_asked_at_once():
    gpu = watched(154, 0)
    assert gpu.see(XidEvent(154)) is APP
    assert gpu.ledger.suspicious(GPU)
    gpu.see(look(0))
    assert not gpu.ledger.suspicious(GPU)


# The operator's word


FIRM = [
    shipped({"XID_CONFIG": "31"}),
    shipped({"DP_ENABLE_HEALTHCHECKS": "31"}),
    shipped({"DP_ENABLE_HEALTHCHECKS": "all"}),
    shipped(health={"xid": {"31": "fatal"}}),
    shipped(health={"xidClass": {"application": "fatal"}}),
]


@pytest.mark.parametrize("policy", FIRM)
def test_an_xid_that_an_operator_made_fatal_is_not_lowered_and_takes_a_reset(policy):
    gpu = watched(31, 0, policy)
    assert gpu.see(XidEvent(31), *[look(0)] * 100) is FATAL
    assert PROOFS[Proof.QUIET](gpu, 0) is FATAL
    assert PROOFS[Proof.RESET](gpu, 0) is OK


@pytest.mark.parametrize("word", ["ignore", "app", "degraded"])
def test_an_xid_that_an_operator_made_less_is_not_raised(word):
    gpu = watched(48, 0, shipped(health={"xid": {"48": word}}))
    assert gpu.see(XidEvent(48), XidEvent(48), *[look(1)] * 5) is VERDICTS[word]


def test_the_operators_word_reaches_what_is_open_with_the_next_look():
    gpu = watched(48)
    gpu.see(XidEvent(48), look())
    gpu.ledger.policy = shipped(health={"xid": {"48": "degraded"}})
    assert gpu.see(look()) is DEGRADED
    gpu.ledger.policy = SHIPPED
    assert gpu.see(look()) is FATAL
    gpu.ledger.policy = shipped(health={"xid": {"48": "app"}})
    assert gpu.see(look()) is APP
    gpu.ledger.policy = SHIPPED
    assert gpu.see(*[look()] * 20) is FATAL
    assert gpu.see(*[look(energy=AFTER_RESET)] * 3) is OK
    gpu.see(XidEvent(48))
    gpu.ledger.policy = shipped({"DP_DISABLE_HEALTHCHECKS": "48"})
    assert gpu.see(look()) is OK
    assert not gpu.written


def test_an_operator_who_vouches_for_a_gpu_has_its_xids_forgotten():
    gpu = watched(79)
    gpu.see(XidEvent(79))
    assert gpu.vouch() is OK
    assert gpu.see(XidEvent(79)) is FATAL


# A storm of them


def test_a_storm_of_an_applications_xids_writes_nothing_and_makes_no_latch_grow():
    gpu = watched(13)
    gpu.see(XidEvent(13), every=0.001)
    revision = gpu.ledger.revision
    for _ in range(5_000):
        assert not gpu.ledger.observe(GPU, XidEvent(13), gpu.now)
        gpu.now += 0.003
    assert gpu.ledger.revision == revision
    assert len(gpu.latch.memory.times) == 1
    assert gpu.see(look()) is APP
    assert wait(gpu, 9 * MINUTE, None) is APP
    assert wait(gpu, 2 * MINUTE, None) is OK


@pytest.mark.parametrize("xid", [45, 48, 80, 92, 94, 109, BEYOND])
def test_a_storm_of_any_other_xid_is_told_a_few_times_at_most(xid):
    gpu = watched(xid, nvswitch=True)
    told = sum(len(gpu.ledger.observe(GPU, XidEvent(xid), gpu.now + n * 0.003)) for n in range(2_000))
    assert told <= 2
    assert gpu.ledger.revision <= 4
    assert len(gpu.latch.memory.times) <= 3


def test_an_applications_xid_is_the_same_latch_for_a_second():
    key = LatchKey("xid", "31")
    gpu = watched(31)
    gpu.see(XidEvent(31), every=0.5)

    def latch(ledger: HealthLedger) -> AnyLatch:
        return ledger._records[GPU].latches[key]

    one = latch(gpu.ledger)
    gpu.see(XidEvent(31), every=0.6)
    assert latch(gpu.ledger) is one
    gpu.see(XidEvent(31))
    assert latch(gpu.ledger).memory.times == (1_006.1,)


def test_other_observations_leave_an_xid_alone():
    seen: list[Observation] = [look(), look(fault=Fault.LOST), look(fault=Fault.HUNG), look(fault=Fault.ERROR)]
    assert watched(48).see(*seen) is OK


@pytest.mark.parametrize("xid", [31, 63, 94, 109, 160, 500])
def test_an_xid_that_the_driver_or_its_repetition_made_worse_is_advised_by_what_ends_it(xid):
    gpu = watched(xid, 0)
    seen: list[Observation] = [*[XidEvent(xid)] * 3, *[look(1, BEFORE + n) for n in range(3)]]
    changes = [change for at, each in enumerate(seen) for change in gpu.ledger.observe(GPU, each, gpu.now + 6 * at)]
    own = max(SHIPPED.xids.judge(xid).verdict, APP)
    raised = [change for change in changes if change.xid == xid and change.verdict > own]
    assert {change.action for change in raised} <= {"reset the GPU when no pod has it"}
    assert bool(raised) is (xid != 31), "an application's error alone is never raised"


def test_a_reset_that_the_next_look_would_contradict_ends_no_count():
    """A new process reads one odd energy value, and the next Xid comes before the next look."""
    gpu = watched(74)
    for _ in range(9):
        gpu.see(XidEvent(74), look(0), every=30.0)
    gpu.see(look(0, energy=5))
    assert gpu.see(XidEvent(74)) is FATAL
