import pytest

from gpu_plugin.health.latch import AnyLatch, LatchKey, Proof, Verdict
from gpu_plugin.health.observation import ApplicationError, Facts, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.shipped import SHIPPED, shipped
from tests.unit.health.watching import GPU, Watched

APP, DEGRADED, FATAL, OK = Verdict.APP, Verdict.DEGRADED, Verdict.FATAL, Verdict.OK
MINUTE = 60.0
A, B, C = frozenset({"train/a"}), frozenset({"train/b"}), frozenset({"serve/c"})
RETRY_1, RETRY_2, RETRY_3 = (frozenset({f"train/long-run-{word}"}) for word in ("x7k2p", "b4dfz", "9wqrt"))
NOBODY = None
UNFIT = shipped(health={"signals": {"application-errors": "fatal"}})


def watched(policy: HealthPolicy = SHIPPED) -> Watched:
    gpu = Watched("application-errors", Facts(), policy)
    gpu.see(look(50_000))
    return gpu


def look(energy: int = 50_000) -> Sample:
    return Sample(counting=0, energy=energy)


def wish(action: int | None) -> Sample:
    return Sample(counting=0, energy=50_000, recovery_action=action)


def errors(*whose: frozenset[str] | None, xid: int = 43) -> list[ApplicationError]:
    return [ApplicationError(xid, pods) for pods in whose]


def remembered(gpu: Watched) -> AnyLatch | None:
    return gpu.ledger._records[GPU].latches.get(LatchKey("application-errors"))


# How many, and whose


@pytest.mark.parametrize(
    ("whose", "verdict"),
    [
        ([A, B, A, B], OK),
        ([A, B, A, B, A], DEGRADED),
        ([A, A, A, A, B], DEGRADED),
        ([A, B] * 4 + [A], DEGRADED),
        ([A, B] * 5, DEGRADED),
        ([A] * 9 + [B], DEGRADED),
        ([A, B, C] * 4, DEGRADED),
        ([A] * 500, OK),
        ([A | B] * 500, OK),
        ([A | B, A | C] * 250, OK),
        ([A | B, B | C, A | C, A | B, A | C], DEGRADED),
        ([NOBODY] * 4, OK),
        ([NOBODY] * 5, DEGRADED),
        ([NOBODY] * 500, DEGRADED),
        ([frozenset()] * 500, DEGRADED),
        ([NOBODY] * 4 + [A] * 9, OK),
        ([NOBODY] * 4 + [A, B, A, B], OK),
        ([NOBODY] * 50 + [A] * 9 + [B], DEGRADED),
        ([B] + [A] * 500, DEGRADED),
        ([RETRY_1, RETRY_2, RETRY_3] * 100, OK),
    ],
)
def test_only_errors_that_no_one_pod_is_behind_make_a_gpu_suspect(whose, verdict):
    assert watched().see(*errors(*whose), every=1.0) is verdict


@pytest.mark.parametrize(("every", "verdict"), [(140.0, DEGRADED), (160.0, OK)])
def test_five_count_within_ten_minutes(every, verdict):
    assert watched().see(*errors(A, B, A, B, A), every=every) is verdict
    assert watched().see(*errors(*[NOBODY] * 5), every=every) is verdict


def test_ten_within_ten_minutes_are_said_to_be_a_wedged_gpus_and_are_not_worse():
    gpu = watched()
    assert gpu.see(*errors(*[A, B] * 5), every=66.0) is DEGRADED
    assert gpu.latch.detail.startswith("suspected wedged GPU")
    gpu = watched()
    assert gpu.see(*errors(*[A, B] * 5), every=70.0) is DEGRADED
    assert "wedged" not in gpu.latch.detail


def test_a_pod_of_long_ago_is_no_second_one():
    gpu = watched()
    gpu.see(*errors(B), every=11 * MINUTE)
    assert gpu.see(*errors(*[A] * 20), every=1.0) is OK
    gpu = watched()
    gpu.see(*errors(B), every=11 * MINUTE)
    gpu.see(*errors(NOBODY))
    assert gpu.see(*errors(*[A] * 20), every=1.0) is OK


def test_it_says_what_it_has_seen_and_by_whom():
    gpu = watched()
    gpu.see(*errors(A, B, A, B, A))
    assert gpu.latch.detail == (
        "5 application errors within 10 minutes, by pods of train/a, train/b; now Xid 43 (GPU stopped processing)"
    )
    gpu.see(*errors(A, B, C, B, A | frozenset({"x/y"}), xid=31))
    assert gpu.latch.detail == (
        "suspected wedged GPU: 10 application errors within 10 minutes, by pods of serve/c, train/a, train/b and 1 more; "
        "now Xid 31 (GPU memory page fault)"
    )
    assert gpu.latch.since == 1_025.0
    gpu = watched()
    gpu.see(*errors(*[NOBODY] * 5))
    assert "whose pods are unknown; now Xid 43" in gpu.latch.detail


@pytest.mark.parametrize("xid", [48, 79, 45, 94, 37, 106, 9999])
def test_xids_that_are_no_applications_fault_do_not_count(xid):
    assert watched().see(*errors(*[A, B] * 20, xid=xid)) is OK


@pytest.mark.parametrize(
    "policy",
    [
        shipped({"DP_DISABLE_HEALTHCHECKS": "xids"}),
        shipped({"DP_DISABLE_HEALTHCHECKS": "43"}),
        shipped(health={"xid": {"43": "ignore"}}),
        shipped(health={"xidClass": {"application": "ignore"}}),
        shipped(health={"xid": {"43": "fatal"}}),
    ],
)
def test_xids_that_the_operator_judges_otherwise_do_not_count(policy):
    assert watched(policy).see(*errors(*[A, B] * 20)) is OK


@pytest.mark.parametrize("word", ["ignore", "degraded", "fatal"])
def test_the_operator_says_what_it_comes_to(word):
    gpu = watched(shipped(health={"signals": {"application-errors": word}}))
    means = {"ignore": OK, "degraded": DEGRADED, "fatal": FATAL}[word]
    assert gpu.see(*errors(*[NOBODY] * 5)) is means


# The way out


def test_degraded_ends_after_ten_minutes_without_another():
    for whose in ([NOBODY] * 5, [A, B, A, B, A]):
        gpu = watched()
        gpu.see(*errors(*whose))
        gpu.now += 9 * MINUTE
        assert gpu.see(look()) is DEGRADED
        gpu.see(*errors(whose[0]))
        gpu.now += 9 * MINUTE
        assert gpu.see(look()) is DEGRADED
        gpu.now += 2 * MINUTE
        assert gpu.verdict is DEGRADED
        assert gpu.see(Sample(fault=Fault.ERROR)) is DEGRADED
        assert gpu.see(Sample(refused=frozenset({"memory_used"}))) is DEGRADED
        assert gpu.see(look()) is OK
        assert remembered(gpu) is None


def test_silence_or_a_driver_that_cannot_say_what_it_wants_end_nothing_that_an_operator_calls_fatal():
    gpu = watched(UNFIT)
    assert gpu.see(*errors(*[A, B] * 5)) is FATAL
    assert gpu.latch.proof is Proof.RESET
    assert gpu.see(*[look(50_000 + n) for n in range(100)], every=MINUTE) is FATAL
    assert gpu.see(look(10), look(20)) is FATAL
    assert gpu.see(look(30)) is OK


@pytest.mark.parametrize("other", [wish(None), Sample(fault=Fault.ERROR), ApplicationError(43, A)])
def test_a_driver_that_asks_for_nothing_for_two_minutes_ends_what_an_operator_calls_fatal(other):
    gpu = watched(UNFIT)
    gpu.see(*errors(*[A, B] * 5))
    assert gpu.see(*[wish(0)] * 24, other, *[wish(0)] * 24) is FATAL
    assert gpu.see(wish(0)) is OK


def test_errors_from_before_a_reset_say_nothing_of_the_gpu_after_it():
    gpu = watched(UNFIT)
    gpu.see(*errors(*[A, B] * 9), every=1.0)
    gpu.see(look(10))
    assert gpu.see(*errors(A, B, A, B), look(20), look(30), every=1.0) is OK


def test_another_word_of_the_operator_holds_for_what_is_open():
    gpu = watched(UNFIT)
    gpu.see(*errors(*[A, B] * 5))
    gpu.ledger.judge_by(SHIPPED)
    gpu.now += 11 * MINUTE
    assert gpu.see(look()) is OK


def test_what_was_forgotten_before_it_was_worth_a_look_leaves_nothing():
    gpu = watched()
    gpu.see(*errors(A, B))
    assert remembered(gpu) is not None
    gpu.now += 11 * MINUTE
    gpu.see(look())
    assert remembered(gpu) is None


def test_an_operator_who_vouches_for_the_gpu_has_them_forgotten():
    gpu = watched()
    gpu.see(*errors(*[A, B] * 5))
    assert gpu.vouch() is OK
    assert gpu.see(*errors(A, B, A, B)) is OK
    assert gpu.see(*errors(A)) is DEGRADED


# What it remembers


@pytest.mark.parametrize("cut", range(11))
def test_a_restart_in_between_changes_nothing(cut):
    gpu = watched()
    gpu.see(*errors(*[A, B] * 5)[:cut])
    gpu.restart()
    assert gpu.see(*errors(*[A, B] * 5)[cut:]) is DEGRADED
    assert "wedged" in gpu.latch.detail


def test_a_storm_is_remembered_in_little_and_told_once():
    gpu = watched()
    gpu.see(*errors(*[NOBODY, A] * 1_000), every=0.01)
    kept = remembered(gpu)
    assert kept
    assert (len(kept.memory.unknown), len(kept.memory.owned)) == (5, 10)
    revision = gpu.ledger.revision
    gpu.see(*errors(*[NOBODY, A] * 1_000), every=0.01)
    assert gpu.ledger.revision == revision
    gpu.see(*errors(*[frozenset({f"many/{letter}"}) for letter in "abcdefghi"]), every=0.01)
    assert gpu.verdict is DEGRADED


def test_the_xid_itself_is_not_what_counts():
    assert watched().see(*[XidEvent(43)] * 20) is OK
