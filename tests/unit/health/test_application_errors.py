"""application-errors: errors of several owners within ten minutes, and the owners of pods."""

import pytest

from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.observation import ApplicationError, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals.application_errors import owner
from tests.unit.health.shipped import SHIPPED, shipped
from tests.unit.health.watching import Watched

APP, DEGRADED, FATAL, OK = Verdict.APP, Verdict.DEGRADED, Verdict.FATAL, Verdict.OK
MINUTE = 60.0
A, B, C = frozenset({"train/a"}), frozenset({"train/b"}), frozenset({"serve/c"})
RETRIES = [frozenset({f"train/long-run-{word}"}) for word in ("x7k2p", "b4dfz", "9wqrt")]
UNKNOWN = None  # the pods could not be determined
UNFIT = shipped(health={"signals": {"application-errors": "fatal"}})


def look(energy: int = 50_000, action: int | None = None) -> Sample:
    return Sample(counting=0, energy=energy, recovery_action=action)


def watched(policy: HealthPolicy = SHIPPED) -> Watched:
    gpu = Watched("application-errors", policy=policy)
    gpu.see(look())
    return gpu


def errors(*whose: frozenset[str] | None, xid: int = 43) -> list[ApplicationError]:
    return [ApplicationError(xid, pods) for pods in whose]


@pytest.mark.parametrize(
    ("whose", "verdict"),
    [
        ([A, B, A, B], OK),
        ([A, B, A, B, A], DEGRADED),
        ([A, A, A, A, B], DEGRADED),
        ([A] * 9 + [B], DEGRADED),
        ([A, B, C] * 4, DEGRADED),
        ([A] * 500, OK),
        ([A | B] * 500, OK),
        ([A | B, A | C] * 250, OK),
        ([A | B, B | C, A | C, A | B, A | C], DEGRADED),
        ([UNKNOWN] * 4, OK),
        ([UNKNOWN] * 5, DEGRADED),
        ([UNKNOWN] * 500, DEGRADED),
        ([frozenset()] * 500, DEGRADED),
        ([UNKNOWN] * 4 + [A] * 9, OK),
        ([UNKNOWN] * 4 + [A, B, A, B], OK),
        ([UNKNOWN] * 50 + [A] * 9 + [B], DEGRADED),
        ([B] + [A] * 500, DEGRADED),
        (RETRIES * 100, OK),
    ],
)
def test_five_errors_that_no_single_owner_can_have_caused_are_degraded(whose, verdict):
    assert watched().see(*errors(*whose), every=1.0) is verdict


@pytest.mark.parametrize(("every", "verdict"), [(140.0, DEGRADED), (160.0, OK)])
@pytest.mark.parametrize("whose", [[A, B, A, B, A], [UNKNOWN] * 5])
def test_errors_count_together_within_ten_minutes(whose, every, verdict):
    assert watched().see(*errors(*whose), every=every) is verdict


@pytest.mark.parametrize("between", [[], [UNKNOWN]])
def test_an_owner_of_more_than_ten_minutes_before_does_not_count(between):
    gpu = watched()
    gpu.see(*errors(B), every=11 * MINUTE)
    assert gpu.see(*errors(*between, *[A] * 20), every=1.0) is OK


@pytest.mark.parametrize(
    ("whose", "every", "named"),
    [
        ([A, B, A, B, A], 5.0, ["5 application errors", "train/a, train/b", "Xid 43"]),
        ([A, B, A, B, A, A, B, C, B, A | {"x/y"}], 5.0, ["wedged", "10 ", "serve/c, train/a, train/b and 1 more"]),
        ([A, B] * 5, 66.0, ["wedged"]),
        ([A, B] * 5, 70.0, []),
        ([UNKNOWN] * 5, 5.0, ["pods are unknown", "Xid 43"]),
    ],
)
def test_the_detail_names_the_errors_and_the_owners(whose, every, named):
    gpu = watched()
    assert gpu.see(*errors(*whose), every=every) is DEGRADED
    assert all(each in gpu.latch.detail for each in named)
    assert ("wedged" in gpu.latch.detail) is ("wedged" in named)
    assert gpu.latch.since == 1_005.0 + 4 * every


@pytest.mark.parametrize(
    ("xid", "policy"),
    [
        *[(xid, SHIPPED) for xid in (48, 79, 45, 94, 37, 106, 9999)],
        (43, shipped({"DP_DISABLE_HEALTHCHECKS": "xids"})),
        (43, shipped({"DP_DISABLE_HEALTHCHECKS": "43"})),
        (43, shipped(health={"xid": {"43": "ignore"}})),
        (43, shipped(health={"xidClass": {"application": "ignore"}})),
        (43, shipped(health={"xid": {"43": "fatal"}})),
    ],
)
def test_only_xids_that_the_policy_attributes_to_applications_count(xid, policy):
    assert watched(policy).see(*errors(*[A, B] * 20, xid=xid)) is OK
    assert watched().see(*[XidEvent(43)] * 20) is OK, "nor does an Xid without its pods"


@pytest.mark.parametrize(("word", "verdict"), [("ignore", OK), ("degraded", DEGRADED), ("fatal", FATAL)])
def test_the_policy_sets_the_verdict(word, verdict):
    gpu = watched(shipped(health={"signals": {"application-errors": word}}))
    assert gpu.see(*errors(*[UNKNOWN] * 5)) is verdict


@pytest.mark.parametrize("whose", [[UNKNOWN] * 5, [A, B, A, B, A]])
def test_it_closes_at_a_good_look_ten_minutes_after_the_last_error(whose):
    gpu = watched()
    gpu.see(*errors(*whose))
    for error in errors(whose[0], whose[0]):
        gpu.now += 9 * MINUTE
        assert gpu.see(look(), error) is DEGRADED
    gpu.now += 11 * MINUTE
    for seen in (Sample(fault=Fault.ERROR), Sample(refused=frozenset({"memory_used"}))):
        assert gpu.see(seen) is DEGRADED
    assert gpu.see(look()) is OK
    assert gpu.stored is None


def test_errors_that_are_too_few_are_dropped_after_ten_minutes():
    gpu = watched()
    for seen, stored in ((errors(A, B), True), ([look()], False)):
        gpu.see(*seen)
        assert (gpu.stored is not None) is stored
        gpu.now += 11 * MINUTE


def test_a_fatal_one_closes_after_a_reset_or_under_a_milder_policy():
    gpu = watched(UNFIT)
    assert gpu.see(*errors(*[A, B] * 5)) is FATAL
    assert gpu.latch.proof is Proof.RESET
    assert gpu.see(*[look(50_000 + at) for at in range(100)], every=MINUTE) is FATAL
    assert gpu.steps(look(10), look(20), look(30)) == [FATAL, FATAL, OK]
    gpu.see(*errors(*[A, B] * 5))
    gpu.ledger.judge_by(SHIPPED)
    gpu.now += 11 * MINUTE
    assert gpu.see(look()) is OK


@pytest.mark.parametrize("other", [look(action=None), Sample(fault=Fault.ERROR), ApplicationError(43, A)])
def test_a_fatal_one_closes_if_the_driver_requests_nothing_for_two_minutes(other):
    gpu = watched(UNFIT)
    gpu.see(*errors(*[A, B] * 5))
    calm = [look(action=0)] * 24
    assert gpu.see(*calm, other, *calm) is FATAL
    assert gpu.see(*calm[:1]) is OK


def test_errors_from_before_a_reset_do_not_count_after_it():
    gpu = watched(UNFIT)
    gpu.see(*errors(*[A, B] * 9), every=1.0)
    gpu.see(look(10))
    assert gpu.see(*errors(A, B, A, B), look(20), look(30), every=1.0) is OK


def test_an_override_drops_the_errors():
    gpu = watched()
    gpu.see(*errors(*[A, B] * 5))
    assert gpu.override() is OK
    assert gpu.steps(*errors(A, B, A, B, A)) == [OK] * 4 + [DEGRADED]


@pytest.mark.parametrize("cut", range(11))
def test_a_restart_loses_no_error(cut):
    gpu = watched()
    gpu.see(*errors(*[A, B] * 5)[:cut])
    gpu.restart()
    assert gpu.see(*errors(*[A, B] * 5)[cut:]) is DEGRADED
    assert "wedged" in gpu.latch.detail


def test_a_storm_is_stored_in_bounded_memory():
    gpu = watched()
    gpu.see(*errors(*[UNKNOWN, A] * 1_000), every=0.01)
    assert gpu.stored is not None
    assert (len(gpu.stored.memory.unknown), len(gpu.stored.memory.owned)) == (5, 10)
    revision = gpu.ledger.revision
    gpu.see(*errors(*[UNKNOWN, A] * 1_000), every=0.01)
    assert gpu.ledger.revision == revision
    assert gpu.see(*errors(*[frozenset({f"many/{letter}"}) for letter in "abcdefghi"]), every=0.01) is DEGRADED


@pytest.mark.parametrize(
    ("pod", "made_by"),
    [
        ("ml/web-7d4b9c6f5d-x7k2p", "ml/web"),  # Deployment
        ("ml/web-7d4b9c6f5d-b4dfz", "ml/web"),
        ("ml/train-x7k2p", "ml/train"),  # Job, ReplicaSet, DaemonSet
        ("ml/train-12-x7k2p", "ml/train"),  # Indexed Job
        ("ml/nightly-29384756-x7k2p", "ml/nightly"),  # CronJob
        ("ml/set-workers-0-3-x7k2p", "ml/set-workers"),  # JobSet
        ("ml/db-0", "ml/db"),  # StatefulSet
        ("ml/db-17", "ml/db"),
        ("ml/llama-3-8b-0", "ml/llama-3-8b"),
        ("ml/notebook", "ml/notebook"),
        ("ml/gpu-burner", "ml/gpu-burner"),  # no generated name has a vowel
        ("ml/x7k2p", "ml/x7k2p"),
        ("other/train-x7k2p", "other/train"),
        ("", ""),
        ("a/" + "0-" * 2_000 + "!", "a/" + "0-" * 2_000 + "!"),  # a long name takes no time
    ],
)
def test_the_owner_of_a_pod_is_its_name_without_the_generated_part(pod, made_by):
    assert owner(pod) == made_by
