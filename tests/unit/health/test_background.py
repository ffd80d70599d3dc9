"""What every signal is told of a GPU, over a restart."""

import msgspec
import pytest

from gpu_plugin.health.evidence import BACKGROUND, Background, Evidence
from gpu_plugin.health.latch import Latch, Marks, Recovery, Verdict
from gpu_plugin.health.observation import Facts, Sample, XidEvent
from tests.unit.health.ledgers import H200, LOST, UNGUARDED, A, hear, ledger
from tests.unit.health.looked_at import LookedAt

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL


def test_what_the_driver_asked_for_before_a_restart_weighs_on_an_xid_after_it():
    gpu = LookedAt("xid", H200, UNGUARDED)
    gpu.see(Sample(recovery_action=1))
    gpu.restart()
    assert gpu.see(XidEvent(63)) is FATAL
    assert gpu.see(*[Sample(recovery_action=0)] * 5) is FATAL


def test_errors_of_memory_between_two_processes_are_new():
    gpu = LookedAt("ecc-uncorrected", Facts())
    gpu.see(Sample(ecc_uncorrected=0, counting=0))
    gpu.restart()
    assert gpu.see(Sample(ecc_uncorrected=1, counting=0)) is FATAL


def test_a_gpu_that_is_lost_while_nobody_looked_needs_its_proof():
    gpu = LookedAt("lost", H200)
    gpu.see(Sample(energy=5_000, binding=1, counting=0))
    gpu.restart()
    assert gpu.see(LOST, *[Sample(energy=5_000, binding=1, counting=0)] * 5) is FATAL
    assert gpu.see(*[Sample(energy=5_000, binding=2, counting=0)] * 3) is OK


def test_it_is_written_down_when_it_says_something_else():
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
        hear(one, seen)
        revisions.append(one.revision - before)
    assert revisions == [0, 1, 0, 1, 1, 0, 1]
    (entry,) = one.evidence()
    assert msgspec.json.decode(msgspec.json.encode(entry), type=Evidence) == entry
    assert entry.known
    assert not entry.lasts
    assert entry.latch() == Latch(Background(0), recovery=Recovery(Marks(1_100, None, 4, 0, 1_000.0)))


@pytest.mark.parametrize("changes", [{"verdict": "FATAL"}, {"part": "1"}, {"device": "MIG-1"}])
def test_what_holds_something_against_a_gpu_is_none(changes):
    latch = Latch(Background(1), recovery=Recovery(Marks(5)))
    entry = msgspec.structs.replace(Evidence.of("boot-1", A, BACKGROUND, latch), **changes)
    assert not entry.known
    new = ledger()
    new.replay([entry])
    assert new.evidence() == ()
    assert new.verdict(A) is OK


def test_a_boot_ends_it():
    one = ledger()
    hear(one, Sample(recovery_action=1, energy=9, counting=0))
    one.booted("boot-2")
    assert {entry.signal for entry in one.evidence()} == {"recovery-action"}


def test_a_look_that_did_not_ask_leaves_what_the_driver_asked_for():
    gpu = LookedAt("xid", H200, UNGUARDED)
    gpu.see(Sample(recovery_action=1), Sample(asked=frozenset({"energy"})))
    assert gpu.see(XidEvent(63)) is FATAL
    gpu = LookedAt("xid", H200, UNGUARDED)
    gpu.see(Sample(recovery_action=1), Sample(recovery_action=0))
    assert gpu.see(XidEvent(63)) is DEGRADED
