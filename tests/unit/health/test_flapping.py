import pytest

from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Fault, Observation, Order, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals.flapping import after_drop
from tests.unit.health.ledgers import GUARDED, H200, HUNG, UNGUARDED, A, B, observe, ledger

HOUR, DAY = 3_600.0, 86_400.0
GOOD = Sample(temperature=40)


class Clocked:
    """A ledger of one GPU, and the time."""

    def __init__(self, policy: HealthPolicy = GUARDED) -> None:
        self.policy = policy
        self.ledger = ledger(policy=policy)
        self.now = 1_700_000_000.0

    def see(self, *seen: Observation, every: float = 1.0) -> list[Transition]:
        changes: list[Transition] = []
        for observation in seen:
            changes += self.ledger.observe(A, observation, self.now)
            self.now += every
        return changes

    def hang(self, times: int = 1, every: float = 60.0) -> list[Transition]:
        """The GPU hangs and answers again, so many times, once every so many seconds."""
        changes: list[Transition] = []
        for _ in range(times):
            began = self.now
            changes += self.see(HUNG, GOOD, GOOD, GOOD)
            self.now = began + every
        return changes

    def restart(self) -> None:
        evidence = self.ledger.evidence()
        self.ledger = ledger(policy=self.policy)
        self.ledger.replay(evidence)

    @property
    def reason(self) -> str:
        return self.ledger.reason(A)


@pytest.fixture
def gpu():
    return Clocked()


def test_the_third_time_within_an_hour_holds_a_gpu_back_for_one(gpu):
    gpu.hang(2)
    assert gpu.reason == ""
    began = gpu.now
    changes = gpu.hang()
    assert gpu.reason == "hung made it unfit 3 times; it is held back for 1 h"
    (guarded,) = [change for change in changes if change.signal == "flapping"]
    assert (guarded.verdict, guarded.before, guarded.since) == (Verdict.FATAL, Verdict.OK, began)
    gpu.now = began + HOUR - 1
    gpu.see(GOOD)
    assert gpu.ledger.verdict(A) is Verdict.FATAL
    gpu.see(GOOD)
    assert gpu.ledger.verdict(A) is Verdict.OK
    assert gpu.ledger.verdict(B) is Verdict.OK


def test_a_gpu_is_let_back_by_a_look_that_is_good(gpu):
    gpu.hang(3)
    gpu.now += HOUR
    gpu.see(HUNG)
    assert "held back" in gpu.reason
    gpu.see(Sample(fault=Fault.ERROR))
    assert "held back" in gpu.reason
    gpu.see(Sample(temperature=40, refused=frozenset({"energy"})))
    assert "held back" in gpu.reason


@pytest.mark.parametrize(("every", "held"), [(HOUR / 2, True), (HOUR / 2 + 1, False)])
def test_three_times_count_together_within_an_hour(gpu, every, held):
    gpu.hang(3, every)
    assert bool(gpu.reason) is held


def test_different_signals_do_not_count_together(gpu):
    gpu.see(HUNG, GOOD, GOOD, GOOD)
    gpu.see(Sample(fault=Fault.RESET_REQUIRED), GOOD, GOOD, GOOD)
    gpu.see(Sample(counting=0, recovery_action=1), *[Sample(counting=0, recovery_action=0)] * 3)
    gpu.see(HUNG, GOOD, GOOD, GOOD)
    assert gpu.reason == ""


def test_different_xids_do_not_count_together():
    gpu = Clocked()
    for at, xid in enumerate((46, 48, 46, 48), 1):
        gpu.see(XidEvent(xid), Sample(counting=0, energy=1_000 * at), *[Sample(counting=0, energy=at)] * 3)
        assert gpu.reason == ""
    gpu.see(XidEvent(46))
    assert "xid 46 made it unfit 3 times" in gpu.reason


def test_what_stays_unfit_is_no_flapping(gpu):
    gpu.see(*[HUNG] * 100, *[XidEvent(48)] * 100)
    assert "held back" not in gpu.reason


def test_orders_never_count(gpu):
    for _ in range(20):
        gpu.see(Order("cordon"), Order("uncordon"), Order("release"), Order("resume"), GOOD)
    assert gpu.ledger.evidence() == ()
    assert gpu.reason == ""


def test_it_is_held_for_twice_as_long_each_time_and_a_day_at_most(gpu):
    held = []
    for _ in range(8):
        gpu.hang(3)
        held.append(next(latch.memory.hold for key, latch, _ in gpu.ledger.standing(A) if key.signal == "flapping"))
        gpu.now = max(gpu.now, held[-1] + gpu.now)
        gpu.see(GOOD)
        assert gpu.reason == ""
    assert [value / HOUR for value in held] == [1, 2, 4, 8, 16, 24, 24, 24]


def test_what_falls_while_it_is_held_is_held_anew(gpu):
    gpu.hang(3)
    gpu.now += HOUR / 2
    gpu.hang()
    assert "held back for 2 h" in gpu.reason
    gpu.now += HOUR
    gpu.see(GOOD)
    assert gpu.reason


@pytest.mark.parametrize(("calm", "hold"), [(DAY - 10, "2 h"), (DAY + 10, "1 h")])
def test_a_day_of_calm_after_the_hold_is_forgiveness(gpu, calm, hold):
    began = gpu.now
    gpu.hang(3, every=1.0)
    gpu.now = began + HOUR + 10
    gpu.see(GOOD)
    gpu.now = began + HOUR + calm
    gpu.see(GOOD)
    gpu.hang(3)
    assert f"held back for {hold}" in gpu.reason


def test_a_count_that_came_to_nothing_is_forgotten_after_an_hour(gpu):
    gpu.hang(2)
    assert [entry.signal for entry in gpu.ledger.evidence()] == ["flapping"]
    gpu.now += HOUR
    gpu.see(GOOD)
    assert gpu.ledger.evidence() == ()


@pytest.mark.parametrize("hangs", [1, 2, 3, 4])
def test_a_restart_forgets_neither_the_count_nor_the_hold_nor_its_length(hangs):
    whole, cut = Clocked(), Clocked()
    for at in range(6):
        whole.hang()
        cut.hang()
        if at + 1 == hangs:
            cut.restart()
        assert cut.reason == whole.reason
        whole.now += HOUR / 10
        cut.now += HOUR / 10
    assert "held back" in whole.reason


def test_an_operator_who_vouches_for_a_gpu_ends_the_hold_and_the_count(gpu):
    gpu.hang(3)
    (change,) = gpu.ledger.override(A)
    assert (change.signal, change.verdict) == ("flapping", Verdict.OK)
    gpu.hang(2)
    assert gpu.reason == ""


def test_without_a_guard_nothing_is_counted():
    gpu = Clocked(UNGUARDED)
    gpu.hang(20)
    assert gpu.reason == ""
    assert gpu.ledger.evidence() == ()


def test_a_guard_that_is_taken_away_lets_go(gpu):
    gpu.hang(3)
    gpu.ledger.policy = UNGUARDED
    gpu.see(GOOD)
    assert gpu.reason == ""


def test_a_new_boot_ends_the_hold(gpu):
    gpu.hang(3)
    gpu.ledger.booted("boot-2")
    assert gpu.reason
    gpu.see(GOOD)
    assert gpu.reason == ""


def test_a_clock_that_was_set_back_holds_no_gpu_for_longer_than_its_time(gpu):
    gpu.hang(3)
    gpu.now -= 20 * DAY
    gpu.see(GOOD)
    assert gpu.reason
    gpu.now += HOUR
    gpu.see(GOOD)
    assert gpu.reason == ""
    gpu.now += DAY + HOUR
    gpu.see(GOOD)
    assert gpu.ledger.evidence() == ()


def test_a_slice_that_flaps_leaves_the_others_alone():
    one = HealthLedger(GUARDED)
    one.watch(A, H200, {(1, 0): "MIG-1", (2, 0): "MIG-2"})
    now = 1_000.0
    for at in range(1, 4):
        observe(
            one,
            XidEvent(46, 1, 0),
            Sample(counting=0, energy=at * 1_000),
            *[Sample(counting=0, energy=at)] * 3,
            start=now,
        )
        now += 5
    assert {uuid: bool(one.reason(A, uuid)) for uuid in ("", "MIG-1", "MIG-2")} == {
        "": False,
        "MIG-1": True,
        "MIG-2": False,
    }
    assert one.reason(A, "MIG-1") == "xid 46 made it unfit 3 times; it is held back for 1 h"


def test_shorter_holds_are_told_in_minutes_and_seconds():
    for hold, words in ((90.0, "for 1 min 30 s"), (120.0, "for 2 min"), (45.0, "for 45 s")):
        latch = None
        for at in (1.0, 2.0, 3.0):
            latch = after_drop(latch, "hung", at, hold)
        assert latch is not None
        assert latch.detail.endswith(words)
