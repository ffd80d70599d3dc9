"""A GPU is FATAL until this process had a good look at it, and the marks and requests that outlive the process."""

import msgspec
import pytest

from gpu_plugin.health.evidence import BACKGROUND, Background, Evidence, decode
from gpu_plugin.health.latch import NOTHING, Latch, LatchKey, Marks, Recovery, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import CORE, Facts, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import (
    ERROR,
    GUARDED,
    H200,
    HUNG,
    LOST,
    RESET_REQUIRED,
    UNGUARDED,
    UNLOADED,
    VANISHED,
    A,
    B,
    ledger,
    observe,
)
from tests.unit.health.watching import Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
GOOD = Sample(temperature=40)


def unseen(policy: HealthPolicy = GUARDED) -> HealthLedger:
    made = HealthLedger(policy, "boot-1")
    made.watch(A, Facts())
    return made


def test_no_fault_and_no_event_ends_the_first_look():
    new = unseen()
    assert (new.verdict(A), new.reason(A)) == (FATAL, "there has been no good look at it yet")
    assert new.observe(A, XidEvent(31), 1.0)[0].verdict is Verdict.APP
    faults = [VANISHED, UNLOADED, LOST, RESET_REQUIRED, HUNG, ERROR, Sample(refused=CORE)]
    for at, fault in enumerate(faults * 3):
        new.observe(A, fault, 2.0 + at)
        assert new.verdict(A) is FATAL
    new.watch(A, Facts())
    assert new.verdict(A) is FATAL
    (first,) = [latch for key, latch, _ in new.standing(A) if key.signal == "first-look"]
    assert first.since == 2.0


def test_one_good_look_is_enough_and_changes_no_verdict_of_a_signal():
    new = unseen()
    assert new.observe(A, ERROR, 1.0) == ()
    assert ERROR.detail in new.reason(A)
    assert new.unfit(A) == (), "it holds up no proof"
    assert [entry.signal for entry in new.evidence()] == ["unanswered"], "it is not stored"
    revision = new.revision
    assert new.observe(A, GOOD, 2.0) == ()
    assert (new.verdict(A), new.revision > revision) == (OK, True)
    new.observe(A, ERROR, 3.0)
    assert new.verdict(A) is OK
    other = unseen()
    other.observe(A, Sample(temperature=40, refused=frozenset({"utilization"})), 1.0)
    assert other.verdict(A) is OK, "a refused reading of use has a signal of its own"


def test_it_is_a_state_of_this_process_and_this_boot():
    seen, again = unseen(), unseen()
    seen.observe(A, GOOD, 1.0)
    again.replay(
        (*seen.evidence(), Evidence("boot-1", A, "first-look", Latch(NOTHING, FATAL, "of another version", 1.0)))
    )
    assert again.verdict(A) is FATAL
    again.observe(A, GOOD, 2.0)
    assert again.verdict(A) is OK
    seen.booted("boot-2")
    assert seen.verdict(A) is FATAL
    seen.watch("index-0", Facts())
    seen.observe("index-0", GOOD, 1.0)
    seen.rename("index-0", B)
    assert (seen.verdict(B), seen.verdict(A)) == (OK, FATAL)


def test_neither_a_policy_nor_an_override_ends_it():
    new = unseen(HealthPolicy(judging=False))
    new.override(A)
    assert new.verdict(A) is FATAL
    assert [key.signal for key, _, _ in new.standing(A, "MIG-1")] == ["first-look"]
    new.observe(A, GOOD, 1.0)
    assert new.verdict(A) is OK


# The background: marks of a GPU and the last request of its driver


@pytest.mark.parametrize(
    ("signal", "facts", "before", "after", "verdict"),
    [
        ("xid", H200, [Sample(recovery_action=1)], [XidEvent(63), *[Sample(recovery_action=0)] * 5], FATAL),
        ("xid", H200, [Sample(recovery_action=1), Sample(asked=frozenset({"energy"}))], [XidEvent(63)], FATAL),
        ("xid", H200, [Sample(recovery_action=1), Sample(recovery_action=0)], [XidEvent(63)], DEGRADED),
        (
            "ecc-uncorrected",
            Facts(),
            [Sample(ecc_uncorrected=0, counting=0)],
            [Sample(ecc_uncorrected=1, counting=0)],
            FATAL,
        ),
        (
            "lost",
            H200,
            [Sample(energy=5_000, binding=1, counting=0)],
            [LOST, *[Sample(energy=5_000, binding=1, counting=0)] * 5],
            FATAL,
        ),
        (
            "lost",
            H200,
            [Sample(energy=5_000, binding=1, counting=0)],
            [LOST, *[Sample(energy=5_000, binding=2, counting=0)] * 3],
            OK,
        ),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_look_showed_before_counts_for_later_evidence(signal, facts, before, after, verdict, restarts):
    gpu = Watched(signal, facts, UNGUARDED)
    gpu.see(*before)
    if restarts:
        gpu.restart()
    assert gpu.see(*after) is verdict


def test_it_is_stored_when_it_changed():
    one = ledger()
    revisions = []
    for seen in (
        Sample(),
        Sample(energy=900, counting=0),
        Sample(energy=1_000, counting=0),
        Sample(energy=1_100, counting=0),
        Sample(recovery_action=0),
        Sample(recovery_action=0),
        Sample(binding=4, recovery_action=0),
    ):
        before = one.revision
        observe(one, seen)
        revisions.append(one.revision - before)
    assert revisions == [0, 1, 0, 1, 1, 0, 1]
    (entry,) = one.evidence()
    assert decode(msgspec.json.encode(entry)) == entry
    assert (entry.known, entry.lasts) == (True, False)
    assert entry.latch == Latch(Background(0), recovery=Recovery(Marks(1_100, None, 4, 0, 1_000.0)))
    observe(one, Sample(recovery_action=1, energy=1_200, counting=0))
    one.booted("boot-2")
    assert {entry.signal for entry in one.evidence()} == {"recovery-action"}, "a boot ends it"


@pytest.mark.parametrize(("part", "device", "verdict"), [("", "", FATAL), ("1", "", OK), ("", "MIG-1", OK)])
def test_an_entry_with_a_verdict_or_a_part_is_no_background(part, device, verdict):
    latch = Latch(Background(1), verdict, recovery=Recovery(Marks(5)))
    entry = Evidence.of("boot-1", A, LatchKey(BACKGROUND.signal, part, device), latch)
    assert not entry.known
    new = ledger()
    new.replay([entry])
    assert new.evidence() == ()
    assert new.verdict(A) is OK
