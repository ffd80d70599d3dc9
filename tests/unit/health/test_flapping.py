"""flapping: a GPU that a signal made FATAL three times within an hour is held back."""

import pytest

from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.observation import Fault, Observation, Order, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import GUARDED, HUNG, UNGUARDED, A, B, energies, ledger, observe, restarted

HOUR, DAY = 3_600.0, 86_400.0
GOOD = Sample(temperature=40)


class Clocked:
    """A ledger and a clock that the test moves."""

    def __init__(self, policy: HealthPolicy = GUARDED) -> None:
        self.ledger = ledger(policy=policy)
        self.now = 1_700_000_000.0

    def see(self, *seen: Observation, later: float = 0.0) -> list[Transition]:
        """Return the changes by these observations, one a second, `later` from now."""
        self.now += later
        changes = observe(self.ledger, *seen, start=self.now)
        self.now += len(seen)
        return changes

    def hang(self, times: int = 1, every: float = 60.0) -> list[Transition]:
        """Return the changes by a GPU that hangs and answers again, once every `every` seconds."""
        changes: list[Transition] = []
        for _ in range(times):
            began = self.now
            changes += self.see(HUNG, GOOD, GOOD, GOOD)
            self.now = began + every
        return changes

    @property
    def reason(self) -> str:
        return self.ledger.reason(A)


@pytest.fixture
def gpu():
    return Clocked()


def test_the_third_drop_within_an_hour_holds_a_gpu_back_for_an_hour(gpu):
    gpu.hang(2)
    assert gpu.reason == ""
    began = gpu.now
    (guarded,) = [change for change in gpu.hang() if change.signal == "flapping"]
    assert (guarded.verdict, guarded.before, guarded.since) == (Verdict.FATAL, Verdict.OK, began)
    assert all(words in gpu.reason for words in ("hung", "3 times", "1 h"))
    gpu.now = began + HOUR - 1
    for verdict in (Verdict.FATAL, Verdict.OK):
        gpu.see(GOOD)
        assert gpu.ledger.verdict(A) is verdict
    assert gpu.ledger.verdict(B) is Verdict.OK


@pytest.mark.parametrize(
    "seen", [HUNG, Sample(fault=Fault.ERROR), Sample(temperature=40, refused=frozenset({"energy"}))]
)
def test_only_a_good_look_ends_the_hold(gpu, seen):
    gpu.hang(3)
    gpu.see(seen, later=HOUR)
    assert "held back" in gpu.reason


@pytest.mark.parametrize(("every", "held"), [(HOUR / 2, True), (HOUR / 2 + 1, False)])
def test_three_drops_count_together_within_an_hour(gpu, every, held):
    gpu.hang(3, every)
    assert bool(gpu.reason) is held


@pytest.mark.parametrize(
    "seen",
    [
        [
            *[HUNG, GOOD, GOOD, GOOD] * 2,
            *[Sample(fault=Fault.RESET_REQUIRED), GOOD, GOOD, GOOD],
            *[Sample(counting=0, recovery_action=action) for action in (1, 0, 0, 0)],
        ],  # of several signals
        [Order("cordon"), Order("uncordon"), Order("release"), Order("resume"), GOOD] * 20,
        [*[HUNG] * 100, *[XidEvent(48)] * 100],  # it stays FATAL
    ],
)
def test_other_changes_do_not_count(gpu, seen):
    gpu.see(*seen)
    assert "held back" not in gpu.reason


def test_each_xid_counts_for_itself(gpu):
    for at, xid in enumerate((46, 48, 46, 48), 1):
        gpu.see(XidEvent(xid), *energies(1_000 * at, at, at, at))
        assert gpu.reason == ""
    gpu.see(XidEvent(46))
    assert "xid 46 made it unfit 3 times" in gpu.reason


def test_each_hold_is_twice_as_long_up_to_a_day(gpu):
    held = []
    for _ in range(8):
        gpu.hang(3)
        held.append(next(latch.memory.hold for key, latch, _ in gpu.ledger.standing(A) if key.signal == "flapping"))
        gpu.see(GOOD, later=held[-1])
        assert gpu.reason == ""
    assert [value / HOUR for value in held] == [1, 2, 4, 8, 16, 24, 24, 24]


def test_a_drop_during_the_hold_starts_a_longer_one(gpu):
    gpu.hang(3)
    gpu.now += HOUR / 2
    gpu.hang()
    assert "2 h" in gpu.reason
    gpu.see(GOOD, later=HOUR)
    assert gpu.reason


@pytest.mark.parametrize(("calm", "hold"), [(DAY - 10, "2 h"), (DAY + 10, "1 h")])
def test_after_a_day_without_drops_the_next_hold_is_short_again(gpu, calm, hold):
    began = gpu.now
    gpu.hang(3, every=1.0)
    for later in (10, calm):
        gpu.now = began + HOUR + later
        gpu.see(GOOD)
    gpu.hang(3)
    assert f"held back for {hold}" in gpu.reason


def test_a_count_is_dropped_after_an_hour(gpu):
    gpu.hang(2)
    assert [entry.signal for entry in gpu.ledger.evidence()] == ["flapping"]
    gpu.see(GOOD, later=HOUR)
    assert gpu.ledger.evidence() == ()


@pytest.mark.parametrize("hangs", [1, 2, 3, 4])
def test_a_restart_keeps_the_count_the_hold_and_its_length(gpu, hangs):
    other = Clocked()
    for at in range(6):
        for each in (gpu, other):
            each.hang()
        if at + 1 == hangs:
            other.ledger = restarted(other.ledger)
        assert other.reason == gpu.reason
        for each in (gpu, other):
            each.now += HOUR / 10
    assert "held back" in gpu.reason


@pytest.mark.parametrize("ended", ["override", "policy", "boot"])
def test_an_override_a_policy_without_guard_and_a_boot_end_the_hold(gpu, ended):
    gpu.hang(3)
    if ended == "override":
        (change,) = gpu.ledger.override(A)
        assert (change.signal, change.verdict) == ("flapping", Verdict.OK)
        gpu.hang(2)
    elif ended == "policy":
        gpu.ledger.policy = UNGUARDED
    else:
        gpu.ledger.booted("boot-2")
        assert gpu.reason
    gpu.see(GOOD)
    assert gpu.reason == ""


def test_without_a_guard_nothing_counts():
    gpu = Clocked(UNGUARDED)
    gpu.hang(20)
    assert gpu.reason == ""
    assert gpu.ledger.evidence() == ()


def test_a_clock_that_was_set_back_does_not_lengthen_the_hold(gpu):
    gpu.hang(3)
    gpu.see(GOOD, later=-20 * DAY)
    assert gpu.reason
    gpu.see(GOOD, later=HOUR)
    assert gpu.reason == ""
    gpu.see(GOOD, later=DAY + HOUR)
    assert gpu.ledger.evidence() == ()


def test_a_mig_device_is_held_back_alone():
    one = ledger(A, slices={(1, 0): "MIG-1", (2, 0): "MIG-2"})
    for at in range(1, 4):
        observe(one, XidEvent(46, 1, 0), *energies(at * 1_000, at, at, at), start=1_000.0 + 5 * at)
    assert [uuid for uuid in ("", "MIG-1", "MIG-2") if one.reason(A, uuid)] == ["MIG-1"]
    assert "xid 46" in one.reason(A, "MIG-1")
