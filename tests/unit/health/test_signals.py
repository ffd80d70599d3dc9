"""Signals of the driver's answers, of heat near shutdown, and of operators: enter, stay, exit, flap."""

from collections.abc import Iterable
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.hysteresis import LEVEL
from gpu_plugin.health.latch import NOTHING, AnyLatch, Latch, LatchKey, Marks, Proof, Recovery, Verdict, shifted
from gpu_plugin.health.observation import DriverEvent, EventDelivery, Facts, Fault, Observation, Order, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Context
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.lost import GONE
from gpu_plugin.health.signals.orders import Release
from tests.unit.health.ledgers import ERROR, GUARDED, H200, HUNG, LOST, RESET_REQUIRED, energies
from tests.unit.health.watching import Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
KNOWN = Marks(energy=5_000, counting=0)
VANISHED, DRIVER = Sample(fault=Fault.VANISHED), Sample(fault=Fault.DRIVER)
GOOD = Sample(temperature=40)
CORDON, UNCORDON, RELEASE, RESUME = (Order(verb) for verb in ("cordon", "uncordon", "release", "resume"))


def run(
    signal: str,
    seen: Iterable[Observation],
    latch: AnyLatch | None = None,
    *,
    facts: Facts = H200,
    policy: HealthPolicy = GUARDED,
    marks: Marks = KNOWN,
    every: float = 1.0,
) -> AnyLatch | None:
    """The latch after these observations, one every so many seconds from 1000 on; `marks` are known before each."""
    for at, observation in enumerate(seen):
        ctx = Context(1_000.0 + at * every, LatchKey(signal), facts, policy, marks)
        if isinstance(observation, SIGNALS[signal].sees):
            latch = SIGNALS[signal].step(latch, observation, ctx)
        if isinstance(observation, Sample):
            marks = marks.after(observation, ctx.now)
    return latch


def verdict(latch: AnyLatch | None) -> Verdict:
    return latch.verdict if latch else OK


def degrees(*values: int | None) -> list[Observation]:
    return [Sample(temperature=value) for value in values]


# hung


def test_a_call_that_hangs_is_fatal_at_once():
    assert run("hung", [HUNG]) == Latch(LEVEL, FATAL, HUNG.detail, 1_000.0, recovery=Recovery(KNOWN))


@pytest.mark.parametrize("seen", [GOOD, ERROR, LOST, RESET_REQUIRED, VANISHED, DRIVER])
def test_nothing_else_is_hung(seen):
    assert run("hung", [seen] * 12) is None


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        ([GOOD] * 2, False),
        ([GOOD] * 3, True),
        ([GOOD, GOOD, HUNG, GOOD, GOOD], False),
        ([GOOD, GOOD, ERROR, GOOD, GOOD], False),
        ([GOOD, GOOD, LOST, GOOD, GOOD], False),
        ([ERROR] * 20, False),
        ([LOST] * 20, False),
        ([GOOD, HUNG] * 20, False),
        ([GOOD, XidEvent(31), EventDelivery("x"), GOOD, GOOD], True),
    ],
)
def test_three_answers_in_a_row_end_a_hang_and_errors_are_no_answers(seen, closed):
    assert (run("hung", [HUNG, *seen]) is None) is closed


# unanswered


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([ERROR] * 2, OK),
        ([ERROR] * 3, DEGRADED),
        ([ERROR, GOOD, ERROR, GOOD, ERROR], DEGRADED),
        ([ERROR, GOOD, GOOD, ERROR, GOOD, ERROR], OK),  # the first is the sixth look from the last
        ([ERROR, GOOD, GOOD, ERROR, ERROR], DEGRADED),
        ([*[ERROR, GOOD, GOOD, GOOD, GOOD] * 40, ERROR], OK),
        ([*[ERROR, ERROR, GOOD, GOOD, GOOD] * 40], OK),
        ([ERROR, ERROR, *[GOOD] * 5, ERROR], OK),
        ([ERROR] * 9, DEGRADED),
        ([ERROR] * 10, FATAL),
        ([*[ERROR, GOOD] * 9], DEGRADED),
        ([*[ERROR, GOOD] * 10], FATAL),
        ([LOST, HUNG, RESET_REQUIRED, VANISHED, DRIVER] * 5, OK),
        ([ERROR, LOST, ERROR, LOST, ERROR], DEGRADED),
    ],
)
def test_three_of_five_looks_that_fail_are_worth_a_look_and_ten_are_unfit(seen, expected):
    assert verdict(run("unanswered", seen)) is expected


@pytest.mark.parametrize(("every", "expected"), [(60.0, DEGRADED), (61.0, OK)])
def test_failures_count_together_within_two_minutes(every, expected):
    assert verdict(run("unanswered", [ERROR] * 3, every=every)) is expected


def test_failures_far_apart_never_add_up():
    assert verdict(run("unanswered", [ERROR] * 100, every=61.0)) is OK


@pytest.mark.parametrize("opening", [3, 10])
@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        ([GOOD] * 4, False),
        ([GOOD] * 5, True),
        ([*[GOOD] * 4, ERROR, *[GOOD] * 4], False),
        ([*[GOOD] * 4, HUNG, *[GOOD] * 4], False),
        ([LOST] * 20, False),
        ([*[GOOD] * 4, ERROR] * 20, False),
    ],
)
def test_five_answers_in_a_row_end_it(opening, seen, closed):
    assert (run("unanswered", [*[ERROR] * opening, *seen]) is None) is closed


def test_it_says_what_the_driver_said_when_it_became_as_bad_as_it_is():
    degraded = run("unanswered", [ERROR, ERROR, Sample(fault=Fault.ERROR, detail="third"), ERROR])
    assert degraded is not None
    assert (degraded.detail, degraded.since) == ("third", 1_002.0)
    fatal = run("unanswered", [*[ERROR] * 9, Sample(fault=Fault.ERROR, detail="tenth"), ERROR])
    assert fatal is not None
    assert (fatal.detail, fatal.since) == ("tenth", 1_002.0)


@pytest.mark.parametrize(("failures", "soon"), [(1, True), (2, True), (3, True), (9, True), (10, False), (20, False)])
def test_another_look_soon_is_asked_for_while_it_would_tell(failures, soon):
    latch = run("unanswered", [ERROR] * failures)
    assert latch is not None
    assert latch.gathering is soon
    answered = run("unanswered", [GOOD], latch)
    assert answered is not None
    assert answered.gathering


def test_what_it_remembers_is_bounded():
    latch = run("unanswered", [ERROR, GOOD] * 500)
    assert latch is not None
    assert len(latch.memory.failures) == 10
    assert latch.memory.looks < 32


# temperature: shutdown at 95 °C, slowdown at 89 °C


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([92] * 10, OK),
        ([93], OK),
        ([93, 93], FATAL),
        ([99, 93], FATAL),
        ([93, 92, 93], FATAL),
        ([93, *[89] * 20, 93], FATAL),
        ([93, 88] * 20, OK),
        ([93, None, 93], OK),
        ([93, 93, 92, 90, 84], FATAL),
        ([*[93, 93, 83] * 20], FATAL),
    ],
)
def test_two_samples_in_a_row_near_shutdown_are_too_hot(seen, expected):
    assert verdict(run("temperature", degrees(*seen))) is expected


def test_what_is_too_hot_is_told_with_the_limit():
    latch = run("temperature", degrees(93, 94, 90))
    assert latch is not None
    assert (latch.detail, latch.since) == ("94 °C at its peak, shutdown threshold 95 °C", 1_001.0)


def hot(facts: Facts = H200) -> AnyLatch:
    latch = run("temperature", degrees(120, 120), facts=facts)
    assert latch is not None
    return latch


def test_five_minutes_of_coolness_are_a_recovery():
    assert run("temperature", degrees(*[83] * 5), hot(), every=60) is not None
    assert run("temperature", degrees(*[83] * 6), hot(), every=60) is None


@pytest.mark.parametrize("interruption", [Sample(temperature=84), Sample(temperature=99), Sample(), LOST, HUNG, ERROR])
def test_warmth_or_silence_in_between_starts_the_clock_anew(interruption):
    seen = [*degrees(*[83] * 5), interruption, *degrees(*[83] * 5)]
    assert verdict(run("temperature", seen, hot(), every=60)) is FATAL
    assert run("temperature", [*seen, *degrees(83)], hot(), every=60) is None


def test_an_event_in_between_does_not_touch_the_clock():
    seen: list[Observation] = [*degrees(83), XidEvent(31), DriverEvent(8), XidEvent(31), DriverEvent(8), *degrees(83)]
    assert run("temperature", seen, hot(), every=60) is None


def test_coolness_short_of_the_hysteresis_is_no_recovery():
    assert verdict(run("temperature", degrees(*[84] * 100), hot(), every=60)) is FATAL


@pytest.mark.parametrize(("seconds", "looks"), [(0.0, 1), (60.0, 2), (300.0, 6)])
def test_the_time_to_recover_is_the_operators(seconds, looks):
    policy = HealthPolicy(temperature_recovery=seconds)
    assert verdict(run("temperature", degrees(84), hot(), policy=policy)) is FATAL
    assert looks == 1 or run("temperature", degrees(*[83] * (looks - 1)), hot(), policy=policy, every=60) is not None
    assert run("temperature", degrees(*[83] * looks), hot(), policy=policy, every=60) is None


@pytest.mark.parametrize(("slowdown", "cool"), [(None, 84), (200, 89), (80, 74)])
def test_a_slowdown_limit_that_is_missing_or_odd_still_lets_a_gpu_recover_under_shutdown(slowdown, cool):
    facts = Facts(Thresholds(shutdown=95, slowdown=slowdown))
    assert verdict(run("temperature", degrees(*[cool + 1] * 10), hot(facts), facts=facts, every=60)) is FATAL
    assert run("temperature", degrees(*[cool] * 6), hot(facts), facts=facts, every=60) is None


def test_a_part_that_names_no_shutdown_limit_is_never_too_hot():
    assert run("temperature", degrees(*[500] * 10), facts=Facts(Thresholds(slowdown=89))) is None


def test_limits_that_cannot_be_read_any_more_are_no_recovery():
    unknown = run("temperature", [*degrees(*[20] * 10), ERROR], hot(), facts=Facts(), every=60)
    assert verdict(unknown) is FATAL
    assert verdict(run("temperature", degrees(*[83] * 5), unknown, every=60)) is FATAL
    assert run("temperature", degrees(*[83] * 6), unknown, every=60) is None


# lost


def test_a_lost_gpu_is_fatal_at_once():
    assert run("lost", [LOST]) == Latch(GONE, FATAL, LOST.detail, 1_000.0, Proof.RESET, recovery=Recovery(KNOWN))


@pytest.mark.parametrize("seen", [GOOD, HUNG, ERROR, RESET_REQUIRED, VANISHED, XidEvent(79)])
def test_nothing_else_makes_a_gpu_lost(seen):
    assert run("lost", [seen] * 12) is None


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        (energies(*range(5_000, 5_100)), False),
        ([GOOD] * 100, False),
        (energies(10, 20), False),
        (energies(10, 20, 30), True),
        ([*energies(10, 20), LOST, *energies(30, 40, 50, 60)], False),
        ([*energies(10, 20), LOST, *energies(5, 6, 7)], True),
        ([*energies(10, 20), HUNG, *energies(30, 40)], False),
        ([*energies(10), LOST] * 20, False),
    ],
)
def test_a_lost_gpu_is_found_by_a_reset_and_three_answers(seen, closed):
    assert (run("lost", [LOST, *seen]) is None) is closed


def bound(binding: int, fault: Fault = Fault.NONE) -> Sample:
    return Sample(counting=0, binding=binding, fault=fault)


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        ([bound(1)] * 20, False),
        ([bound(2)] * 2, False),
        ([bound(2)] * 3, True),
        ([bound(2, Fault.LOST), *[bound(2)] * 3], True),  # through a handle of before
        ([bound(2), bound(2), bound(2, Fault.LOST), *[bound(2)] * 20], False),
    ],
)
def test_a_lost_gpu_is_found_when_it_is_enumerated_anew(seen, closed):
    assert (run("lost", [bound(1, Fault.LOST), *seen], marks=Marks(binding=1)) is None) is closed
    assert (run("lost", [bound(1, Fault.LOST), *seen], marks=Marks()) is None) is closed


def test_a_gpu_rebound_before_anyone_saw_that_it_was_lost_is_found_all_the_same():
    assert run("lost", [bound(2, Fault.LOST), *[bound(2)] * 3], marks=Marks(binding=1)) is None


def test_a_lost_gpu_of_which_nothing_was_known_proves_itself_by_three_answers():
    assert verdict(run("lost", [LOST, GOOD, GOOD], marks=Marks())) is FATAL
    assert run("lost", [LOST, GOOD, GOOD, GOOD], marks=Marks()) is None
    assert verdict(run("lost", [LOST, GOOD, GOOD, ERROR, GOOD, GOOD], marks=Marks())) is FATAL
    assert verdict(run("lost", [LOST, *energies(7, 8), LOST, *energies(*range(9, 50))], marks=Marks())) is FATAL


def through(opening: int | None, *energies: int, binding: int = 1) -> list[Sample]:
    """Good looks through this opening of the driver; 0: in persistence mode, by which none is told from another."""
    return [Sample(counting=opening, energy=energy, binding=binding) for energy in energies]


@pytest.mark.parametrize(
    ("before", "seen", "closed"),
    [
        (7, through(8, 10, 20), False),
        (7, through(8, 10, 20, 30), True),
        (7, through(8, 9_000, 9_001, 9_002), True),
        (7, through(7, *range(5_000, 5_020)), False),
        (7, [*through(8, 10, 20), LOST, *through(8, 30, 40)], False),
        (7, [*through(8, 10, 20), replace(LOST, counting=8), *through(8, *range(30, 50))], False),
        (7, [*through(8, 10, 20), ERROR, *through(8, 30, 40)], False),
        (7, [*through(8, 10, 20), ERROR, *through(8, 30, 40, 50)], True),
        (7, through(0, *range(5_000, 5_020)), False),
        (0, through(7, *range(5_000, 5_020)), False),
        (0, through(0, *range(5_000, 5_020)), False),
        (0, [*through(0, 5_000, 5_001), RESUME, *through(0, 5_002, 5_003, 5_004)], False),
        (0, [RELEASE, RESUME, *through(0, 5_000, 5_001)], False),
        (0, [RELEASE, RESUME, *through(0, 5_000, 5_001, 5_002)], True),
        (7, [RELEASE, RESUME, *through(7, 5_000, 5_001, 5_002)], True),
        (0, [RELEASE, *through(0, *range(5_000, 5_020))], False),
        (0, [RELEASE, RESUME, LOST, *through(0, *range(5_000, 5_020))], False),
    ],
)
def test_a_lost_gpu_is_found_by_answers_after_the_driver_was_opened_anew_or_it_was_released(before, seen, closed):
    gpu = Watched("lost", H200)
    gpu.see(*through(before, 4_000), LOST)
    assert gpu.restart() is FATAL
    assert (gpu.see(*seen) is OK) is closed


def test_an_operator_may_vouch_for_a_lost_gpu_once_it_answers():
    gpu = Watched("lost", H200)
    gpu.see(*through(0, 4_000), LOST)
    assert gpu.vouch() is FATAL
    gpu.see(*through(0, 4_001))
    assert gpu.restart() is FATAL
    assert gpu.vouch() is FATAL, "this process has not seen it answer"
    gpu.see(*through(0, 4_002))
    assert gpu.see(ERROR) is FATAL
    assert gpu.vouch() is FATAL
    gpu.see(*through(0, 4_003))
    assert gpu.vouch() is OK
    assert gpu.see(*through(0, 4_004), LOST) is FATAL


def test_a_gpu_that_stays_lost_changes_nothing():
    latch = run("lost", [LOST])
    assert run("lost", [LOST] * 10, latch) is latch


# reset-required


def test_a_required_reset_is_fatal_at_once():
    assert run("reset-required", [RESET_REQUIRED]) == Latch(
        LEVEL, FATAL, RESET_REQUIRED.detail, 1_000.0, recovery=Recovery(KNOWN)
    )


@pytest.mark.parametrize("seen", [GOOD, HUNG, ERROR, LOST, VANISHED])
def test_nothing_else_requires_a_reset(seen):
    assert run("reset-required", [seen] * 12) is None


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        ([GOOD] * 2, False),
        ([GOOD] * 3, True),
        ([GOOD, GOOD, RESET_REQUIRED, GOOD, GOOD], False),
        ([GOOD, GOOD, ERROR, GOOD, GOOD], False),
        ([ERROR, HUNG, LOST] * 10, False),
        ([GOOD, RESET_REQUIRED] * 20, False),
    ],
)
def test_three_looks_at_which_no_reset_is_required_end_it(seen, closed):
    assert (run("reset-required", [RESET_REQUIRED, *seen]) is None) is closed


# cordon, maintenance


def test_a_cordon_is_lifted_by_an_operator_alone():
    cordoned = run("cordon", [CORDON])
    assert cordoned == Latch(NOTHING, FATAL, "cordoned", 1_000.0, Proof.OPERATOR)
    assert run("cordon", [CORDON, RELEASE, RESUME, *[GOOD] * 100, XidEvent(48)], cordoned) is cordoned
    assert run("cordon", [UNCORDON], cordoned) is None
    assert run("cordon", [UNCORDON, RELEASE, RESUME]) is None


def test_maintenance_lasts_until_a_good_look_after_resume():
    released = run("maintenance", [RELEASE])
    assert released == Latch(Release(), FATAL, "maintenance", 1_000.0, Proof.OPERATOR)
    assert run("maintenance", [RELEASE, *[GOOD] * 100, CORDON, UNCORDON], released) is released
    resumed = run("maintenance", [RESUME, LOST, HUNG, ERROR], released)
    assert verdict(resumed) is FATAL
    assert run("maintenance", [GOOD], resumed) is None


def test_a_release_after_a_resume_holds_again_and_since_when_it_began():
    latch = run("maintenance", [RELEASE, RESUME, RELEASE, *[GOOD] * 20])
    assert latch == Latch(Release(), FATAL, "maintenance", 1_000.0, Proof.OPERATOR)


def test_what_was_never_released_is_not_resumed():
    assert run("maintenance", [RESUME, GOOD, CORDON]) is None


# The registry


def test_readings_come_before_what_heeds_them():
    of_the_gpu = [signal for signal in SIGNALS.values() if signal.kind in (SignalKind.READING, SignalKind.EVENT)]
    assert of_the_gpu == sorted(of_the_gpu, key=lambda signal: signal.recovers)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_asks_for_fields_of_a_sample_and_sees_kinds_of_observations(name):
    signal = SIGNALS[name]
    assert set(signal.asks) <= set(Sample.__struct_fields__)
    assert set(signal.sees) <= set(get_args(Observation))
    assert signal.action
    assert signal.clears or signal.recovers or signal.memory is LEVEL, "what closes it is said, or shows in its proof"


@pytest.mark.parametrize("name", SIGNALS)
def test_what_a_signal_remembers_is_written_by_the_names_of_its_fields_and_read_strictly(name):
    blank = SIGNALS[name].memory
    for written in (blank, blank.stored(), blank.stored_open(), shifted(blank, 5.0)):
        assert type(written) is type(blank)
        assert msgspec.json.decode(msgspec.json.encode(written), type=type(blank)) == written
    assert blank.stored() == blank, "there is nothing that it must not know"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"a field of another": 1}, type(blank))


@pytest.mark.parametrize("name", [name for name, signal in SIGNALS.items() if Sample in signal.sees])
def test_a_good_look_at_a_sound_gpu_opens_nothing_and_costs_no_second_look(name):
    latch = run(name, [Sample()] * 12)
    assert verdict(latch) is OK
    assert latch is None or not latch.gathering
