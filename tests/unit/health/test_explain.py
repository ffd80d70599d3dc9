"""Explanations: open signals, since when, the recovery that closes each, the remedy, and the advice."""

import re

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, MigDevice, Thresholds
from gpu_plugin.health.explain import Explained, Explanation, MigHealth, Remedy, explain, note, recovers
from gpu_plugin.health.hysteresis import LEVEL
from gpu_plugin.health.latch import Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import DriverEvent, Facts, Observation, Order, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Case
from gpu_plugin.health.signals import SIGNALS, advice
from tests.unit.health.ledgers import ERROR, GUARDED, H200, HUNG, LOST, UNGUARDED, A, energies, ledger, observe

FATAL = Verdict.FATAL
GPU = Gpu(A, 3)
GOOD, HOT = Sample(temperature=40), Sample(temperature=94)
SEEN = Sample(counting=0, energy=5_000)  # in persistence mode


def report(one: HealthLedger, now: float = 1_100.0, gpu: Gpu = GPU) -> Explained:
    return explain(one, gpu, now)


def signal(*seen: Observation, policy: HealthPolicy = UNGUARDED, now: float = 1_100.0, name: str = "") -> Explanation:
    """Return the signal that these observations open, or the signal of this name."""
    one = ledger(policy=policy)
    observe(one, *seen)
    (found,) = [each for each in report(one, now).signals if name in ("", each.name)]
    return found


def test_a_healthy_gpu_has_no_open_signal():
    assert report(ledger(policy=UNGUARDED)) == Explained(healthy=True, verdict=Verdict.OK)


def test_an_open_signal_has_its_fields():
    one = ledger(policy=UNGUARDED)
    observe(one, SEEN, XidEvent(48))
    found = report(one)
    (first,) = found.signals
    assert (found.healthy, found.verdict) == (False, FATAL)
    assert (first.name, first.since, first.verdict, first.xid) == ("xid", 1_001.0, "FATAL", 48)
    assert (first.remedy, first.persistent) == (Remedy.RESET, True)
    assert "Xid 48" in first.detail
    assert "reset the GPU" in first.action
    assert signal(SEEN, *[replace(HOT, counting=0)] * 2).persistent, "also of a signal of readings"


@pytest.mark.parametrize(
    ("seen", "verdict", "healthy", "names"),
    [
        ([XidEvent(31)], Verdict.APP, True, ["xid"]),
        ([ERROR] * 3, Verdict.DEGRADED, True, ["unanswered"]),
        ([HUNG], FATAL, False, ["hung"]),
        # The worst first, then the oldest
        ([XidEvent(31), *[ERROR] * 3, HUNG, XidEvent(48)], FATAL, False, ["hung", "xid", "unanswered", "xid"]),
    ],
)
def test_the_verdict_is_the_worst_and_only_fatal_is_unhealthy(seen, verdict, healthy, names):
    one = ledger(policy=UNGUARDED)
    observe(one, *seen)
    found = report(one)
    assert (found.verdict, found.healthy) == (verdict, healthy)
    assert [each.name for each in found.signals] == names


def test_a_gpu_in_mig_mode_is_explained_with_its_devices():
    devices = (MigDevice("MIG-1", 0, 1, 0, "1g"), MigDevice("MIG-2", 1, 2, 0, "1g"))
    gpu = Gpu(A, 3, mig_enabled=True, mig_devices=devices)
    one = ledger(policy=UNGUARDED, slices={(1, 0): "MIG-1", (2, 0): "MIG-2"})
    observe(one, *[ERROR] * 3, XidEvent(46, 1, 0))
    found = report(one, gpu=gpu)
    assert (found.healthy, found.verdict) == (True, FATAL)
    assert found.devices == (MigHealth("MIG-1", False, "FATAL"), MigHealth("MIG-2", True, "DEGRADED"))
    assert [(each.name, each.device) for each in found.signals] == [("xid", "MIG-1"), ("unanswered", "")]
    observe(one, HUNG)
    found = report(one, gpu=gpu)
    assert {device.healthy for device in found.devices} == {found.healthy} == {False}


@pytest.mark.parametrize(
    ("seen", "unreadable", "name", "detail"),
    [
        ([], "the driver says nothing", "unreadable", "the driver says nothing"),
        ([], None, "first-look", "no good look"),
        ([HUNG], "it does not answer", "hung", "no answer for 30 s"),
        ([Order("release")], "maintenance", "maintenance", "maintenance"),
        ([Order("release"), Order("resume")], "maintenance", "maintenance", "no good look"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_unhealthy_with_one_reason(seen, unreadable, name, detail):
    one = HealthLedger(GUARDED, "boot-1")
    one.watch(A, H200)
    if seen:
        one.observe(A, GOOD, 0.0)
    observe(one, *seen)
    found = report(one, gpu=Gpu(A, 3, unreadable=unreadable))
    (first,) = found.signals
    assert (found.healthy, found.verdict, first.name) == (False, FATAL, name)
    assert detail in first.detail
    assert seen or first.since is None


@pytest.mark.parametrize(
    ("action", "words", "remedy"),
    [
        (1, "reset the GPU when no pod has it", Remedy.RESET),
        (2, "drain the node and reboot it", Remedy.REBOOT),
        (3, "let its pods end", Remedy.NONE),
        (4, "let its pods end; reset the GPU when no pod has it", Remedy.RESET),
        (5, "look at IMEX", Remedy.NONE),
        (6, "drain the node and reset the GPU's bus", Remedy.NONE),
        (7, "drain the nodes of the system", Remedy.NONE),
        (99, "look the action up", Remedy.NONE),
    ],
)
def test_the_advice_is_the_action_that_the_driver_requests(action, words, remedy):
    one = ledger(policy=UNGUARDED)
    (change,) = observe(one, Sample(counting=0, recovery_action=action))
    (first,) = report(one).signals
    assert first.action.startswith(words)
    assert first.remedy is remedy
    assert change.action == first.action


# The recovery that closes a signal, with the missing numbers, and the work that leads to it


@pytest.mark.parametrize(
    ("seen", "named", "remedy"),
    [
        ([Order("cordon", "fan is loud")], ["lifts the cordon"], Remedy.UNCORDON),
        ([Order("release")], ["resumes it"], Remedy.RESUME),
        ([Order("release"), Order("resume")], ["a check succeeds"], Remedy.NONE),
        ([HUNG], ["three times in a row"], Remedy.REBOOT),
        ([ERROR] * 3, ["five times in a row"], Remedy.NONE),
        ([HOT, HOT], ["below 84 °C", "300 s"], Remedy.NONE),
        ([HOT, HOT, GOOD], ["below 84 °C", "300 s", "1 min 38 s"], Remedy.NONE),
        ([Sample(counting=0, energy=5), LOST], ["reset", "rebooted", "bound", "3 checks"], Remedy.REBOOT),
        ([Sample(binding=1), LOST, Sample(binding=2)], ["2 more checks"], Remedy.NONE),
        ([LOST], ["3 more checks"], Remedy.NONE),
        ([LOST, GOOD], ["2 more checks"], Remedy.NONE),
        ([SEEN, XidEvent(48)], ["the GPU was reset", "3 checks"], Remedy.RESET),
        ([SEEN, XidEvent(48), Sample(counting=0, energy=10)], ["2 more checks"], Remedy.NONE),
        ([XidEvent(79)], ["the node was rebooted", "bound to the GPU", "3 checks"], Remedy.REBOOT),
        ([Sample(sram_threshold=True, binding=1)] * 3, ["replaced", "enumerated again"], Remedy.REPLACE),
        (
            [Sample(sram_threshold=True, binding=1), Sample(sram_threshold=False, binding=2)],
            ["2 more checks"],
            Remedy.REPLACE,
        ),
        ([XidEvent(142)], ["nothing ends this by itself"], Remedy.REPLACE),
        ([Sample(counting=0, recovery_action=1)], ["three checks in a row"], Remedy.RESET),
        ([Sample(counting=0, recovery_action=2)], ["three checks in a row"], Remedy.REBOOT),
        ([XidEvent(31)], ["1970-01-01 00:26:40 UTC"], Remedy.NONE),
        ([XidEvent(92)], ["1970-01-02 00:16:40 UTC", "the GPU was reset"], Remedy.NONE),
        ([DriverEvent(0x400)], ["for a day", "the GPU was reset"], Remedy.RESET),
        ([DriverEvent(0x400), GOOD], ["1970-01-02 00:16:41 UTC", "the GPU was reset"], Remedy.RESET),
    ],
)
def test_the_recovery_is_named_with_what_is_missing_and_the_remedy_leads_to_it(seen, named, remedy):
    found = signal(*seen)
    assert [each for each in named if each not in found.recovers] == []
    assert found.remedy is remedy
    assert "gpu-plugin" not in found.recovers


def test_an_application_error_that_comes_again_and_again_asks_for_a_reset():
    one = ledger(policy=UNGUARDED)
    observe(one, *[XidEvent(94)] * 3, every=10.0)
    (found,) = report(one).signals
    assert (found.verdict, found.remedy) == ("DEGRADED", Remedy.RESET)


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        ([SEEN, XidEvent(48)], "energy counter"),
        ([XidEvent(48), Sample(counting=7, energy=5)], "Without persistence mode"),
        ([XidEvent(48), Sample(counting=0)], "No counter"),
        ([XidEvent(79)], ""),
        ([SEEN, XidEvent(48), Sample(counting=0, energy=10)], ""),
    ],
)
def test_a_note_names_the_proof_of_a_reset(seen, named):
    found = signal(*seen).note
    assert named in found
    assert bool(found) is bool(named)


@pytest.mark.parametrize(("seconds", "named"), [(0, False), (300, True)])
def test_the_time_of_a_recovery_is_named_if_there_is_one(seconds, named):
    policy = replace(UNGUARDED, temperature_recovery=seconds)
    assert (f"{seconds} s" in signal(HOT, HOT, policy=policy).recovers) is named
    part = Facts(margins=Thresholds(shutdown=-8, slowdown=-2))
    words = recovers(Case(LatchKey("margin"), Latch(LEVEL, FATAL, "words", 1.0), policy, A, 2.0, part))
    assert "3 °C or more" in words
    assert "120 s" in words
    assert f"({seconds} s if" in words


def test_a_signal_that_holds_up_a_proof_is_named():
    assert "after temperature is over" in signal(SEEN, XidEvent(48), HOT, HOT, name="xid").recovers


@pytest.mark.parametrize(
    ("now", "named"),
    [(1_100.0, ["01:16:48 UTC", "58 min"]), (1_008.0, ["01:16:48 UTC", "1 h"]), (5_000.0, ["a check succeeds"])],
)
def test_a_gpu_that_is_held_back_says_until_when(now, named):
    words = signal(*[HUNG, GOOD, GOOD, GOOD] * 3, policy=GUARDED, now=now).recovers
    assert all(each in words for each in named)


def test_an_overridden_signal_says_so():
    one = ledger(policy=UNGUARDED)
    observe(one, HOT, HOT)
    one.override(A)
    (first,) = report(one).signals
    assert first.verdict == "DEGRADED"
    assert "below 84 °C" in first.recovers
    assert "overridden" in first.recovers


def test_the_checks_that_are_said_to_be_missing_close_it():
    one = ledger(policy=UNGUARDED)
    observe(one, SEEN, XidEvent(48))
    for left, energy in ((2, 10), (1, 20)):
        observe(one, *energies(energy))
        (first,) = report(one).signals
        assert first.recovers.startswith(f"{left} more check")
        assert f"{left} more check" in first.action
    observe(one, *energies(30))
    assert report(one).signals == ()


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_has_words_whatever_its_latch_says(name):
    """A latch that another version stored may have any proof."""
    key = LatchKey(name, "48" if name == "xid" else "")
    for proof in Proof:
        latch = Latch(SIGNALS[name].memory, FATAL, "words", 1.0, proof)
        words = recovers(Case(key, latch, GUARDED, A, 2.0, Facts()))
        assert words, proof
        assert not re.search(r"\bID\b|None|\(\)|^;", words), proof
        assert "None" not in note(Case(key, latch, GUARDED, A, 2.0, Facts())), proof
        advised = advice(key, GUARDED, A, latch)
        assert advised, proof
        assert not re.search(r"\bID\b|gpu-plugin", advised), proof


@pytest.mark.parametrize(
    ("key", "number"), [(LatchKey("xid", "48"), 48), (LatchKey("xid"), None), (LatchKey("driver-event", "48"), None)]
)
def test_the_number_of_an_xid_latch(key, number):
    assert key.xid == number
