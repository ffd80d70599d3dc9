"""hw-slowdown: the share of ten minutes in which heat or the power brake held the clocks down."""

from itertools import cycle, islice

import pytest

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Observation, Sample
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED = Verdict.OK, Verdict.DEGRADED
IDLE, POWER_CAP, HARDWARE, THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x40, 0x80


def clocked() -> Watched:
    return Watched("hw-slowdown")


def reasons(*masks: int | None) -> list[Observation]:
    return [Sample(clocks_event_reasons=mask) for mask in masks]


@pytest.mark.parametrize("every", [1.0, 5.0, 15.0, 60.0])
@pytest.mark.parametrize("mask", [THERMAL, BRAKE, THERMAL | BRAKE, THERMAL | HARDWARE | POWER_CAP])
def test_a_new_process_judges_after_ten_minutes(mask, every):
    gpu = clocked()
    assert gpu.see(*reasons(*[mask] * int(600 / every)), every=every) is OK
    assert gpu.see(*reasons(mask)) is DEGRADED


@pytest.mark.parametrize("mask", [0, IDLE, POWER_CAP, HARDWARE, HARDWARE | POWER_CAP | IDLE, 0x2, 0x10, 0x20, 0x100])
def test_other_reasons_are_no_fault(mask):
    assert set(clocked().steps(*reasons(*[mask] * 500))) == {OK}


SLOW, FAST, UNREAD = [THERMAL], [0], [None]


@pytest.mark.parametrize(
    ("before", "last", "verdict"),
    [
        ([*FAST * 200, *SLOW * 72], SLOW, DEGRADED),  # the first slow look ends a good interval
        ([*SLOW * 80, *FAST * 40], FAST, DEGRADED),  # also before the ten minutes were over
        ([*SLOW * 61, *FAST * 52, *SLOW * 68], SLOW * 5, DEGRADED),  # slow looks leave the window
        ([*FAST * 7, *SLOW * 60, *FAST * 47, *SLOW * 8], SLOW * 13, DEGRADED),
        ([*FAST * 120, *(SLOW * 60 + FAST * 121) * 5], FAST, OK),
        ([*FAST * 200, *(SLOW + UNREAD) * 72, *UNREAD * 500], UNREAD, OK),
        ([*FAST * 200, *SLOW * 40, *UNREAD * 20, *SLOW * 33], SLOW * 2, DEGRADED),
        (UNREAD * 500, UNREAD, OK),
    ],
)
def test_six_slow_minutes_of_the_last_ten_open_it(before, last, verdict):
    gpu = clocked()
    assert set(gpu.steps(*reasons(*before))) == {OK}
    assert not gpu.ledger.suspicious(GPU)
    assert gpu.see(*reasons(*last)) is verdict


@pytest.mark.parametrize("every", [1.0, 5.0, 15.0])
@pytest.mark.parametrize(
    ("masks", "verdict"),
    [
        ((THERMAL, 0), OK),
        ((THERMAL, 0, BRAKE, 0), OK),
        ((THERMAL, THERMAL, 0, 0, 0), OK),
        ((THERMAL, THERMAL, THERMAL, 0, 0), DEGRADED),
        ((THERMAL, BRAKE, 0), DEGRADED),
        ((THERMAL, HARDWARE, THERMAL, HARDWARE, POWER_CAP), OK),
    ],
)
def test_the_share_of_slow_time_does_not_depend_on_the_interval(masks, verdict, every):
    assert clocked().see(*reasons(*islice(cycle(masks), int(2_000 / every))), every=every) is verdict


@pytest.mark.parametrize(
    ("mask", "named"), [(THERMAL, ["heat"]), (BRAKE, ["power brake"]), (THERMAL | BRAKE, ["heat", "power brake"])]
)
def test_the_detail_names_what_holds_the_clocks_down(mask, named):
    gpu = clocked()
    gpu.see(*reasons(*FAST * 200, *[mask] * 73))
    assert [each for each in ("heat", "power brake") if each in gpu.latch.detail] == named
    assert "60%" in gpu.latch.detail


@pytest.mark.parametrize("between", [THERMAL, BRAKE, None])
def test_ten_minutes_without_slow_clocks_close_it(between):
    gpu = clocked()
    gpu.see(*reasons(*SLOW * 121))
    good = [HARDWARE | POWER_CAP] * 120
    assert gpu.see(*reasons(*good, between, *good)) is DEGRADED
    assert gpu.see(*reasons(0)) is OK
    assert gpu.see(*reasons(*SLOW * 72)) is OK, "the next slowness is judged without a new wait"
    assert gpu.see(*reasons(THERMAL)) is DEGRADED


@pytest.mark.parametrize("every", [1.0, 7.0])
def test_the_memory_is_bounded_at_any_interval(every):
    gpu, most = clocked(), 0
    for mask in islice(cycle([THERMAL, 0]), int(800 / every)):
        gpu.see(*reasons(mask), every=every)
        assert gpu.stored is not None
        most = max(most, len(gpu.stored.memory.minutes))
    assert most == 11


def test_looks_without_slow_clocks_keep_the_same_latch():
    gpu = clocked()
    gpu.see(*reasons(0))
    first = gpu.stored
    for mask in [POWER_CAP, IDLE] * 10:
        gpu.see(*reasons(mask))
        assert gpu.stored is first
