"""What people and programs are told: why, since when, what would clear it, what to do."""

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
from tests.unit.health.ledgers import ERROR, GUARDED, H200, HUNG, LOST, UNGUARDED, A, B, energies, hear, ledger

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
GPUS = (Gpu(A, 3), Gpu(B, 4))
GOOD = Sample(temperature=40)
HOT = Sample(temperature=94)
COMMANDS = f"gpu-plugin release --gpu {A} && nvidia-smi --gpu-reset -i {A} && gpu-plugin resume --gpu {A}"
PERSISTENT = COMMANDS.replace(
    f"nvidia-smi --gpu-reset -i {A}",
    f"nvidia-smi -i {A} -pm 0 && nvidia-smi --gpu-reset -i {A} && nvidia-smi -i {A} -pm 1",
)
"""The driver refuses to reset a GPU in persistence mode."""
RESET = f"a reset of the GPU ({COMMANDS}), then 3 good looks in a row"
REBOOT = (
    "a reboot of the node, or the driver rebound to the GPU (unbind and bind it in /sys/bus/pci/drivers/nvidia while it "
    "is released), then 3 good looks in a row"
)
BACK = (
    f"a reset of the GPU ({COMMANDS}), a reboot of the node, or the driver rebound to the GPU "
    "(unbind and bind it in /sys/bus/pci/drivers/nvidia while it is released), then 3 good looks in a row"
    "; that shows in gpu-plugin release and gpu-plugin resume, in another binding, in an energy counter that restarted and, "
    "without persistence mode, in an answer to another process than the one that lost it"
)
NO_PERSISTENCE = (
    "without persistence mode the driver's counters restart whenever no process has the GPU open, and prove no reset: "
    "a reboot or a new binding of the driver does, or an override"
)
NO_COUNTER = "this GPU shows no reset in a counter: a reboot or a new binding of the driver proves it, or an override"
SHOWN = "; its energy counter shows that if it restarts, else a reboot or a new binding of the driver does"
VOUCH = f"; or gpu-plugin uncordon --gpu {A} --override, which overrides it"


def told(one: HealthLedger, now: float = 1_100.0, gpu: int = 0) -> Explained:
    found: list[Explained] = explain(one, GPUS, now)["gpus"]
    return found[gpu]


def cleared(*seen: Observation, policy: HealthPolicy = UNGUARDED, now: float = 1_100.0, signal: str = "") -> str:
    """What would clear the one signal that these observations open, or the one of this name."""
    one = ledger(policy=policy)
    hear(one, *seen)
    (words,) = [str(found["clears"]) for found in told(one, now)["signals"] if signal in ("", found["name"])]
    return words


def test_a_gpu_that_nothing_stands_against_is_healthy():
    assert explain(ledger(), GPUS, 1.0) == {
        "gpus": [
            {"index": 3, "uuid": A, "health": "Healthy", "verdict": "OK", "signals": []},
            {"index": 4, "uuid": B, "health": "Healthy", "verdict": "OK", "signals": []},
        ]
    }


def test_what_stands_is_told_whole():
    one = ledger(policy=UNGUARDED)
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48))
    assert told(one) == {
        "index": 3,
        "uuid": A,
        "health": "Unhealthy",
        "verdict": "FATAL",
        "signals": [
            {
                "name": "xid",
                "detail": "Xid 48 (double-bit ECC error)",
                "since": 1_001.0,
                "clears": RESET.replace(COMMANDS, PERSISTENT) + SHOWN + VOUCH,
                "verdict": "FATAL",
                "action": "reset the GPU when no pod has it",
            }
        ],
    }
    assert told(one, gpu=1)["health"] == "Healthy"


@pytest.mark.parametrize(
    ("seen", "verdict", "health"),
    [
        ([XidEvent(31)], "APP", "Healthy"),
        ([ERROR] * 3, "DEGRADED", "Healthy"),
        ([HUNG], "FATAL", "Unhealthy"),
        ([XidEvent(31), *[ERROR] * 3, HUNG], "FATAL", "Unhealthy"),
    ],
)
def test_the_verdict_is_the_worst_and_only_fatal_is_unhealthy(seen, verdict, health):
    one = ledger()
    hear(one, *seen)
    gpu = told(one)
    assert (gpu["verdict"], gpu["health"]) == (verdict, health)


def test_the_worst_is_told_first_and_then_the_oldest():
    one = ledger(policy=UNGUARDED)
    hear(one, XidEvent(31), *[ERROR] * 3, HUNG, XidEvent(48))
    assert [signal["name"] for signal in told(one)["signals"]] == ["hung", "xid", "unanswered", "xid"]


def test_a_gpu_with_slices_tells_of_each():
    gpu = Gpu(
        A, 3, mig_enabled=True, mig_devices=(MigDevice("MIG-1", 0, 1, 0, "1g"), MigDevice("MIG-2", 1, 2, 0, "1g"))
    )
    one = ledger(policy=UNGUARDED, slices={(1, 0): "MIG-1", (2, 0): "MIG-2"})
    hear(one, *[ERROR] * 3, XidEvent(46, 1, 0))
    (found,) = explain(one, [gpu], 1_100.0)["gpus"]
    assert (found["health"], found["verdict"]) == ("Healthy", "FATAL")
    assert found["devices"] == [
        {"uuid": "MIG-1", "health": "Unhealthy", "verdict": "FATAL"},
        {"uuid": "MIG-2", "health": "Healthy", "verdict": "DEGRADED"},
    ]
    assert [(signal["name"], signal.get("device")) for signal in found["signals"]] == [
        ("xid", "MIG-1"),
        ("unanswered", None),
    ]
    hear(one, HUNG)
    (found,) = explain(one, [gpu], 1_100.0)["gpus"]
    assert {device["health"] for device in found["devices"]} == {found["health"]} == {"Unhealthy"}


def test_a_gpu_that_the_driver_cannot_describe_is_unhealthy_and_says_why():
    one = HealthLedger(GUARDED, "boot-1")
    one.watch(A, H200)  # of which there was no look either: why there was none says more
    (found,) = explain(one, [Gpu(A, 3, unreadable="the driver says nothing")], 1.0)["gpus"]
    assert (found["health"], found["verdict"]) == ("Unhealthy", "FATAL")
    (signal,) = found["signals"]
    assert (signal["name"], signal["detail"], signal["since"]) == ("unreadable", "the driver says nothing", None)


def test_a_gpu_that_nobody_has_looked_at_says_so_and_that_one_good_look_is_enough():
    one = HealthLedger(GUARDED, "boot-1")
    one.watch(A, H200)
    (found,) = explain(one, [Gpu(A, 3)], 1.0)["gpus"]
    (signal,) = found["signals"]
    assert (found["health"], signal["name"], signal["since"]) == ("Unhealthy", "first-look", None)
    assert (signal["detail"], signal["clears"]) == ("there has been no good look at it yet", "one good look")


def test_what_the_driver_cannot_describe_is_not_said_twice():
    one = ledger()
    hear(one, HUNG)
    (found,) = explain(one, [Gpu(A, 3, unreadable="it does not answer")], 1_100.0)["gpus"]
    assert [signal["name"] for signal in found["signals"]] == ["hung"]


def test_a_gpu_that_was_released_says_so_once_and_after_resume_what_is_awaited():
    one, gpu = ledger(), Gpu(A, 3, unreadable="maintenance")
    hear(one, Order("release"))
    (found,) = explain(one, [gpu], 1_100.0)["gpus"]
    (signal,) = found["signals"]
    assert (signal["name"], signal["detail"]) == ("maintenance", "maintenance")
    hear(one, Order("resume"))
    (found,) = explain(one, [gpu], 1_100.0)["gpus"]
    (signal,) = found["signals"]
    awaited = ("resumed; no good look at it yet", "the first good look at it", "")
    assert (signal["name"], signal["detail"], signal["clears"], signal["action"]) == ("maintenance", *awaited)


def test_what_is_offered_goes_with_the_operators_orders():
    one = ledger(policy=UNGUARDED)
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48), Order("cordon"))
    words = {signal["name"]: signal["clears"] for signal in told(one)["signals"]}
    reset = RESET.replace(COMMANDS, PERSISTENT)
    assert words["xid"] == f"{reset}{SHOWN}; or gpu-plugin uncordon --gpu {A} --override, which overrides it"
    hear(one, Order("release"))
    words = {signal["name"]: signal["clears"] for signal in told(one)["signals"]}
    assert words["xid"].startswith(f"a reset of the GPU (nvidia-smi -i {A} -pm 0 && nvidia-smi --gpu-reset -i {A} && ")
    hear(one, Order("resume"))
    words = {signal["name"]: signal["clears"] for signal in told(one)["signals"]}
    assert words["xid"].startswith(reset)


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
def test_the_advice_is_what_the_driver_asks_for(action, words):
    one = ledger(policy=UNGUARDED)
    (change,) = hear(one, Sample(counting=0, recovery_action=action))
    (signal,) = told(one)["signals"]
    assert signal["action"].startswith(words)
    assert change.action == signal["action"]


def test_it_can_be_written_as_json():
    one = ledger()
    hear(one, HUNG, XidEvent(48), DriverEvent(0x400), LOST, Order("cordon"), *[ERROR] * 3, XidEvent(31))
    said = explain(one, GPUS, 1_100.0)
    assert msgspec.json.decode(msgspec.json.encode(said)) == said


# What would clear it


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ([Order("cordon", "fan is loud")], f"gpu-plugin uncordon --gpu {A}"),
        ([Order("release")], f"gpu-plugin resume --gpu {A}"),
        ([Order("release"), Order("resume")], "the first good look at it"),
        ([HUNG], "three answers in a row"),
        ([HUNG, GOOD, GOOD], "three answers in a row"),
        ([ERROR] * 3, "five answers in a row"),
        ([*[ERROR] * 3, GOOD], "five answers in a row"),
        ([HOT, HOT], "a temperature below 84 °C, at every look for 300 s" + VOUCH),
        ([HOT, HOT, GOOD], "a temperature below 84 °C, at every look for 300 s (1 min 38 s of it so far)" + VOUCH),
        ([Sample(counting=0, energy=5), LOST], BACK.replace(COMMANDS, PERSISTENT)),
        ([Sample(counting=0, energy=5), LOST, GOOD], BACK.replace(COMMANDS, PERSISTENT) + VOUCH),
        ([LOST], "3 more good looks in a row: the plugin knew no counter of it that a reset changes"),
        ([XidEvent(48), Sample(counting=7, energy=5)], f"{RESET}; {NO_PERSISTENCE}{VOUCH}"),
        ([XidEvent(48), Sample(counting=0)], f"{RESET.replace(COMMANDS, PERSISTENT)}; {NO_COUNTER}{VOUCH}"),
        ([XidEvent(79), Sample(counting=7)], REBOOT + VOUCH),
        (
            [Sample(sram_threshold=True, binding=1)] * 3,
            "nothing by itself: have the GPU replaced; good readings after the GPU was enumerated again (a repaired "
            "part), " + VOUCH.removeprefix("; "),
        ),
        (
            [Sample(sram_threshold=True, binding=1), Sample(sram_threshold=False, binding=2)],
            "2 more good looks in a row: it was enumerated again" + VOUCH,
        ),
        ([XidEvent(142)], "nothing by itself: have the GPU inspected by its vendor" + VOUCH),
        (
            [Sample(counting=0, recovery_action=1)],
            f"three looks in a row at which the driver asks for nothing, as after a reset ({COMMANDS}){VOUCH}",
        ),
        ([Sample(counting=0, recovery_action=2)], "three looks in a row at which the driver asks for nothing" + VOUCH),
        (
            [XidEvent(31)],
            "at 1970-01-01 00:26:40 UTC, unless another comes",
        ),
        (
            [Sample(counting=0, energy=5_000), XidEvent(48), Sample(counting=0, energy=10)],
            "2 more good looks in a row: its reset was seen" + VOUCH,
        ),
        ([XidEvent(79)], REBOOT + VOUCH),
        ([DriverEvent(0x400)], f"a day without another; or {RESET}"),
        (
            [DriverEvent(0x400), GOOD],
            f"at 1970-01-02 00:16:41 UTC, unless another comes; or {RESET}",
        ),
    ],
)
def test_what_would_clear_it_is_exact_about_what_is_missing(seen, words):
    assert cleared(*seen) == words


def test_a_recovery_time_of_none_asks_for_one_reading():
    assert cleared(HOT, HOT, policy=replace(UNGUARDED, temperature_recovery=0)) == f"a temperature below 84 °C{VOUCH}"


def test_a_margin_that_must_be_regained_is_named_in_numbers():
    policy, part = replace(UNGUARDED, temperature_recovery=300), Facts(margins=Thresholds(shutdown=-8, slowdown=-2))
    latch = Latch(LEVEL, FATAL, "words", 1.0)
    words = clears(Case(LatchKey("margin"), latch, policy, A, 2.0, part))
    assert words == f"3 °C or more to its T.Limit, at every look for 120 s (300 s if it was FATAL){VOUCH}"


def test_a_lost_gpu_that_answers_again_waits_for_good_looks():
    assert cleared(Sample(binding=1), LOST) == BACK
    assert (
        cleared(Sample(binding=1), LOST, Sample(binding=2)) == f"2 more good looks in a row: it was found again{VOUCH}"
    )
    resumed = Sample(counting=0, energy=5), LOST, Order("release"), Order("resume")
    assert cleared(*resumed, signal="lost") == "3 more good looks in a row: it was found again"
    assert cleared(LOST, GOOD).startswith("2 more good looks in a row")


def test_what_holds_up_a_proof_is_named():
    words = cleared(Sample(counting=0, energy=5_000), XidEvent(48), HOT, HOT, signal="xid")
    assert words == f"{RESET.replace(COMMANDS, PERSISTENT)}, counted once temperature is over{SHOWN}{VOUCH}"


def test_a_xid_that_passes_by_itself_says_until_when():
    words = cleared(XidEvent(92))
    assert words == f"at 1970-01-02 00:16:40 UTC, unless another comes; or {RESET}"


def test_a_gpu_that_is_held_back_says_until_when():
    seen = [HUNG, GOOD, GOOD, GOOD] * 3
    words = "time: it is held back until 1970-01-01 01:16:48 UTC, 58 min from now"
    assert cleared(*seen, policy=GUARDED) == words + VOUCH
    assert cleared(*seen, policy=GUARDED, now=1_008.0) == words.replace("58 min", "1 h") + VOUCH
    assert cleared(*seen, policy=GUARDED, now=5_000.0) == "the next good look at it" + VOUCH


def test_what_an_operator_vouched_for_says_so():
    one = ledger(policy=UNGUARDED)
    hear(one, HOT, HOT)
    one.override(A)
    (signal,) = told(one)["signals"]
    assert signal["verdict"] == "DEGRADED"
    assert (
        signal["clears"] == "a temperature below 84 °C, at every look for 300 s; overridden by an operator until then"
    )


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_has_words_for_what_clears_it(signal):
    """Whatever its latch says: one that another version wrote may say anything."""
    key = LatchKey(signal, "48" if signal == "xid" else "")
    for proof in Proof:
        latch = Latch(SIGNALS[signal].memory, FATAL, "words", 1.0, proof)
        words = clears(Case(key, latch, GUARDED, A, 2.0, Facts()))
        assert words, proof
        assert not re.search(r"\bID\b|None|\(\)|^;", words), proof
        advised = advice(key, GUARDED, A, latch)
        assert advised, proof
        assert not re.search(r"\bID\b", advised), proof
        assert "gpu-plugin" not in advised, proof  # commands are told once


@pytest.mark.parametrize(
    ("key", "number"), [(LatchKey("xid", "48"), 48), (LatchKey("xid"), None), (LatchKey("driver-event", "48"), None)]
)
def test_the_xid_of_a_latch(key, number):
    assert xid_number(key) == number


def test_energies_prove_what_is_said():
    """What is said to be missing is what closes it."""
    one = ledger(policy=UNGUARDED)
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48))
    for left, energy in ((2, 10), (1, 20)):
        hear(one, *energies(energy))
        (signal,) = told(one)["signals"]
        assert signal["clears"].startswith(f"{left} more good look")
        assert signal["action"] == f"nothing more: {left} good look{'s' if left > 1 else ''} to go"
    hear(one, *energies(30))
    assert told(one)["signals"] == []
    assert one.facts(A) == H200
