"""What a GPU that is too hot is told by: how bad it was, how it is now, and its limit, in words and in numbers."""

from typing import Any

import msgspec
import pytest

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.explain import explain
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample
from tests.unit.health.ledgers import UNGUARDED, A

FACTS = Facts(Thresholds(shutdown=92, slowdown=87, memory_max=95), Thresholds(shutdown=-8, slowdown=-2))
LOST = Sample(fault=Fault.HUNG)
ELSEWHERE = frozenset({"temperature"})


def watched(past: tuple[Evidence, ...] = ()) -> HealthLedger:
    made = HealthLedger(UNGUARDED, "boot-1")
    made.watch(A, FACTS)
    made.replay(past)
    return made


def hear(one: HealthLedger, *seen: Observation, begin: float = 1_000.0) -> HealthLedger:
    for at, each in enumerate(seen):
        one.observe(A, each, begin + 5 * at)
    return one


def told(one: HealthLedger, signal: str) -> dict[str, Any]:
    ((found,)) = [each for each in explain(one, [Gpu(A, 0)], 2_000.0)["gpus"][0]["signals"] if each["name"] == signal]
    return dict(found)


def hot(*celsius: int | None) -> list[Observation]:
    return [Sample(temperature=each) for each in celsius]


@pytest.mark.parametrize(
    ("signal", "seen", "words", "readings"),
    [
        (
            "temperature",
            hot(97, 91, 88),
            "97 °C at its peak, 88 °C now, shutdown threshold 92 °C",
            [{"name": "temperature", "limit": "shutdown", "threshold": 92, "worst": 97, "now": 88}],
        ),
        (
            "temperature",
            [*hot(93, 97), LOST],
            "97 °C at its peak, not read now, shutdown threshold 92 °C",
            [{"name": "temperature", "limit": "shutdown", "threshold": 92, "worst": 97, "now": None}],
        ),
        (
            "slowdown-temperature",
            [*[Sample(temperature=88, memory_temperature=80)] * 4, Sample(temperature=60, memory_temperature=80)],
            "88 °C at its peak, 60 °C now, slowdown threshold 87 °C",
            [{"name": "temperature", "limit": "slowdown", "threshold": 87, "worst": 88, "now": 60}],
        ),
        (
            "slowdown-temperature",
            [
                *[Sample(temperature=50, memory_temperature=99)] * 4,
                Sample(temperature=88, memory_temperature=96),
                Sample(temperature=70, asked=ELSEWHERE),
            ],
            (
                "88 °C at its peak, 70 °C now, slowdown threshold 87 °C; "
                "memory 99 °C at its peak, 96 °C now, slowdown threshold 95 °C"
            ),
            [
                {"name": "temperature", "limit": "slowdown", "threshold": 87, "worst": 88, "now": 70},
                {"name": "memory_temperature", "limit": "slowdown", "threshold": 95, "worst": 99, "now": 96},
            ],
        ),
        (
            "margin",
            [Sample(margin=each) for each in (30, *[-3] * 4, 1)],
            "-3 °C to its T.Limit at worst, 1 °C now, slowdown threshold -2 °C",
            [{"name": "margin", "limit": "slowdown", "threshold": -2, "worst": -3, "now": 1}],
        ),
        (
            "margin",
            [Sample(margin=each) for each in (30, *[-3] * 4, -9, -7, 0)],
            "-9 °C to its T.Limit at worst, 0 °C now, shutdown threshold -8 °C",
            [{"name": "margin", "limit": "shutdown", "threshold": -8, "worst": -9, "now": 0}],
        ),
    ],
)
def test_heat_is_told_by_its_worst_by_what_it_is_now_and_by_its_limit(signal, seen, words, readings):
    found = told(hear(watched(), *seen), signal)
    assert (found["detail"], found["readings"]) == (words, readings)


@pytest.mark.parametrize("measure", ["temperature", "margin"])
def test_a_restart_knows_how_bad_it_was_and_looks_for_itself(measure):
    warm = measure == "temperature"
    worst, now = (97, 85) if warm else (-9, 0)
    opening = (97, 93, now) if warm else (30, -9, -7, now)
    before = hear(watched(), *[Sample(temperature=each) if warm else Sample(margin=each) for each in opening])
    written = msgspec.json.decode(msgspec.json.encode(before.evidence()), type=tuple[Evidence, ...])
    assert all(each.possible for each in written)
    after = watched(written)
    ((reading,)) = told(after, measure)["readings"]
    assert (reading["worst"], reading["now"]) == (worst, None)
    hear(after, Sample(temperature=now) if warm else Sample(margin=now), begin=1_100.0)
    ((reading,)) = told(after, measure)["readings"]
    assert (reading["worst"], reading["now"]) == (worst, now)


def test_only_a_new_worst_is_news():
    one = hear(watched(), *hot(93, 93, 93, 93))
    before = one.revision
    hear(one, *hot(93, 90, 89), begin=1_100.0)
    assert one.revision == before
    hear(one, *hot(94), begin=1_200.0)
    assert one.revision == before + 2  # of both signals
    assert one.reason(A) == "94 °C at its peak, shutdown threshold 92 °C"


def test_one_that_closed_begins_anew():
    cool = [Sample(temperature=50)] * 100
    one = hear(watched(), *hot(110, 110), *cool)
    hear(one, *hot(91, 92), begin=2_000.0)
    assert told(one, "temperature")["readings"][0]["worst"] == 92


def test_what_an_earlier_version_wrote_down_is_told_in_its_words():
    past = Evidence("boot-1", A, "temperature", "FATAL", "96 °C, the GPU shuts down at 95 °C", 900.0)
    found = told(watched((past,)), "temperature")
    assert found["detail"] == "96 °C, the GPU shuts down at 95 °C"
    assert "readings" not in found


@pytest.mark.parametrize("worst", [10**6, "hot", None, 1e300])
def test_readings_that_no_sensor_gives_are_not_believed(worst):
    reading = {"name": "temperature", "limit": "shutdown", "threshold": 92, "worst": worst}
    past = Evidence("boot-1", A, "temperature", "FATAL", "words", 900.0, memory={"readings": [reading]})
    found = told(watched((past,)), "temperature")
    assert (found["detail"], found["verdict"]) == ("words", "FATAL")
