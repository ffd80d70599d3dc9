"""Xids and looks over hours: how long a GPU is held back, and which faults a driver that asks for nothing makes less."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import LatchKey, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import (
    ApplicationError,
    Fabric,
    Facts,
    Fault,
    Observation,
    Order,
    Sample,
    XidEvent,
    facts,
)
from tests.unit.health.ledgers import GUARDED
from tests.unit.health.watching import GPU

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
MINUTE, HOUR = 60.0, 3_600.0
UNLINKED = [46, 54, 61, 119, 123, 140, 151, 167, 168, 169, 171, 172]
"""FATAL Xids that NVIDIA's catalogue does not link to a change of the recovery action."""
LINKED = {
    48: 565,
    62: 565,
    64: 565,
    95: 565,
    110: 565,
    120: 565,
    136: 565,
    143: 575,
    150: 565,
    155: 565,
    156: 565,
    158: 0,
}
"""FATAL Xids that it does link, each with the first driver branch."""


class TimeLine:
    """A GPU under the shipped policy with the flap guard, looked at every five seconds by a clock of its own.

    Its energy counter grows; `branch` is the driver's, `action` what it asks for (field 230), None: it does not say.
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

    def look(self, **what: object) -> Verdict:
        said = {
            "temperature": 40,
            "energy": self.energy,
            "memory_used": 1,
            "counting": 0,
            "recovery_action": self.action,
        }
        return self.see(Sample(**said | what))  # type: ignore[arg-type]

    def run(self, seconds: float, every: float = 5.0, **what: object) -> Verdict:
        """Look at the GPU during these seconds, and add up those in which it was unfit."""
        end = self.now + seconds
        while self.now < end:
            step = min(every, end - self.now)
            self.unfit += step if self.verdict is FATAL else 0.0
            self.now += step
            self.energy += int(100_000 * step)
            self.look(**what)
        return self.verdict

    def repeat(self, xids: list[int], every: float, hours: float) -> float:
        """Xids six seconds apart, again after `every` seconds. Returns the hours for which the GPU was unfit."""
        for _ in range(round(hours * HOUR / every)):
            for xid in xids:
                self.see(XidEvent(xid))
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


# A driver that asks for nothing


@pytest.mark.parametrize("xid", UNLINKED)
def test_an_xid_that_no_recovery_action_follows_stays_fatal_until_a_reset(xid):
    gpu = TimeLine()
    assert gpu.see(XidEvent(xid)) is FATAL
    assert gpu.run(HOUR) is FATAL
    gpu.ledger.booted("next")
    assert gpu.run(30.0) is OK


@pytest.mark.parametrize(("xid", "branch"), LINKED.items())
def test_an_xid_that_the_recovery_action_follows_is_lowered_after_two_minutes(xid, branch):
    gpu = TimeLine(branch or 550)
    assert gpu.see(XidEvent(xid)) is FATAL
    assert gpu.run(119.0) is FATAL
    assert gpu.run(10.0) is DEGRADED
    assert gpu.see(XidEvent(xid)) is FATAL, "the next one"


@pytest.mark.parametrize(("xid", "branch"), [(xid, branch) for xid, branch in LINKED.items() if branch])
def test_a_driver_from_before_the_link_or_of_an_unknown_version_lowers_nothing(xid, branch):
    for driver in (branch - 1, None):
        gpu = TimeLine(driver)
        gpu.see(XidEvent(xid))
        assert gpu.run(HOUR) is FATAL
        assert gpu.reset() is OK


@pytest.mark.parametrize(
    ("version", "branch"),
    [("580.159.04", 580), ("565.57.01", 565), ("580", 580), ("", None), ("unknown", None), (".5", None)],
)
def test_the_branch_is_read_from_the_version_of_the_driver(version, branch):
    assert facts(Gpu(GPU, 0), version).driver_branch == branch


@pytest.mark.parametrize(
    "broken",
    [
        {"fault": Fault.ERROR},
        {"fault": Fault.HUNG},
        {"refused": frozenset({"temperature"})},
        {"refused": frozenset({"energy"}), "energy": None},
        {"refused": frozenset({"memory_used"})},
        {"unknown": frozenset({"temperature"}), "temperature": None},
        {"unknown": frozenset({"energy"}), "energy": None},
        {"unknown": frozenset({"memory_used"}), "memory_used": None},
        {"recovery_action": None},
        {"recovery_action": 5},
    ],
    ids=str,
)
def test_the_two_minutes_begin_again_with_a_look_that_is_not_clean(broken):
    gpu = TimeLine()
    gpu.see(XidEvent(48))
    gpu.run(115.0)
    gpu.look(**broken)
    gpu.run(20.0)
    assert gpu.of(48) is FATAL
    gpu.run(130.0)
    assert gpu.of(48) is DEGRADED


def test_two_minutes_without_a_look_and_a_clock_that_jumps_do_not_count():
    gpu = TimeLine()
    gpu.see(XidEvent(48))
    gpu.run(10.0)
    gpu.now += 10 * MINUTE
    assert gpu.run(60.0) is FATAL
    gpu.now -= HOUR
    assert gpu.run(110.0) is FATAL
    assert gpu.run(20.0) is DEGRADED


def test_looks_that_did_not_ask_for_the_action_count_neither_way():
    gpu = TimeLine()
    gpu.see(XidEvent(48))
    for _ in range(11):
        gpu.run(5.0)
        gpu.run(5.0, recovery_action=None, asked=frozenset({"temperature", "energy", "memory_used"}))
    assert gpu.verdict is FATAL
    assert gpu.run(20.0) is DEGRADED


def test_a_restart_begins_the_two_minutes_again():
    gpu = TimeLine()
    gpu.see(XidEvent(48))
    gpu.run(110.0)
    evidence = gpu.ledger.evidence()
    other = TimeLine()
    other.now, other.energy = gpu.now, gpu.energy
    other.ledger.replay(evidence)
    assert other.run(115.0) is FATAL
    assert other.run(15.0) is DEGRADED


def test_a_driver_that_asks_late_keeps_the_gpu_unfit():
    gpu = TimeLine()
    gpu.see(XidEvent(120))
    gpu.run(100.0)
    gpu.action = 1
    gpu.run(30.0)
    gpu.action = 0
    assert gpu.run(HOUR) is FATAL
    assert gpu.reset() is OK


def test_what_an_earlier_version_had_lowered_is_fatal_again_if_the_action_does_not_follow_it():
    gpu = TimeLine(580)
    gpu.see(XidEvent(48))
    assert gpu.run(130.0) is DEGRADED
    gpu.ledger.watch(GPU, Facts(says_action=True, driver_branch=550))
    assert gpu.run(5.0) is FATAL


looks = st.builds(
    lambda energy, binding, asked, refused, fault: Sample(
        temperature=40,
        energy=energy,
        memory_used=1,
        counting=0,
        binding=binding,
        recovery_action=0,
        fault=fault,
        refused=refused,
        asked=asked,
    ),
    energy=st.just(0),
    binding=st.just(1),
    asked=st.sampled_from([None, None, frozenset({"temperature", "energy", "memory_used", "recovery_action"})]),
    refused=st.sampled_from([frozenset(), frozenset(), frozenset({"energy"})]),
    fault=st.sampled_from([Fault.NONE, Fault.NONE, Fault.NONE, Fault.ERROR, Fault.HUNG]),
)
steps = st.tuples(
    st.one_of(looks, looks, looks, st.builds(XidEvent, st.sampled_from(sorted(GUARDED.xids.table)))),
    st.sampled_from([0.0, 1.0, 5.0, 30.0, 60.0, 61.0, HOUR]),
)


@given(
    st.sampled_from(UNLINKED),
    st.lists(steps, max_size=60),
    st.sampled_from([565, 580, None]),
)
@settings(max_examples=60, deadline=None)
def test_nothing_but_a_reset_makes_an_unlinked_fatal_xid_better(xid, then, branch):
    """With any other Xids and any time without a request."""
    gpu = TimeLine(branch)
    gpu.see(XidEvent(xid))
    for seen, later in then:
        gpu.now += later
        gpu.energy += int(100_000 * later)
        gpu.see(seen if isinstance(seen, XidEvent) else _with_energy(seen, gpu.energy))
        assert gpu.of(xid) is FATAL


def _with_energy(seen: Sample, energy: int) -> Sample:
    return replace(seen, energy=None if "energy" in seen.refused or seen.fault else energy)


# How long repeated Xids hold a sound GPU back


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
def test_xids_of_a_sound_gpu_never_hold_it_back(xids, every, hours, action):
    gpu = TimeLine(action=action)
    assert gpu.repeat(xids, every, hours) == 0.0
    assert gpu.verdict <= DEGRADED


def test_a_lowered_verdict_is_no_drop_for_the_flap_guard():
    gpu = TimeLine()
    unfit = gpu.repeat([95], 10 * MINUTE, 4.0)
    assert unfit == pytest.approx(24 * 120 / HOUR, rel=0.1)
    assert not [key for key, _, _ in gpu.ledger.standing(GPU) if key.signal == "flapping"]


def test_a_fault_that_a_reset_had_to_end_is_a_drop():
    gpu = TimeLine()
    for _ in range(3):
        gpu.see(XidEvent(95))
        gpu.action = 1
        gpu.run(MINUTE)
        gpu.action = 0
        gpu.reset()
        gpu.energy = 10_000_000
    assert "xid 95" in {key.part for key, _, _ in gpu.ledger.standing(GPU) if key.signal == "flapping"}


@pytest.mark.parametrize("xid", [109, 144, 149, 160])
def test_a_driver_that_asks_for_a_recovery_makes_it_fatal_until_a_reset(xid):
    gpu = TimeLine()
    assert gpu.see(XidEvent(xid)) is DEGRADED
    gpu.action = 1
    gpu.look()
    assert gpu.of(xid) is FATAL
    gpu.action = 0
    gpu.run(HOUR)
    assert gpu.of(xid) is FATAL
    assert gpu.reset() is OK


@pytest.mark.parametrize("xid", [121, 92, 122, 137])
def test_a_driver_that_asks_for_a_recovery_makes_nothing_worse_that_its_action_does_not_follow(xid):
    gpu = TimeLine()
    gpu.see(XidEvent(xid))
    gpu.action = 1
    assert gpu.run(MINUTE) is FATAL
    assert gpu.of(xid) is DEGRADED
    gpu.action = 0
    assert gpu.run(MINUTE) is DEGRADED


def test_context_switch_timeouts_of_several_owners_are_told_as_the_gpus_own():
    gpu = TimeLine(action=None)
    gpu.see(*[ApplicationError(109, frozenset({"train/long-run-x7k2p"}))] * 20)
    assert not gpu.ledger.standing(GPU)
    gpu.see(ApplicationError(109, frozenset({"serve/web-0"})))
    assert [key.signal for key, _, _ in gpu.ledger.standing(GPU)] == ["application-errors"]
    assert gpu.verdict is DEGRADED


# Xids whose meaning depends on something else


def test_a_cleanup_is_worth_a_look_only_while_the_fabric_is_not_completed():
    gpu = TimeLine()
    joined, waiting = Fabric(3, 0, 0, 1), Fabric(2)
    up = (True, True)
    gpu.run(10.0, fabric=joined, nvlinks=up)
    gpu.see(XidEvent(45))
    assert gpu.run(MINUTE, fabric=joined, nvlinks=up) is APP
    gpu.run(20.0, fabric=waiting, nvlinks=up)
    assert gpu.of(45) is DEGRADED
    assert gpu.run(20.0, fabric=joined, nvlinks=up) is APP
    assert gpu.run(10 * MINUTE, fabric=joined, nvlinks=up) is OK


def test_a_storm_of_cleanups_at_the_end_of_jobs_holds_nothing_against_a_gpu():
    """A public report counts 168,924 Xids 45 on 288 nodes within two days."""
    gpu = TimeLine()
    for _ in range(20):
        gpu.see(*[XidEvent(45)] * 30)
        assert gpu.run(10 * MINUTE) <= APP
    assert gpu.run(11 * MINUTE) is OK


@pytest.mark.parametrize(("action", "verdict"), [(0, APP), (None, DEGRADED)])
def test_a_changed_recovery_action_that_nvml_does_not_report_is_worth_a_look(action, verdict):
    gpu = TimeLine(action=action)
    gpu.see(XidEvent(154))
    assert gpu.run(MINUTE) is verdict
    assert gpu.run(25 * HOUR, every=MINUTE) is OK


def test_page_faults_after_a_failing_power_unit_make_the_gpu_unfit():
    gpu = TimeLine()
    gpu.see(XidEvent(122))
    gpu.run(4.0)
    gpu.see(XidEvent(31))
    assert gpu.run(HOUR) is FATAL
    assert gpu.reset() <= APP


def test_page_faults_of_the_instant_in_which_the_power_unit_fails_explain_nothing():
    """The driver may report them first; one that came before alone is no reason either."""
    gpu = TimeLine(action=None)
    gpu.see(XidEvent(31))
    gpu.now += 0.5
    assert gpu.see(XidEvent(122)) is DEGRADED
    assert gpu.run(2.0) is DEGRADED
    assert gpu.see(XidEvent(31)) is FATAL


def test_a_page_fault_in_that_instant_is_explained_by_those_of_minutes_before():
    gpu = TimeLine(action=None)
    for pause in (0.0, 9 * MINUTE, 8 * MINUTE):
        gpu.run(pause)
        gpu.see(XidEvent(31))
    gpu.now += 0.5
    gpu.see(XidEvent(122), XidEvent(31))
    assert gpu.run(MINUTE) is DEGRADED


def test_a_page_fault_of_more_than_ten_minutes_before_explains_nothing():
    gpu = TimeLine(action=None)
    gpu.see(XidEvent(31))
    gpu.run(11 * MINUTE)
    gpu.see(XidEvent(122))
    gpu.run(2.0)
    assert gpu.see(XidEvent(31)) is FATAL


@pytest.mark.parametrize("before", [1.5, 4.0, 9 * MINUTE])
def test_page_faults_of_an_application_that_keeps_failing_make_no_gpu_unfit(before):
    gpu = TimeLine(action=None)
    gpu.see(XidEvent(31))
    gpu.run(before)
    gpu.see(XidEvent(122))
    gpu.run(2.0)
    gpu.see(XidEvent(31))
    assert gpu.run(MINUTE) is DEGRADED


def test_corrupted_push_buffers_are_no_applications_and_are_worth_a_look_when_they_repeat():
    gpu = TimeLine()
    gpu.see(*[ApplicationError(32, frozenset({f"some/pod-{n}"})) for n in "abcdefgh"])
    assert gpu.verdict is OK
    for _ in range(2):
        assert gpu.see(XidEvent(32)) is APP
        gpu.run(10.0)
    assert gpu.see(XidEvent(32)) is DEGRADED


@pytest.mark.parametrize(
    ("xid", "verdict"),
    [
        (123, FATAL),
        (150, FATAL),
        (124, DEGRADED),
        (149, DEGRADED),
        (157, DEGRADED),
        (161, DEGRADED),
        (147, APP),
        (148, APP),
    ],
)
def test_xids_are_judged_by_their_sources(xid, verdict):
    gpu = TimeLine()
    assert gpu.see(XidEvent(xid)) is verdict
    if xid in (157, 161):  # the catalogue's action is IGNORE
        assert gpu.run(25 * HOUR, every=MINUTE) is OK


def test_an_override_ends_an_unlinked_xid_as_before():
    gpu = TimeLine()
    gpu.see(XidEvent(119))
    gpu.ledger.override(GPU)
    assert gpu.verdict is OK
    gpu.see(Order("cordon"))
    assert gpu.verdict is FATAL
