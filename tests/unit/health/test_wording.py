"""A change of health in words: its effect, and the state that stays."""

import pytest

from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.wording import Change, news

OK, APP, DEGRADED, FATAL = Verdict
STAYS = ("stays Unhealthy", "stays degraded", "Healthy again", "stays as it is")


def change(signal, verdict, before, detail, **more):
    return Transition("GPU-1", signal, verdict, before, detail, 1.0, **more)


@pytest.mark.parametrize(
    ("change", "effect", "stays"),
    [
        (change("xid", FATAL, OK, "Xid 79"), Change.UNHEALTHY, set()),
        (change("xid", FATAL, DEGRADED, "Xid 48"), Change.UNHEALTHY, set()),
        (change("nvlink", FATAL, OK, "NVLink 5", others=FATAL), Change.UNCHANGED, {STAYS[0]}),
        (change("nvlink", DEGRADED, OK, "NVLink 5"), Change.DEGRADED, set()),
        (change("nvlink", DEGRADED, OK, "NVLink 5", others=DEGRADED), Change.UNCHANGED, {STAYS[1]}),
        (change("nvlink", DEGRADED, OK, "NVLink 5", others=FATAL), Change.UNCHANGED, {STAYS[0]}),
        (change("xid", DEGRADED, FATAL, "Xid 48"), Change.DEGRADED, {STAYS[2]}),
        (change("xid", DEGRADED, FATAL, "Xid 48", others=FATAL), Change.UNCHANGED, {STAYS[0]}),
        (change("xid", APP, OK, "Xid 31"), Change.APPLICATION, {STAYS[3]}),
        (change("xid", APP, FATAL, "Xid 31"), Change.APPLICATION, {STAYS[2]}),
        (change("temperature", OK, FATAL, "94 °C"), Change.HEALTHY, {STAYS[2]}),
        (change("temperature", OK, FATAL, "94 °C", others=FATAL), Change.UNCHANGED, {STAYS[0]}),
        (change("temperature", OK, FATAL, "94 °C", others=DEGRADED), Change.DEGRADED, {STAYS[2]}),
        (change("nvlink", OK, DEGRADED, "NVLink 5"), Change.HEALTHY, set()),
        (change("nvlink", OK, DEGRADED, "NVLink 5", others=DEGRADED), Change.UNCHANGED, {STAYS[1]}),
        (change("xid", OK, APP, "Xid 31"), Change.UNCHANGED, set()),
        (change("cordon", FATAL, OK, "cordoned: fan"), Change.CORDONED, set()),
        (change("cordon", OK, FATAL, "cordoned"), Change.UNCORDONED, {STAYS[2]}),
        (change("cordon", OK, FATAL, "cordoned", others=FATAL), Change.UNCORDONED, {STAYS[0]}),
        (change("node-cordon", FATAL, OK, "cordoned"), Change.CORDONED, set()),
        (change("maintenance", FATAL, OK, "maintenance"), Change.RELEASED, set()),
        (change("maintenance", OK, FATAL, "maintenance"), Change.RESUMED, {STAYS[2]}),
    ],
)
def test_the_effect_is_the_change_of_the_gpus_state(change, effect, stays):
    told = news(change, "GPU 3")
    assert told.change is effect
    assert told.text.startswith("GPU 3")
    assert change.detail in told.text
    assert {each for each in STAYS if each in told.text} == stays


def test_a_signal_without_a_detail_is_named():
    assert "clocks" in news(change("clocks", DEGRADED, OK, ""), "GPU 3").text
