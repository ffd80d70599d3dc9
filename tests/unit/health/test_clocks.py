from collections.abc import Iterable
from itertools import cycle, islice

import pytest

from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Context
from gpu_plugin.health.signals.clocks import hw_slowdown
from tests.unit.health.watching import Watched

OK, DEGRADED = Verdict.OK, Verdict.DEGRADED
IDLE, POWER_CAP, HARDWARE, THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x40, 0x80


def clocked() -> Watched:
    """A GPU whose clocks are looked at."""
    return Watched("hw-slowdown", Facts())


def reasons(*masks: int | None) -> list[Observation]:
    return [Sample(clocks_event_reasons=mask) for mask in masks]


def pattern(*masks: int | None, samples: int) -> list[Observation]:
    """So many samples that show these reasons in turn."""
    return reasons(*islice(cycle(masks), samples))


@pytest.mark.parametrize("every", [1.0, 5.0, 15.0, 60.0])
@pytest.mark.parametrize("mask", [THERMAL, BRAKE, THERMAL | BRAKE, THERMAL | HARDWARE | POWER_CAP])
def test_a_new_process_judges_once_it_has_watched_for_ten_minutes(mask, every):
    gpu = clocked()
    assert gpu.see(*reasons(*[mask] * int(600 / every)), every=every) is OK
    assert gpu.see(*reasons(mask)) is DEGRADED


@pytest.mark.parametrize("mask", [0, IDLE, POWER_CAP, HARDWARE, HARDWARE | POWER_CAP | IDLE, 0x2, 0x10, 0x20, 0x100])
def test_other_reasons_are_no_fault(mask):
    assert set(clocked().steps(*reasons(*[mask] * 500))) == {OK}


def test_six_minutes_are_enough_once_ten_have_been_watched():
    gpu = clocked()
    gpu.see(*reasons(*[0] * 200))
    assert gpu.see(*reasons(*[THERMAL] * 72)) is OK  # the first of them ends a good interval
    assert gpu.see(*reasons(THERMAL)) is DEGRADED


def test_slow_time_before_the_ten_minutes_were_over_counts():
    gpu = clocked()
    assert gpu.see(*reasons(*[THERMAL] * 80), *reasons(*[0] * 40)) is OK
    assert gpu.see(*reasons(0)) is DEGRADED


@pytest.mark.parametrize("every", [1.0, 5.0, 15.0])
@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ((THERMAL, 0), OK),
        ((THERMAL, 0, BRAKE, 0), OK),
        ((THERMAL, THERMAL, 0, 0, 0), OK),
        ((THERMAL, THERMAL, THERMAL, 0, 0), DEGRADED),
        ((THERMAL, BRAKE, 0), DEGRADED),
        ((THERMAL, HARDWARE, THERMAL, HARDWARE, POWER_CAP), OK),
    ],
)
def test_the_share_of_slow_time_decides_whatever_the_interval(masks, expected, every):
    assert clocked().see(*pattern(*masks, samples=int(2_000 / every)), every=every) is expected


def test_slowness_leaves_the_window_bit_by_bit():
    gpu = clocked()
    gpu.see(*reasons(*[THERMAL] * 61), *reasons(*[0] * 52))
    assert set(gpu.steps(*reasons(*[THERMAL] * 68))) == {OK}  # 340 seconds at any time
    assert gpu.see(*reasons(*[THERMAL] * 5)) is DEGRADED
    gpu = clocked()
    gpu.see(*reasons(*[0] * 7), *reasons(*[THERMAL] * 60), *reasons(*[0] * 47))
    assert gpu.see(*reasons(*[THERMAL] * 8)) is OK
    assert gpu.see(*reasons(*[THERMAL] * 13)) is DEGRADED


def test_slowness_long_ago_is_forgotten():
    gpu = clocked()
    seen = [*reasons(*[0] * 120), *[*reasons(*[THERMAL] * 60), *reasons(*[0] * 121)] * 5]
    assert set(gpu.steps(*seen)) == {OK}
    assert not gpu.ledger.suspicious("GPU-aaaa")


def test_what_could_not_be_read_is_neither_slow_nor_good():
    gpu = clocked()
    gpu.see(*reasons(*[0] * 200))
    assert gpu.see(*reasons(*[THERMAL, None] * 72)) is OK
    assert gpu.see(*reasons(*[None] * 500)) is OK
    gpu = clocked()
    gpu.see(*reasons(*[0] * 200), *reasons(*[THERMAL] * 40), *reasons(*[None] * 20))
    assert gpu.see(*reasons(*[THERMAL] * 33)) is OK
    assert gpu.see(*reasons(THERMAL, THERMAL)) is DEGRADED


def test_a_part_that_does_not_say_is_silent():
    assert set(clocked().steps(*reasons(*[None] * 500), XidEvent(31))) == {OK}


@pytest.mark.parametrize(
    ("mask", "why"), [(THERMAL, "heat"), (BRAKE, "the power brake"), (THERMAL | BRAKE, "heat and the power brake")]
)
def test_what_holds_the_clocks_down_is_told(mask, why):
    gpu = clocked()
    gpu.see(*reasons(*[0] * 200), *reasons(*[mask] * 73))
    assert gpu.latch.detail == f"clocks held down by the hardware for {why} during 60% of ten minutes"


def slow() -> Watched:
    """A GPU whose clocks were held down."""
    gpu = clocked()
    assert gpu.see(*reasons(*[THERMAL] * 121)) is DEGRADED
    return gpu


def test_ten_minutes_without_are_a_recovery():
    gpu = slow()
    assert gpu.see(*reasons(*[HARDWARE | POWER_CAP] * 120)) is DEGRADED
    assert gpu.see(*reasons(0)) is OK


@pytest.mark.parametrize("interruption", [*reasons(THERMAL, BRAKE, None), Sample(fault=Fault.HUNG, detail="no answer")])
def test_slowness_or_silence_in_between_starts_the_ten_minutes_anew(interruption):
    gpu = slow()
    assert gpu.see(*reasons(*[0] * 120), interruption, *reasons(*[0] * 120)) is DEGRADED
    assert gpu.see(*reasons(0)) is OK


def test_slowness_that_comes_and_goes_keeps_open_what_is_open():
    assert set(slow().steps(*pattern(THERMAL, *[0] * 100, samples=2_000))) == {DEGRADED}


def test_after_a_recovery_the_next_slowness_is_judged_without_a_new_wait():
    gpu = slow()
    gpu.see(*reasons(*[0] * 121))
    assert gpu.see(*reasons(*[THERMAL] * 72)) is OK
    assert gpu.see(*reasons(THERMAL)) is DEGRADED


def test_slowness_outlives_a_restart_and_is_proven_over_anew():
    gpu = slow()
    gpu.see(*reasons(*[0] * 100))
    assert gpu.restart() is DEGRADED
    assert gpu.see(*reasons(*[0] * 120)) is DEGRADED
    assert gpu.see(*reasons(0)) is OK


def remembered(masks: Iterable[int], every: float) -> list[AnyLatch]:
    """The latch after each of these."""
    policy, latches, latch = HealthPolicy(), [], None
    for at, mask in enumerate(masks):
        ctx = Context(1_000.0 + at * every, LatchKey("hw-slowdown"), Facts(), policy)
        latch = hw_slowdown(latch, Sample(clocks_event_reasons=mask), ctx)
        assert latch is not None
        latches.append(latch)
    return latches


@pytest.mark.parametrize("every", [0.05, 1.0, 7.0])
def test_what_is_remembered_is_bounded_whatever_the_interval(every):
    latches = remembered(islice(cycle([THERMAL, 0]), int(1_500 / every)), every)
    assert max(len(latch.memory.minutes) for latch in latches) == 11


def test_a_gpu_at_ease_keeps_the_very_same_latch():
    first, *others = remembered([0, POWER_CAP, IDLE] * 10, 5.0)
    assert all(latch is first for latch in others)
