import pytest

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.watching import Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
H200 = Facts(Thresholds(shutdown=95, slowdown=89, memory_max=95), Thresholds(shutdown=-8, slowdown=-2))
LOST = Sample(fault=Fault.LOST, detail="the GPU is lost")


def warm(facts: Facts = H200) -> Watched:
    """A GPU whose slowdown temperature is looked at."""
    return Watched("slowdown-temperature", facts)


def degrees(*values: int | None, memory: int | None = None) -> list[Observation]:
    return [Sample(temperature=value, memory_temperature=memory) for value in values]


def memory(*values: int | None, gpu: int | None = 50) -> list[Observation]:
    return [Sample(temperature=gpu, memory_temperature=value) for value in values]


# slowdown-temperature: GPU 89 °C, memory 95 °C


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (degrees(*[88] * 10), OK),
        (degrees(*[89] * 3), OK),
        (degrees(*[89] * 4), DEGRADED),
        (degrees(*[120] * 50), DEGRADED),
        (degrees(89, 89, 89, 88, 89, 89, 89), OK),
        (degrees(89, 89, 89, None, 89, 89, 89), OK),
        ([*degrees(*[89] * 3), LOST, *degrees(*[89] * 3)], OK),
        ([*degrees(89, 89), XidEvent(31), *degrees(89, 89)], DEGRADED),
        (degrees(*[89, 50] * 50), OK),
        (memory(*[94] * 10), OK),
        (memory(*[95] * 3), OK),
        (memory(*[95] * 4), DEGRADED),
        (memory(*[95] * 4, gpu=None), DEGRADED),
        ([*degrees(89, 89), *memory(95, 95)], DEGRADED),
    ],
)
def test_four_samples_in_a_row_at_a_slowdown_limit_are_too_hot(seen, expected):
    assert warm().see(*seen) is expected


def test_what_is_too_hot_is_told_with_its_limit():
    gpu = warm()
    gpu.see(*degrees(89, 89, 91, 90))
    assert gpu.latch.detail == "91 °C at its peak, slowdown threshold 89 °C"
    gpu = warm()
    gpu.see(*memory(*[96] * 4, gpu=90))
    assert (
        gpu.latch.detail
        == "90 °C at its peak, slowdown threshold 89 °C; memory 96 °C at its peak, slowdown threshold 95 °C"
    )


def test_two_minutes_of_coolness_are_a_recovery():
    gpu = warm()
    gpu.see(*degrees(*[89] * 4))
    assert gpu.see(*degrees(*[84] * 4), every=30) is DEGRADED
    assert gpu.see(*degrees(84)) is OK


@pytest.mark.parametrize("interruption", [*degrees(85, 89, None), LOST, *memory(91, gpu=84)])
def test_warmth_or_silence_in_between_starts_the_two_minutes_anew(interruption):
    gpu = warm()
    gpu.see(*degrees(*[89] * 4))
    assert gpu.see(*degrees(*[84] * 4), interruption, *degrees(*[84] * 4), every=30) is DEGRADED
    assert gpu.see(*degrees(84)) is OK


def test_heat_that_comes_and_goes_keeps_open_what_is_open():
    gpu = warm()
    gpu.see(*degrees(*[89] * 4))
    assert set(gpu.steps(*degrees(*[84, 89] * 100), every=60)) == {DEGRADED}


def test_memory_that_was_hot_must_be_read_cool():
    gpu = warm()
    gpu.see(*memory(*[95] * 4))
    assert gpu.see(*memory(*[None] * 10), every=60) is DEGRADED
    assert gpu.see(*memory(*[91] * 10), every=60) is DEGRADED
    assert gpu.see(*memory(*[90] * 2), every=60) is DEGRADED
    assert gpu.see(*memory(90)) is OK


def test_memory_that_became_hot_later_must_be_read_cool_too():
    gpu = warm()
    gpu.see(*degrees(*[89] * 4), *memory(95))
    assert gpu.see(*degrees(*[50] * 10), every=60) is DEGRADED
    assert gpu.see(*memory(*[90] * 3), every=60) is OK


def test_a_part_that_does_not_read_its_memorys_temperature_recovers_without():
    gpu = warm()
    gpu.see(*degrees(*[89] * 4))
    assert gpu.see(*degrees(*[84] * 3), every=60) is OK


def test_a_part_without_limits_is_never_too_hot():
    assert warm(Facts()).see(*degrees(*[500] * 10, memory=500)) is OK


def test_limits_that_are_not_said_any_more_prove_nothing():
    gpu = warm()
    gpu.see(*degrees(*[89] * 4))
    gpu.ledger.watch("GPU-aaaa", Facts())
    assert gpu.see(*degrees(*[20] * 10), every=60) is DEGRADED


def test_heat_outlives_a_restart_and_is_proven_over_anew():
    gpu = warm()
    gpu.see(*memory(*[95] * 4))
    gpu.see(*memory(*[50] * 2), every=60)
    assert gpu.restart() is DEGRADED
    assert gpu.see(*memory(*[None] * 10), every=60) is DEGRADED
    assert gpu.see(*memory(*[50] * 2), every=60) is DEGRADED
    assert gpu.see(*memory(50)) is OK


def test_more_looks_are_wanted_while_heat_or_coolness_is_being_counted():
    gpu = warm()
    gpu.see(*degrees(89))
    assert gpu.ledger.suspicious("GPU-aaaa")
    gpu.see(*degrees(50))
    assert not gpu.ledger.suspicious("GPU-aaaa")


# margin: shutdown at -8 °C, slowdown at -2 °C


def near(facts: Facts = H200, *, known: bool = True, recovery: float = 300.0) -> Watched:
    """A GPU whose margin is looked at, by a sensor that is known to work or not."""
    gpu = Watched("margin", facts, HealthPolicy(temperature_recovery=recovery, flap_hold=0))
    if known:
        gpu.see(*margins(55))
    return gpu


def margins(*values: int | None) -> list[Observation]:
    return [Sample(margin=value) for value in values]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([-1] * 10, OK),
        ([-2] * 3, OK),
        ([-2] * 4, DEGRADED),
        ([-5] * 50, DEGRADED),
        ([-2, -2, -2, -1, -2, -2, -2], OK),
        ([-2, -2, -2, None, -2, -2, -2], OK),
        ([-2, 10] * 50, OK),
        ([-6], OK),
        ([-6, -6], FATAL),
        ([-20, -6], FATAL),
        ([-6, -5, -6], FATAL),
        ([-6, -2, -2, -6], FATAL),
        ([-6, -1] * 20, OK),
        ([-6, 55] * 50, OK),
        ([-6, None, -6], OK),
        ([-2, -2, -6, -6], FATAL),
        ([-2, -2, -2, -2, -2, -6], DEGRADED),
        ([-2, -2, -2, -2, -6, None, -6], DEGRADED),
        ([-2, -2, -2, -2, -6, -6], FATAL),
        ([-6, -6, -2, -2, -2, -2], FATAL),
    ],
)
def test_a_margin_near_shutdown_is_fatal_in_two_samples_and_at_slowdown_degraded_in_four(seen, expected):
    assert near().see(*margins(*seen)) is expected


@pytest.mark.parametrize("limits", [Thresholds(), Thresholds(shutdown=0, slowdown=0), Thresholds(95, 89)])
def test_a_part_that_says_no_limits_is_degraded_at_its_t_limit_and_never_fatal(limits):
    facts = Facts(margins=limits)
    assert near(facts).see(*margins(*[1] * 10)) is OK
    assert near(facts).see(*margins(*[0] * 3)) is OK
    assert near(facts).see(*margins(*[0] * 4)) is DEGRADED
    assert near(facts).see(*margins(*[-50] * 50)) is DEGRADED


def test_a_sensor_that_never_showed_a_positive_margin_is_ignored():
    gpu = near(known=False)
    assert set(gpu.steps(*margins(*[0, -10, -10, None, -300] * 10))) == {OK}
    assert gpu.see(*margins(1, *[-10] * 2)) is FATAL


def test_what_is_too_near_is_told_with_its_limit():
    gpu = near()
    gpu.see(*margins(-2, -2, -2, -3))
    assert gpu.latch.detail == "-3 °C to its T.Limit at worst, slowdown threshold -2 °C"
    gpu.see(*margins(-6, -7))
    assert gpu.latch.detail == "-7 °C to its T.Limit at worst, shutdown threshold -8 °C"


def test_a_fatal_margin_takes_the_operators_time_to_recover():
    gpu = near()
    gpu.see(*margins(-6, -6))
    assert gpu.see(*margins(*[3] * 5), every=60) is FATAL
    assert gpu.see(*margins(3)) is OK


def test_a_time_to_recover_of_nothing_asks_for_one_good_sample():
    gpu = near(recovery=0)
    gpu.see(*margins(-6, -6))
    assert gpu.see(*margins(2)) is FATAL
    assert gpu.see(*margins(3)) is OK


@pytest.mark.parametrize("recovery", [0.0, 300.0])
def test_a_degraded_margin_takes_two_minutes_to_recover(recovery):
    gpu = near(recovery=recovery)
    gpu.see(*margins(*[-2] * 4))
    assert gpu.see(*margins(*[3] * 2), every=60) is DEGRADED
    assert gpu.see(*margins(3)) is OK


def test_without_limits_five_degrees_are_enough_to_recover():
    gpu = near(Facts())
    gpu.see(*margins(*[0] * 4))
    assert gpu.see(*margins(*[4] * 10), every=60) is DEGRADED
    assert gpu.see(*margins(*[5] * 3), every=60) is OK


@pytest.mark.parametrize("interruption", [*margins(2, -2, -9, None), LOST])
def test_a_margin_in_between_starts_the_time_anew(interruption):
    gpu = near()
    gpu.see(*margins(-6, -6))
    assert gpu.see(*margins(*[3] * 5), interruption, *margins(*[3] * 5), every=60) is FATAL
    assert gpu.see(*margins(3)) is OK


def test_a_sensor_once_trusted_stays_trusted_after_a_recovery():
    gpu = near(recovery=0)
    gpu.see(*margins(-6, -6))
    assert gpu.see(*margins(3)) is OK
    assert gpu.see(*margins(-6, -6)) is FATAL


@pytest.mark.parametrize(("seen", "expected"), [([-2] * 4, DEGRADED), ([-6] * 2, FATAL)])
def test_a_margin_outlives_a_restart_and_its_sensor_is_still_believed(seen, expected):
    gpu = near()
    gpu.see(*margins(*seen))
    gpu.see(*margins(*[3] * 2), every=60)
    assert gpu.restart() is expected
    assert gpu.see(*margins(*seen)) is expected
    assert gpu.see(*margins(*[3] * 2), every=60) is expected
    assert gpu.see(*margins(*[3] * 4), every=60) is OK


@pytest.mark.parametrize(
    ("seen", "expected"), [([-2] * 4, (DEGRADED, DEGRADED)), ([-2] * 4 + [-6], (DEGRADED, FATAL)), ([-6], (OK, FATAL))]
)
def test_a_restart_goes_on_with_the_count_of_samples_near_shutdown(seen, expected):
    gpu = near()
    gpu.see(*margins(*seen))
    assert (gpu.restart(), gpu.see(*margins(-6))) == expected
    assert gpu.see(*margins(-6)) is FATAL


def test_a_failed_look_between_two_near_shutdown_starts_their_count_anew():
    for before in ([], [-2] * 4):
        gpu = near()
        gpu.see(*margins(*before))
        assert gpu.see(*margins(-6), LOST, *margins(-6)) is not FATAL
        assert gpu.see(*margins(-6)) is FATAL


def test_a_margin_that_comes_and_goes_is_written_down_once_a_look():
    gpu = near()
    revision = gpu.ledger.revision
    gpu.see(*margins(*[-6, 10] * 10))
    assert gpu.ledger.revision == revision + 20
    gpu.see(*margins(*range(10, 40)))
    assert gpu.ledger.revision == revision + 20


def test_a_gpu_that_an_operator_vouches_for_is_degraded_until_it_cooled():
    gpu = near(recovery=0)
    gpu.see(*margins(-6, -6))
    assert gpu.vouch() is DEGRADED
    assert gpu.see(*margins(*[-9] * 10)) is DEGRADED
    assert gpu.see(*margins(3)) is OK
    assert gpu.see(*margins(-6, -6)) is FATAL


def test_a_part_that_does_not_say_its_margin_is_silent():
    gpu = near(known=False)
    assert set(gpu.steps(*margins(*[None] * 10), LOST, XidEvent(31))) == {OK}
