"""Temperature, slowdown-temperature and margin: limits, the proof of coolness, and the readings that are reported."""

from typing import Any

import msgspec
import pytest

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.health.evidence import Evidence, decode
from gpu_plugin.health.explain import explain
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import H200, UNGUARDED, A, observe
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL


def degrees(*values: int | None, memory: int | None = None) -> list[Observation]:
    return [Sample(temperature=value, memory_temperature=memory) for value in values]


def memory(*values: int | None, gpu: int | None = 50) -> list[Observation]:
    return [Sample(temperature=gpu, memory_temperature=value) for value in values]


def margins(*values: int | None) -> list[Observation]:
    return [Sample(margin=value) for value in values]


def near(facts: Facts = H200, *, known: bool = True, recovery: float = 300.0) -> Watched:
    """Return a GPU for the margin signal. With `known`, its sensor has shown a positive margin."""
    gpu = Watched("margin", facts, HealthPolicy(temperature_recovery=recovery, flap_hold=0))
    gpu.see(*margins(55 if known else None))
    return gpu


# The limits: shutdown at 95 °C, slowdown of the GPU at 89 °C and of its memory at 95 °C, margins -8 °C and -2 °C


@pytest.mark.parametrize(
    ("signal", "seen", "verdict"),
    [
        ("temperature", degrees(*[92] * 10), OK),
        ("temperature", degrees(93), OK),
        ("temperature", degrees(93, 93), FATAL),
        ("temperature", degrees(99, 93), FATAL),
        ("temperature", degrees(93, 92, 93), FATAL),
        ("temperature", degrees(93, *[89] * 20, 93), FATAL),
        ("temperature", degrees(*[93, 88] * 20), OK),
        ("temperature", degrees(93, None, 93), OK),
        ("temperature", degrees(93, 93, 92, 90, 84), FATAL),
        ("slowdown-temperature", degrees(*[88] * 10), OK),
        ("slowdown-temperature", degrees(*[89] * 3), OK),
        ("slowdown-temperature", degrees(*[89] * 4), DEGRADED),
        ("slowdown-temperature", degrees(*[120] * 50), DEGRADED),
        ("slowdown-temperature", degrees(89, 89, 89, 88, 89, 89, 89), OK),
        ("slowdown-temperature", [*degrees(89, 89), XidEvent(31), *degrees(89, 89)], DEGRADED),
        ("slowdown-temperature", memory(*[94] * 10), OK),
        ("slowdown-temperature", memory(*[95] * 3), OK),
        ("slowdown-temperature", memory(*[95] * 4), DEGRADED),
        ("slowdown-temperature", memory(*[95] * 4, gpu=None), DEGRADED),
        ("slowdown-temperature", [*degrees(89, 89), *memory(95, 95)], DEGRADED),
        ("margin", margins(55, *[-1] * 10), OK),
        ("margin", margins(55, *[-2] * 3), OK),
        ("margin", margins(55, *[-2] * 4), DEGRADED),
        ("margin", margins(55, *[-5] * 50), DEGRADED),
        ("margin", margins(55, -6), OK),
        ("margin", margins(55, -6, -6), FATAL),
        ("margin", margins(55, -20, -6), FATAL),
        ("margin", margins(55, -6, -5, -6), FATAL),
        ("margin", margins(55, -6, -2, -2, -6), FATAL),
        ("margin", margins(55, *[-6, -1] * 20), OK),
        ("margin", margins(55, -6, None, -6), OK),
        ("margin", margins(55, -2, -2, -6, -6), FATAL),
        ("margin", margins(55, -2, -2, -2, -2, -2, -6), DEGRADED),
        ("margin", margins(55, -2, -2, -2, -2, -6, None, -6), DEGRADED),
        ("margin", margins(55, -2, -2, -2, -2, -6, -6), FATAL),
        ("margin", margins(55, -6, -6, -2, -2, -2, -2), FATAL),
        ("margin", margins(*[0, -10, -10, None, -300] * 10), OK),  # such a sensor is not trusted
        ("margin", margins(*[0, -10] * 10, 1, -10, -10), FATAL),
    ],
)
def test_looks_near_a_limit_open_the_signal_of_the_limit(signal, seen, verdict):
    assert Watched(signal, H200).see(*seen) is verdict


@pytest.mark.parametrize(
    ("signal", "facts", "seen", "verdict"),
    [
        ("temperature", Facts(Thresholds(slowdown=89)), degrees(*[500] * 10), OK),
        ("slowdown-temperature", Facts(), degrees(*[500] * 10, memory=500), OK),
        *[
            ("margin", Facts(margins=limits), margins(55, *seen), verdict)
            for limits in (Thresholds(), Thresholds(shutdown=0, slowdown=0), Thresholds(95, 89))
            for seen, verdict in (([1] * 10, OK), ([0] * 3, OK), ([0] * 4, DEGRADED), ([-50] * 50, DEGRADED))
        ],
    ],
)
def test_a_part_without_a_limit_is_never_fatal(signal, facts, seen, verdict):
    assert Watched(signal, facts).see(*seen) is verdict


# The proof of coolness


@pytest.mark.parametrize(("seconds", "looks"), [(0.0, 1), (60.0, 2), (300.0, 6)])
def test_the_policy_sets_the_time_to_recover(seconds, looks):
    for signal, hot, warm, cool in (
        ("temperature", degrees(120, 120), degrees(84), degrees(83)),
        ("margin", margins(55, -6, -6), margins(2), margins(3)),
    ):
        gpu = Watched(signal, H200, HealthPolicy(temperature_recovery=seconds, flap_hold=0))
        gpu.see(*hot)
        assert gpu.see(*warm) is FATAL
        assert gpu.see(*cool * (looks - 1), every=60) is FATAL
        assert gpu.see(*cool) is OK
        assert gpu.see(*hot) is FATAL, "the sensor is still trusted"


@pytest.mark.parametrize(
    ("signal", "between"),
    [
        *[("slowdown-temperature", each) for each in [*degrees(85, 89), *memory(91, gpu=84)]],
        *[("margin", each) for each in margins(2, -2, -9)],
    ],
)
def test_warmth_starts_the_time_to_recover_again(signal, between):
    gpu = Watched(signal, H200)
    gpu.see(*margins(55), *(degrees(*[89] * 4) if signal != "margin" else margins(*[-2] * 4)))
    cool = Sample(temperature=84, margin=3)
    assert gpu.see(cool, cool, between, cool, cool, every=60) >= DEGRADED
    assert gpu.see(*[cool] * 6, every=60) is OK


@pytest.mark.parametrize(("slowdown", "cool"), [(None, 84), (200, 89), (80, 74)])
def test_a_missing_or_odd_slowdown_limit_lets_a_gpu_recover(slowdown, cool):
    gpu = Watched("temperature", Facts(Thresholds(shutdown=95, slowdown=slowdown)))
    gpu.see(*degrees(120, 120))
    assert gpu.see(*degrees(*[cool + 1] * 10), every=60) is FATAL
    assert gpu.see(*degrees(*[cool] * 6), every=60) is OK


def test_without_limits_a_margin_of_five_degrees_is_cool():
    gpu = near(Facts())
    gpu.see(*margins(*[0] * 4))
    assert gpu.see(*margins(*[4] * 10), every=60) is DEGRADED
    assert gpu.see(*margins(*[5] * 3), every=60) is OK


@pytest.mark.parametrize(
    ("signal", "hot", "cool", "looks"),
    [("temperature", 120, 83, 6), ("slowdown-temperature", 89, 84, 3)],
)
def test_limits_that_can_no_longer_be_read_prove_nothing(signal, hot, cool, looks):
    gpu = Watched(signal, H200)
    gpu.see(*degrees(*[hot] * 4))
    verdict = gpu.verdict
    gpu.ledger.watch(GPU, Facts())
    assert gpu.see(*degrees(*[20] * 10), every=60) is verdict
    gpu.ledger.watch(GPU, H200)
    assert gpu.see(*degrees(*[cool] * (looks - 1)), every=60) is verdict
    assert gpu.see(*degrees(cool)) is OK


@pytest.mark.parametrize("opening", [memory(*[95] * 4), [*degrees(*[89] * 4), *memory(95)]])
def test_memory_that_was_hot_must_be_read_cool(opening):
    gpu = Watched("slowdown-temperature", H200)
    gpu.see(*opening)
    for values in ([None] * 10, [91] * 10):
        assert gpu.see(*memory(*values), every=60) is DEGRADED
    gpu.restart()
    assert gpu.see(*memory(*[None] * 10, 90, 90), every=60) is DEGRADED
    assert gpu.see(*memory(90)) is OK


@pytest.mark.parametrize(
    ("seen", "verdicts"), [([-2] * 4, (DEGRADED, DEGRADED)), ([-2] * 4 + [-6], (DEGRADED, FATAL)), ([-6], (OK, FATAL))]
)
def test_a_restart_continues_the_count_of_looks_near_shutdown(seen, verdicts):
    gpu = near()
    gpu.see(*margins(*seen))
    assert (gpu.restart(), gpu.see(*margins(-6))) == verdicts
    assert gpu.see(*margins(-6)) is FATAL


def test_a_look_that_starts_a_count_asks_for_another_look_soon():
    gpu = Watched("slowdown-temperature", H200)
    for celsius, suspicious in ((89, True), (50, False)):
        gpu.see(*degrees(celsius))
        assert gpu.ledger.suspicious(GPU) is suspicious


# The readings that are reported

PART = Facts(Thresholds(shutdown=92, slowdown=87, memory_max=95), Thresholds(shutdown=-8, slowdown=-2))


def watched(past: tuple[Evidence, ...] = ()) -> HealthLedger:
    made = HealthLedger(UNGUARDED, "boot-1")
    made.watch(A, PART)
    made.replay(past)
    return made


def reported(one: HealthLedger, signal: str) -> dict[str, Any]:
    (found,) = [each for each in explain(one, Gpu(A, 0), 2_000.0).signals if each.name == signal]
    return dict(msgspec.json.decode(msgspec.json.encode(found)))


def reading(name: str, limit: str, threshold: int, worst: int, now: int | None) -> dict[str, Any]:
    return {"name": name, "limit": limit, "threshold": threshold, "worst": worst, "now": now}


@pytest.mark.parametrize(
    ("signal", "seen", "readings"),
    [
        ("temperature", degrees(97, 91, 88), [reading("temperature", "shutdown", 92, 97, 88)]),
        (
            "temperature",
            [*degrees(93, 97), Sample(fault=Fault.HUNG)],
            [reading("temperature", "shutdown", 92, 97, None)],
        ),
        (
            "slowdown-temperature",
            degrees(*[88] * 4, 60, memory=80),
            [reading("temperature", "slowdown", 87, 88, 60)],
        ),
        (
            "slowdown-temperature",
            [*memory(*[99] * 4), *memory(96, gpu=88), Sample(temperature=70, asked=frozenset({"temperature"}))],
            [
                reading("temperature", "slowdown", 87, 88, 70),
                reading("memory_temperature", "slowdown", 95, 99, 96),
            ],
        ),
        ("margin", margins(30, *[-3] * 4, 1), [reading("margin", "slowdown", -2, -3, 1)]),
        ("margin", margins(30, *[-3] * 4, -9, -7, 0), [reading("margin", "shutdown", -8, -9, 0)]),
    ],
)
def test_a_report_has_the_worst_reading_the_latest_and_the_limit(signal, seen, readings):
    one = watched()
    observe(one, *seen, every=5.0)
    found = reported(one, signal)
    assert found["readings"] == readings
    for each in readings:
        if each["name"] == "margin":  # in degrees from the temperature at which the hardware acts
            wanted = [f"{each['threshold'] - each['worst']} °C above"]
        else:
            now = "not read now" if each["now"] is None else f"{each['now']} °C now"
            wanted = [f"{each['worst']} °C", now, f"at {each['threshold']} °C"]
        assert [words for words in wanted if words not in found["detail"]] == []


@pytest.mark.parametrize(
    ("name", "opening", "worst", "now"),
    [("temperature", (97, 93, 85), 97, 85), ("margin", (30, -9, -7, 0), -9, 0)],
)
def test_a_restart_keeps_the_worst_reading_and_reads_its_own(name, opening, worst, now):
    one = watched()
    observe(one, *[Sample(**{name: value}) for value in opening], every=5.0)
    written = tuple(decode(msgspec.json.encode(each)) for each in one.evidence())
    after = watched(written)
    for latest in (None, now):
        ((found,)) = reported(after, name)["readings"]
        assert (found["worst"], found["now"]) == (worst, latest)
        observe(after, Sample(**{name: now}), start=1_100.0)


def test_only_a_new_worst_reading_is_stored():
    one = watched()
    observe(one, *degrees(93, 93, 93, 93), every=5.0)
    before = one.revision
    observe(one, *degrees(93, 90, 89), start=1_100.0)
    assert one.revision == before
    observe(one, *degrees(94), start=1_200.0)
    assert one.revision == before + 2, "of both signals"
    assert "94 °C" in one.reason(A)
    gpu = near()
    revision = gpu.ledger.revision
    gpu.see(*margins(*[-6, 10] * 10), *margins(*range(10, 40)))
    assert gpu.ledger.revision == revision + 20


def test_a_signal_that_opens_again_starts_with_new_readings():
    one = watched()
    observe(one, *degrees(110, 110), *degrees(50) * 100, every=5.0)
    observe(one, *degrees(91, 92), start=2_000.0)
    assert reported(one, "temperature")["readings"][0]["worst"] == 92


@pytest.mark.parametrize("worst", [10**6, "hot", None, 1e300, "no readings"])
def test_evidence_without_valid_readings_keeps_its_verdict_and_words(worst):
    readings = [{"name": "temperature", "limit": "shutdown", "threshold": 92, "worst": worst}]
    stored = {} if worst == "no readings" else {"readings": readings}
    latch = {"verdict": 3, "detail": "words", "since": 900.0, "memory": stored}
    past = decode(msgspec.json.encode({"boot_id": "boot-1", "uuid": A, "signal": "temperature", "latch": latch}))
    found = reported(watched((past,)), "temperature")
    assert (found["detail"], found["verdict"], bool(found["readings"])) == ("words", "FATAL", False)
