"""Xids and looks over hours: how long a GPU is unfit, and which faults become less without a request of the driver."""

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import LatchKey, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import (
    Fabric,
    Facts,
    Fault,
    Observation,
    Sample,
    XidEvent,
    facts,
)
from tests.unit.health.ledgers import GUARDED
from tests.unit.health.watching import GPU

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
MINUTE, HOUR = 60.0, 3_600.0
CORE = frozenset({"temperature", "energy", "memory_used"})

# FATAL Xids that NVIDIA's catalog does not link to a change of the recovery action
UNLINKED = [46, 54, 61, 119, 123, 140, 151, 167, 168, 169, 171, 172]

# FATAL Xids that it does link, by the first driver branch
LINKED = {0: [158], 565: [48, 62, 64, 95, 110, 120, 136, 150, 155, 156], 575: [143]}
linked = pytest.mark.parametrize(("xid", "branch"), [(xid, branch) for branch, xids in LINKED.items() for xid in xids])


class TimeLine:
    """A GPU under the shipped policy with the flap guard, with a look every five seconds by a clock of its own.

    `branch` is the driver's, `action` is its request (field 230), None if it does not report one. `unfit` adds up the seconds
    in which the GPU was FATAL.
    """

    def __init__(self, branch: int | None = 580, action: int | None = 0) -> None:
        self.now, self.energy, self.action, self.unfit = 1_000_000.0, 10_000_000, action, 0.0
        self.ledger = HealthLedger(GUARDED)
        self.ledger.watch(GPU, Facts(nvswitch=True, says_action=action is not None, driver_branch=branch))
        self.look()

    def see(self, *seen: Observation) -> Verdict:
        for each in seen:
            self.ledger.observe(GPU, each, self.now)
        return self.verdict

    def xid(self, *xids: int) -> Verdict:
        return self.see(*map(XidEvent, xids))

    def look(self, **readings: object) -> Verdict:
        default = {
            "temperature": 40,
            "energy": self.energy,
            "memory_used": 1,
            "counting": 0,
            "recovery_action": self.action,
        }
        return self.see(Sample(**default | readings))  # type: ignore[arg-type]

    def run(self, seconds: float, every: float = 5.0, **readings: object) -> Verdict:
        """Look at the GPU during these seconds, and return the verdict after them."""
        end = self.now + seconds
        while self.now < end:
            step = min(every, end - self.now)
            self.unfit += step if self.verdict is FATAL else 0.0
            self.now += step
            self.energy += int(100_000 * step)
            self.look(**readings)
        return self.verdict

    def request(self, action: int, seconds: float) -> Verdict:
        """Return the verdict after the driver requested this for `seconds`."""
        self.action = action
        return self.run(seconds)

    def repeat(self, xids: list[int], every: float, hours: float) -> float:
        """Return the hours for which the GPU was unfit with these Xids six seconds apart, again after `every` seconds."""
        for _ in range(round(hours * HOUR / every)):
            for xid in xids:
                self.xid(xid)
                self.run(6.0)
            self.run(every - 6.0 * len(xids))
        return self.unfit / HOUR

    def reset(self) -> Verdict:
        self.energy = 1_000
        return self.run(30.0)

    @property
    def verdict(self) -> Verdict:
        return self.ledger.verdict(GPU)

    def of(self, xid: int) -> Verdict:
        return next((v for key, _, v in self.ledger.standing(GPU) if key == LatchKey("xid", str(xid))), OK)


# A driver that requests nothing


@pytest.mark.parametrize("xid", UNLINKED)
def test_an_unlinked_xid_stays_fatal_until_a_reset(xid):
    gpu = TimeLine()
    assert gpu.xid(xid) is FATAL
    assert gpu.run(HOUR) is FATAL
    gpu.ledger.booted("next")
    assert gpu.run(30.0) is OK


@linked
def test_a_linked_xid_is_degraded_after_two_minutes_without_a_request(xid, branch):
    gpu = TimeLine(branch or 550)
    assert gpu.xid(xid) is FATAL
    assert gpu.run(119.0) is FATAL
    assert gpu.run(10.0) is DEGRADED
    assert gpu.xid(xid) is FATAL, "the next one"
    for older in (branch - 1, None) if branch else ():
        gpu = TimeLine(older)
        gpu.xid(xid)
        assert gpu.run(HOUR) is FATAL, "the driver is older than the link, or of an unknown version"
        assert gpu.reset() is OK


@pytest.mark.parametrize(
    ("version", "branch"),
    [("580.159.04", 580), ("565.57.01", 565), ("580", 580), ("", None), ("unknown", None), (".5", None)],
)
def test_the_branch_is_the_first_number_of_the_drivers_version(version, branch):
    assert facts(Gpu(GPU, 0), version).driver_branch == branch


@pytest.mark.parametrize(
    "broken",
    [
        {"fault": Fault.ERROR},
        {"fault": Fault.HUNG},
        *[{"refused": frozenset({name})} for name in ("temperature", "memory_used")],
        {"refused": frozenset({"energy"}), "energy": None},
        *[{"unknown": frozenset({name}), name: None} for name in sorted(CORE)],
        {"recovery_action": None},
        {"recovery_action": 5},
    ],
    ids=str,
)
def test_the_two_minutes_start_again_after_a_look_that_is_not_clean(broken):
    gpu = TimeLine()
    gpu.xid(48)
    gpu.run(115.0)
    gpu.look(**broken)
    gpu.run(20.0)
    assert gpu.of(48) is FATAL
    gpu.run(130.0)
    assert gpu.of(48) is DEGRADED


def test_only_the_time_of_looks_that_requested_the_action_counts():
    gpu = TimeLine()
    gpu.xid(48)
    gpu.run(10.0)
    gpu.now += 10 * MINUTE  # without a look
    assert gpu.run(60.0) is FATAL
    gpu.now -= HOUR  # the clock was corrected
    assert gpu.run(110.0) is FATAL
    assert gpu.run(20.0) is DEGRADED
    gpu = TimeLine()
    gpu.xid(48)
    for _ in range(11):
        gpu.run(5.0)
        gpu.run(5.0, recovery_action=None, asked=CORE)
    assert gpu.verdict is FATAL
    assert gpu.run(20.0) is DEGRADED


def test_a_restart_starts_the_two_minutes_again():
    gpu, other = TimeLine(), TimeLine()
    gpu.xid(48)
    gpu.run(110.0)
    other.now, other.energy = gpu.now, gpu.energy
    other.ledger.replay(gpu.ledger.evidence())
    assert other.run(115.0) is FATAL
    assert other.run(15.0) is DEGRADED


def test_a_lowered_verdict_is_fatal_again_under_a_driver_without_the_link():
    gpu = TimeLine(580)
    gpu.xid(48)
    assert gpu.run(130.0) is DEGRADED
    gpu.ledger.watch(GPU, Facts(says_action=True, driver_branch=550))
    assert gpu.run(5.0) is FATAL


# Repeated Xids


@pytest.mark.parametrize(
    ("xids", "every", "hours", "action"),
    [
        ([121], 10 * MINUTE, 6.0, 0),
        ([121], 10 * MINUTE, 6.0, None),
        ([149], 20 * MINUTE, 4.0, 0),
        ([109, 109], 10 * MINUTE, 6.0, 0),
        ([109, 109], 10 * MINUTE, 6.0, None),
        ([109], MINUTE, 2.0, None),
        ([45], 30.0, 2.0, 0),
        ([31, 43, 45], MINUTE, 2.0, 0),
    ],
)
def test_xids_of_a_sound_gpu_never_make_it_unfit(xids, every, hours, action):
    gpu = TimeLine(action=action)
    assert gpu.repeat(xids, every, hours) == 0.0
    assert gpu.verdict <= DEGRADED


def test_only_a_fault_that_a_reset_ended_counts_for_the_flap_guard():
    gpu = TimeLine()
    unfit = gpu.repeat([95], 10 * MINUTE, 4.0)
    assert unfit == pytest.approx(24 * 120 / HOUR, rel=0.1)
    assert not [key for key, _, _ in gpu.ledger.standing(GPU) if key.signal == "flapping"]
    gpu = TimeLine()
    for _ in range(3):
        gpu.xid(95)
        gpu.request(1, MINUTE)
        gpu.action = 0
        gpu.reset()
        gpu.energy = 10_000_000
    assert "xid 95" in {key.part for key, _, _ in gpu.ledger.standing(GPU) if key.signal == "flapping"}


# Xids whose meaning depends on something else


def test_a_cleanup_is_degraded_only_while_the_fabric_is_not_joined():
    gpu = TimeLine()
    joined, waiting = Fabric(3, 0, 0, 1), Fabric(2)
    links = (True, True)
    gpu.run(10.0, fabric=joined, nvlinks=links)
    gpu.xid(45)
    assert gpu.run(MINUTE, fabric=joined, nvlinks=links) is APP
    gpu.run(20.0, fabric=waiting, nvlinks=links)
    assert gpu.of(45) is DEGRADED
    assert gpu.run(20.0, fabric=joined, nvlinks=links) is APP
    assert gpu.run(10 * MINUTE, fabric=joined, nvlinks=links) is OK


@pytest.mark.parametrize(
    ("before", "seconds", "between", "verdict"),
    [
        ([], 0.0, 4.0, FATAL),  # a page fault after Xid 122, and none before
        ([31], 0.5, 2.0, FATAL),  # the driver reports errors of one instant in any order
        ([31], 11 * MINUTE, 2.0, FATAL),
        ([31], 1.5, 2.0, DEGRADED),  # the application fails again and again
        ([31], 4.0, 2.0, DEGRADED),
        ([31], 9 * MINUTE, 2.0, DEGRADED),
    ],
)
def test_page_faults_explain_xid_122_unless_they_came_before_it(before, seconds, between, verdict):
    gpu = TimeLine(action=None)
    gpu.xid(*before)
    if seconds < 1.0:
        gpu.now += seconds
    else:
        gpu.run(seconds)
    assert gpu.xid(122) is DEGRADED
    assert gpu.run(between) is DEGRADED
    gpu.xid(31)
    assert gpu.run(MINUTE) is verdict
    assert verdict is DEGRADED or gpu.reset() <= APP


def test_a_page_fault_in_the_instant_of_xid_122_is_explained_by_those_of_minutes_before():
    gpu = TimeLine(action=None)
    for pause in (0.0, 9 * MINUTE, 8 * MINUTE):
        gpu.run(pause)
        gpu.xid(31)
    gpu.now += 0.5
    gpu.xid(122, 31)
    assert gpu.run(MINUTE) is DEGRADED
