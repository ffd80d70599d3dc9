"""Reports for people: open signals, since when, the recovery that closes each, and the advice."""

import re

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, MigDevice, Thresholds
from gpu_plugin.health.explain import Explained, clears, explain
from gpu_plugin.health.hysteresis import LEVEL
from gpu_plugin.health.latch import Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import DriverEvent, Facts, Observation, Order, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Case
from gpu_plugin.health.signals import SIGNALS, advice, xid_number
from tests.unit.health.ledgers import ERROR, GUARDED, H200, HUNG, LOST, UNGUARDED, A, B, energies, ledger, observe

FATAL = Verdict.FATAL
GPUS = (Gpu(A, 3), Gpu(B, 4))
GOOD, HOT = Sample(temperature=40), Sample(temperature=94)
SEEN = Sample(counting=0, energy=5_000)  # in persistence mode
COMMANDS = f"gpu-plugin release --gpu {A} && nvidia-smi --gpu-reset -i {A} && gpu-plugin resume --gpu {A}"
PERSISTENT = (
    f"gpu-plugin release --gpu {A} && nvidia-smi -i {A} -pm 0 && nvidia-smi --gpu-reset -i {A} && "
    f"nvidia-smi -i {A} -pm 1 && gpu-plugin resume --gpu {A}"
)
OVERRIDE = f"gpu-plugin uncordon --gpu {A} --override"


def report(one: HealthLedger, now: float = 1_100.0, gpu: Gpu = GPUS[0]) -> Explained:
    (found,) = explain(one, [gpu], now)["gpus"]
    assert isinstance(found, dict)
    return found


def clearing(*seen: Observation, policy: HealthPolicy = UNGUARDED, now: float = 1_100.0, signal: str = "") -> str:
    """Return the words for the recovery of the signal that these observations open, or of the signal of this name."""
    one = ledger(policy=policy)
    observe(one, *seen)
    (words,) = [str(found["clears"]) for found in report(one, now)["signals"] if signal in ("", found["name"])]
    return words


def test_a_report_has_every_gpu_in_order_and_each_open_signal_with_its_fields():
    one = ledger(policy=UNGUARDED)
    healthy = [
        {"index": gpu.index, "uuid": gpu.uuid, "health": "Healthy", "verdict": "OK", "signals": []} for gpu in GPUS
    ]
    assert explain(one, GPUS, 1.0) == {"gpus": healthy}
    observe(one, SEEN, XidEvent(48))
    found, other = explain(one, GPUS, 1_100.0)["gpus"]
    assert other == healthy[1]
    (signal,) = found["signals"]
    assert (found["index"], found["health"], found["verdict"]) == (3, "Unhealthy", "FATAL")
    assert (signal["name"], signal["since"], signal["verdict"]) == ("xid", 1_001.0, "FATAL")
    assert "Xid 48" in signal["detail"]
    assert "reset the GPU" in signal["action"]
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


@pytest.mark.parametrize(
    ("seen", "verdict", "health", "names"),
    [
        ([XidEvent(31)], "APP", "Healthy", ["xid"]),
        ([ERROR] * 3, "DEGRADED", "Healthy", ["unanswered"]),
        ([HUNG], "FATAL", "Unhealthy", ["hung"]),
        # The worst first, then the oldest
        ([XidEvent(31), *[ERROR] * 3, HUNG, XidEvent(48)], "FATAL", "Unhealthy", ["hung", "xid", "unanswered", "xid"]),
    ],
)
def test_the_verdict_is_the_worst_and_only_fatal_is_unhealthy(seen, verdict, health, names):
    one = ledger(policy=UNGUARDED)
    observe(one, *seen)
    found = report(one)
    assert (found["verdict"], found["health"]) == (verdict, health)
    assert [signal["name"] for signal in found["signals"]] == names


def test_a_gpu_in_mig_mode_is_reported_with_its_devices():
    devices = (MigDevice("MIG-1", 0, 1, 0, "1g"), MigDevice("MIG-2", 1, 2, 0, "1g"))
    gpu = Gpu(A, 3, mig_enabled=True, mig_devices=devices)
    one = ledger(policy=UNGUARDED, slices={(1, 0): "MIG-1", (2, 0): "MIG-2"})
    observe(one, *[ERROR] * 3, XidEvent(46, 1, 0))
    found = report(one, gpu=gpu)
    assert (found["health"], found["verdict"]) == ("Healthy", "FATAL")
    assert found["devices"] == [
        {"uuid": "MIG-1", "health": "Unhealthy", "verdict": "FATAL"},
        {"uuid": "MIG-2", "health": "Healthy", "verdict": "DEGRADED"},
    ]
    assert [(each["name"], each.get("device")) for each in found["signals"]] == [("xid", "MIG-1"), ("unanswered", None)]
    observe(one, HUNG)
    found = report(one, gpu=gpu)
    assert {device["health"] for device in found["devices"]} == {found["health"]} == {"Unhealthy"}


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
    (signal,) = found["signals"]
    assert (found["health"], found["verdict"], signal["name"]) == ("Unhealthy", "FATAL", name)
    assert detail in signal["detail"]
    assert seen or signal["since"] is None


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (1, "reset the GPU when no pod has it"),
        (2, "drain the node and reboot it"),
        (3, "let its pods end"),
        (4, "let its pods end; reset the GPU when no pod has it"),
        (5, "look at IMEX"),
        (6, "drain the node and reset the GPU's bus"),
        (7, "drain the nodes of the system"),
        (99, "look the action up"),
    ],
)
def test_the_advice_is_the_action_that_the_driver_requests(action, words):
    one = ledger(policy=UNGUARDED)
    (change,) = observe(one, Sample(counting=0, recovery_action=action))
    (signal,) = report(one)["signals"]
    assert signal["action"].startswith(words)
    assert change.action == signal["action"]


# The recovery that closes a signal: commands, missing numbers, and whether an override is offered

RESET, REBOOT = "a reset of the GPU", "a reboot of the node"
REMAINING = "{} more good look"


@pytest.mark.parametrize(
    ("seen", "named", "override"),
    [
        ([Order("cordon", "fan is loud")], [f"gpu-plugin uncordon --gpu {A}"], False),
        ([Order("release")], [f"gpu-plugin resume --gpu {A}"], False),
        ([Order("release"), Order("resume")], ["first good look"], False),
        ([HUNG], ["three answers in a row"], False),
        ([ERROR] * 3, ["five answers in a row"], False),
        ([HOT, HOT], ["below 84 °C", "300 s"], True),
        ([HOT, HOT, GOOD], ["below 84 °C", "300 s", "1 min 38 s"], True),
        ([Sample(counting=0, energy=5), LOST], [RESET, PERSISTENT, REBOOT, "energy counter"], False),
        ([Sample(counting=0, energy=5), LOST, GOOD], [RESET, PERSISTENT, REBOOT], True),
        ([Sample(binding=1), LOST], [RESET, COMMANDS, REBOOT], False),
        ([Sample(binding=1), LOST, Sample(binding=2)], [REMAINING.format(2), "found again"], True),
        ([LOST], [REMAINING.format(3), "no counter"], False),
        ([LOST, GOOD], [REMAINING.format(2)], True),
        ([SEEN, XidEvent(48)], [RESET, PERSISTENT, "3 good looks", "its energy counter"], True),
        ([XidEvent(48), Sample(counting=7, energy=5)], [RESET, COMMANDS, "without persistence mode"], True),
        ([XidEvent(48), Sample(counting=0)], [RESET, PERSISTENT, "shows no reset in a counter"], True),
        ([SEEN, XidEvent(48), Sample(counting=0, energy=10)], [REMAINING.format(2), "its reset was seen"], True),
        ([XidEvent(79)], [REBOOT, "/sys/bus/pci/drivers/nvidia", "3 good looks"], True),
        ([XidEvent(79), Sample(counting=7)], [REBOOT], True),
        ([Sample(sram_threshold=True, binding=1)] * 3, ["have the GPU replaced", "enumerated again"], True),
        (
            [Sample(sram_threshold=True, binding=1), Sample(sram_threshold=False, binding=2)],
            [REMAINING.format(2), "enumerated again"],
            True,
        ),
        ([XidEvent(142)], ["inspected by its vendor"], True),
        ([Sample(counting=0, recovery_action=1)], ["three looks in a row", COMMANDS], True),
        ([Sample(counting=0, recovery_action=2)], ["three looks in a row"], True),
        ([XidEvent(31)], ["1970-01-01 00:26:40 UTC"], False),
        ([XidEvent(92)], ["1970-01-02 00:16:40 UTC", RESET, COMMANDS], False),
        ([DriverEvent(0x400)], ["a day without another", RESET, COMMANDS], False),
        ([DriverEvent(0x400), GOOD], ["1970-01-02 00:16:41 UTC", RESET, COMMANDS], False),
    ],
)
def test_the_recovery_is_named_with_what_is_missing(seen, named, override):
    words = clearing(*seen)
    assert [each for each in named if each not in words] == []
    assert (OVERRIDE in words) is override
    assert (f"nvidia-smi --gpu-reset -i {A}" in words) is (PERSISTENT in named or COMMANDS in named)


@pytest.mark.parametrize(("seconds", "named"), [(0, False), (300, True)])
def test_the_time_of_a_recovery_is_named_if_there_is_one(seconds, named):
    policy = replace(UNGUARDED, temperature_recovery=seconds)
    assert (f"{seconds} s" in clearing(HOT, HOT, policy=policy)) is named
    part = Facts(margins=Thresholds(shutdown=-8, slowdown=-2))
    words = clears(Case(LatchKey("margin"), Latch(LEVEL, FATAL, "words", 1.0), policy, A, 2.0, part))
    assert "3 °C or more" in words
    assert "120 s" in words
    assert f"({seconds} s if" in words


def test_the_commands_leave_out_a_release_that_was_done():
    one = ledger(policy=UNGUARDED)
    observe(one, SEEN, XidEvent(48), Order("cordon"))
    for order, released in ((None, False), (Order("release"), True), (Order("resume"), False)):
        observe(one, *[order] if order else [])
        words = {signal["name"]: signal["clears"] for signal in report(one)["signals"]}["xid"]
        assert ("gpu-plugin release" in words) is not released
        assert "nvidia-smi --gpu-reset" in words
        assert OVERRIDE in words
    resumed = Sample(counting=0, energy=5), LOST, Order("release"), Order("resume")
    assert REMAINING.format(3) in clearing(*resumed, signal="lost")


def test_a_signal_that_holds_up_a_proof_is_named():
    words = clearing(SEEN, XidEvent(48), HOT, HOT, signal="xid")
    assert "counted once temperature is over" in words


@pytest.mark.parametrize(
    ("now", "named"),
    [(1_100.0, ["01:16:48 UTC", "58 min"]), (1_008.0, ["01:16:48 UTC", "1 h"]), (5_000.0, ["next good look"])],
)
def test_a_gpu_that_is_held_back_says_until_when(now, named):
    words = clearing(*[HUNG, GOOD, GOOD, GOOD] * 3, policy=GUARDED, now=now)
    assert all(each in words for each in named)
    assert OVERRIDE in words


def test_an_overridden_signal_says_so():
    one = ledger(policy=UNGUARDED)
    observe(one, HOT, HOT)
    one.override(A)
    (signal,) = report(one)["signals"]
    assert signal["verdict"] == "DEGRADED"
    assert "below 84 °C" in signal["clears"]
    assert "overridden by an operator" in signal["clears"]


def test_the_looks_that_are_said_to_be_missing_close_it():
    one = ledger(policy=UNGUARDED)
    observe(one, SEEN, XidEvent(48))
    for left, energy in ((2, 10), (1, 20)):
        observe(one, *energies(energy))
        (signal,) = report(one)["signals"]
        assert signal["clears"].startswith(REMAINING.format(left))
        assert f"{left} good look" in signal["action"]
    observe(one, *energies(30))
    assert report(one)["signals"] == []


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_has_words_whatever_its_latch_says(signal):
    """A latch that another version stored may have any proof."""
    key = LatchKey(signal, "48" if signal == "xid" else "")
    for proof in Proof:
        latch = Latch(SIGNALS[signal].memory, FATAL, "words", 1.0, proof)
        words = clears(Case(key, latch, GUARDED, A, 2.0, Facts()))
        assert words, proof
        assert not re.search(r"\bID\b|None|\(\)|^;", words), proof
        advised = advice(key, GUARDED, A, latch)
        assert advised, proof
        assert not re.search(r"\bID\b|gpu-plugin", advised), proof


@pytest.mark.parametrize(
    ("key", "number"), [(LatchKey("xid", "48"), 48), (LatchKey("xid"), None), (LatchKey("driver-event", "48"), None)]
)
def test_the_number_of_an_xid_latch(key, number):
    assert xid_number(key) == number
