from collections.abc import Iterable

import pytest

from gpu_plugin.health.latch import Latch, Limits, Verdict
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.xids import XidPolicy

H200 = Limits(shutdown=95, slowdown=89, temperature_recovery=300.0)
SECOND = 1.0


def run(
    signal: str,
    seen: Iterable[Observation],
    latch: Latch | None = None,
    *,
    limits: Limits = H200,
    energy: int | None = 5_000,
    every: float = SECOND,
) -> Latch | None:
    """The latch after these observations, one every so many seconds; `energy` is what was seen before each."""
    for at, observation in enumerate(seen):
        latch = SIGNALS[signal](latch, observation, 1_000.0 + at * every, limits, XidPolicy(), energy)
        if isinstance(observation, Sample) and observation.energy is not None:
            energy = observation.energy
    return latch


def verdict(latch: Latch | None) -> Verdict:
    return latch.verdict if latch else Verdict.OK


def degrees(*values: int | None) -> list[Observation]:
    return [Sample(temperature=value) for value in values]


def energies(*values: int | None) -> list[Observation]:
    return [Sample(energy=value) for value in values]


LOST = Sample(fault="lost", detail="the GPU is lost")
RESET_REQUIRED = Sample(fault="reset-required", detail="the GPU must be reset")
HUNG = Sample(fault="hung", detail="no answer for 30 s")
ERROR = Sample(fault="error", detail="Unknown Error")
EVENT = XidEvent(48)

OPENING: dict[str, Observation] = {"xid": EVENT, "lost": LOST}
both = pytest.mark.parametrize("signal", ["xid", "lost"])


# xid


def test_a_fatal_xid_opens_at_once_and_an_applications_does_not():
    opened = run("xid", [XidEvent(79)])
    assert opened == Latch(Verdict.FATAL, "Xid 79 (GPU has fallen off the bus)", 1_000.0, energy=5_000)
    assert run("xid", [XidEvent(31)]) is None
    assert run("xid", [XidEvent(31)], opened) is opened


def test_further_xids_are_named_once_each_and_keep_the_time_of_the_first():
    latch = run("xid", [XidEvent(48), XidEvent(95), XidEvent(48), XidEvent(9), XidEvent(95)])
    assert latch
    assert latch.detail == "Xid 48 (double-bit ECC error), Xid 95 (uncontained ECC error), Xid 9"
    assert latch.since == 1_000.0


def test_an_xid_whose_number_begins_with_that_of_another_is_named_too():
    latch = run("xid", [XidEvent(480), XidEvent(4800), XidEvent(4)])
    assert latch
    assert latch.detail == "Xid 480, Xid 4800, Xid 4"


def test_an_xid_after_a_reset_needs_another_reset():
    latch = run("xid", [EVENT, *energies(10, 20), EVENT, *energies(30, 40, 50, 60, 70)])
    assert verdict(latch) is Verdict.FATAL
    assert run("xid", energies(5, 6, 7), latch) is None


def test_an_xid_right_after_a_restart_forgets_nothing_of_the_energy_before():
    replayed = Latch(Verdict.FATAL, "Xid 48", 900.0, energy=5_000)
    assert run("xid", [EVENT, *energies(10, 20, 30)], replayed, energy=None) is None


def test_an_xid_leaves_samples_without_a_fault_alone():
    assert run("xid", [Sample(), LOST, HUNG, ERROR]) is None


# lost


@pytest.mark.parametrize("seen", [LOST, RESET_REQUIRED])
def test_the_drivers_word_that_a_gpu_is_lost_opens_at_once(seen):
    assert run("lost", [seen]) == Latch(Verdict.FATAL, seen.detail, 1_000.0, energy=5_000)


@pytest.mark.parametrize("seen", [Sample(), HUNG, ERROR, XidEvent(79)])
def test_nothing_else_makes_a_gpu_lost(seen):
    assert run("lost", [seen] * 10) is None


def test_the_newest_words_on_a_lost_gpu_are_kept_with_the_first_time():
    latch = run("lost", [LOST, RESET_REQUIRED])
    assert latch
    assert (latch.detail, latch.since) == ("the GPU must be reset", 1_000.0)


def test_a_gpu_lost_again_after_a_reset_needs_another_reset():
    latch = run("lost", [LOST, *energies(10, 20), LOST, *energies(30, 40, 50, 60)])
    assert verdict(latch) is Verdict.FATAL
    assert run("lost", energies(5, 6, 7), latch) is None


def test_a_lost_gpu_whose_energy_was_never_known_proves_itself_by_three_answers():
    assert verdict(run("lost", [LOST, Sample(), Sample()], energy=None)) is Verdict.FATAL
    assert run("lost", [LOST, Sample(), Sample(), Sample()], energy=None) is None
    assert verdict(run("lost", [LOST, Sample(), Sample(), ERROR, Sample(), Sample()], energy=None)) is Verdict.FATAL


# The way out of both


@both
def test_good_answers_alone_are_no_recovery(signal):
    assert verdict(run(signal, [OPENING[signal], *energies(*range(5_000, 5_100))])) is Verdict.FATAL
    assert verdict(run(signal, [OPENING[signal], *energies(*[None] * 100)])) is Verdict.FATAL


@both
def test_energy_that_went_back_and_three_good_samples_are_a_recovery(signal):
    seen = [OPENING[signal], *energies(10, 20, 30)]
    assert verdict(run(signal, seen[:3])) is Verdict.FATAL
    assert run(signal, seen) is None


@both
def test_good_samples_from_before_the_reset_count_and_the_reset_itself_still_is_needed(signal):
    assert verdict(run(signal, [OPENING[signal], *energies(5_001, 5_002, 5_003)])) is Verdict.FATAL
    assert run(signal, [OPENING[signal], *energies(5_001, 5_002, 10)]) is None


@both
def test_energy_at_rest_is_no_reset(signal):
    assert verdict(run(signal, [OPENING[signal], *energies(*[5_000] * 10)])) is Verdict.FATAL


@both
@pytest.mark.parametrize("fault", [HUNG, ERROR])
def test_a_fault_in_between_starts_the_count_anew(signal, fault):
    seen = [OPENING[signal], *energies(10, 20), fault, *energies(30, 40)]
    assert verdict(run(signal, seen)) is Verdict.FATAL
    assert run(signal, [*seen, *energies(50)]) is None


@both
def test_a_reset_shows_whatever_was_used_since_the_fault(signal):
    young = [OPENING[signal], *energies(1_000_000, 2_000_000)]  # the fault came right after the driver was loaded
    assert verdict(run(signal, young, energy=10)) is Verdict.FATAL
    assert run(signal, [*young, *energies(600_000, 600_001)], energy=10) is None


@pytest.mark.parametrize("fault", [LOST, RESET_REQUIRED])
def test_a_gpu_lost_in_between_starts_the_count_after_an_xid_anew(fault):
    seen = [EVENT, *energies(10, 20), fault, *energies(30, 40)]
    assert verdict(run("xid", seen)) is Verdict.FATAL
    assert run("xid", [*seen, *energies(50)]) is None


def test_energy_first_seen_after_an_xid_proves_a_later_reset():
    latch = run("xid", [EVENT, *energies(1_000, 2_000, 3_000, 4_000)], energy=None)
    assert verdict(latch) is Verdict.FATAL
    assert run("xid", energies(10), latch) is None


@both
def test_an_xid_of_an_application_is_no_sample(signal):
    seen = [OPENING[signal], *energies(10, 20), XidEvent(31), XidEvent(31)]
    assert verdict(run(signal, seen)) is Verdict.FATAL


# unanswered


def test_a_hung_call_opens_at_once():
    assert run("unanswered", [HUNG]) == Latch(Verdict.FATAL, HUNG.detail, 1_000.0)


def test_other_errors_open_on_the_third_in_a_row():
    assert verdict(run("unanswered", [ERROR, ERROR])) is Verdict.OK
    assert run("unanswered", [ERROR] * 3) == Latch(Verdict.FATAL, ERROR.detail, 1_002.0)


def test_a_good_answer_starts_the_count_of_errors_anew():
    assert run("unanswered", [ERROR, ERROR, Sample()]) is None
    assert verdict(run("unanswered", [ERROR, ERROR, Sample(), ERROR, ERROR])) is Verdict.OK


def test_a_hung_call_after_an_error_opens_at_once():
    assert verdict(run("unanswered", [ERROR, HUNG])) is Verdict.FATAL


@pytest.mark.parametrize("seen", [LOST, RESET_REQUIRED, XidEvent(79)])
def test_what_other_signals_tell_is_not_unanswered(seen):
    assert run("unanswered", [seen] * 5) is None
    opened = run("unanswered", [HUNG])
    assert run("unanswered", [seen] * 5, opened) is opened


@pytest.mark.parametrize("first", [[HUNG], [ERROR] * 3])
def test_three_good_answers_in_a_row_close_it(first):
    assert verdict(run("unanswered", [*first, Sample(), Sample()])) is Verdict.FATAL
    assert verdict(run("unanswered", [*first, Sample(), Sample(), ERROR, Sample(), Sample()])) is Verdict.FATAL
    assert run("unanswered", [*first, Sample(), Sample(), Sample()]) is None


def test_the_newest_words_are_kept_with_the_first_time():
    latch = run("unanswered", [HUNG, ERROR])
    assert latch
    assert (latch.detail, latch.since) == (ERROR.detail, 1_000.0)


# temperature: H200, shutdown 95 °C, slowdown 89 °C


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([92] * 10, Verdict.OK),
        ([93], Verdict.OK),
        ([93, 93], Verdict.FATAL),
        ([99, 93], Verdict.FATAL),
        ([93, 92, 93, 92], Verdict.OK),
        ([93, None, 93], Verdict.OK),
        ([93, 93, 92, 90, 84], Verdict.FATAL),
    ],
)
def test_two_samples_in_a_row_near_shutdown_are_too_hot(seen, expected):
    assert verdict(run("temperature", degrees(*seen))) is expected


def test_what_is_too_hot_is_told_with_the_limit():
    latch = run("temperature", degrees(93, 94))
    assert latch
    assert (latch.detail, latch.since) == ("94 °C, the GPU shuts down at 95 °C", 1_001.0)


def hot(limits: Limits = H200) -> Latch:
    latch = run("temperature", degrees(120, 120), limits=limits)
    assert latch is not None
    return latch


def test_five_minutes_of_coolness_are_a_recovery():
    assert run("temperature", degrees(*[83] * 5), hot(), every=60) is not None
    assert run("temperature", degrees(*[83] * 6), hot(), every=60) is None


@pytest.mark.parametrize("interruption", [84, 89, 99, None])
def test_warmth_or_silence_in_between_starts_the_clock_anew(interruption):
    seen = degrees(*[83] * 5, interruption, *[83] * 5)
    assert verdict(run("temperature", seen, hot(), every=60)) is Verdict.FATAL
    assert run("temperature", [*seen, *degrees(83)], hot(), every=60) is None


@pytest.mark.parametrize("fault", [LOST, HUNG, ERROR])
def test_an_unanswered_question_in_between_starts_the_clock_anew(fault):
    seen = [*degrees(*[83] * 5), fault, *degrees(*[83] * 5)]
    assert verdict(run("temperature", seen, hot(), every=60)) is Verdict.FATAL


def test_an_xid_in_between_does_not_touch_the_clock():
    seen: list[Observation] = [*degrees(83), *[EVENT] * 4, *degrees(83)]
    assert run("temperature", seen, hot(), every=60) is None


def test_coolness_short_of_the_hysteresis_is_no_recovery():
    assert verdict(run("temperature", degrees(*[84] * 100), hot(), every=60)) is Verdict.FATAL


def test_the_time_to_recover_is_the_operators():
    limits = Limits(shutdown=95, slowdown=89, temperature_recovery=0)
    assert run("temperature", degrees(83), hot(), limits=limits) is None


@pytest.mark.parametrize(("slowdown", "cool"), [(None, 84), (200, 89), (80, 74)])
def test_a_slowdown_limit_that_is_missing_or_odd_still_lets_a_gpu_recover_under_shutdown(slowdown, cool):
    limits = Limits(shutdown=95, slowdown=slowdown)
    assert verdict(run("temperature", degrees(*[cool + 1] * 10), hot(limits), limits=limits, every=60)) is Verdict.FATAL
    assert run("temperature", degrees(*[cool] * 6), hot(limits), limits=limits, every=60) is None


def test_a_part_that_names_no_shutdown_limit_is_never_too_hot():
    assert run("temperature", degrees(*[500] * 10), limits=Limits(slowdown=89)) is None


def test_limits_that_cannot_be_read_any_more_are_no_recovery():
    unknown = run("temperature", [*degrees(*[20] * 10), ERROR], hot(), limits=Limits(), every=60)
    assert verdict(unknown) is Verdict.FATAL
    assert verdict(run("temperature", degrees(*[83] * 5), unknown, every=60)) is Verdict.FATAL
    assert run("temperature", degrees(*[83] * 6), unknown, every=60) is None


def test_heat_that_the_operator_does_not_want_watched_is_no_fault():
    unwatched = Limits(shutdown=95, slowdown=89, watch_temperature=False)
    assert run("temperature", degrees(*[500] * 10), limits=unwatched) is None
    assert run("temperature", degrees(500), hot(), limits=unwatched) is None
