import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample, XidEvent
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
ERROR = Sample(fault=Fault.ERROR, detail="Unknown Error")
HUNG = Sample(fault=Fault.HUNG, detail="no answer for 30 s")
SAYS, CONTAINS = Facts(says_action=True), Facts(contains_errors=True)
BOTH, NEITHER = Facts(says_action=True, contains_errors=True), Facts()


# ecc-uncorrected


def counting(facts: Facts = NEITHER, first: int | None = 0) -> Watched:
    """A GPU whose uncorrected errors are looked at, after a first look."""
    gpu = Watched("ecc-uncorrected", facts)
    gpu.see(*counts(first))
    return gpu


def counts(*values: int | None, action: int | None = None, energy: int | None = None) -> list[Observation]:
    return [Sample(counting=0, ecc_uncorrected=value, recovery_action=action, energy=energy) for value in values]


@pytest.mark.parametrize(
    ("facts", "action", "expected"),
    [
        (NEITHER, None, FATAL),
        (CONTAINS, None, DEGRADED),
        (SAYS, 0, DEGRADED),
        (SAYS, 1, FATAL),
        (SAYS, None, DEGRADED),
        (BOTH, 0, DEGRADED),
        (BOTH, 1, FATAL),
    ],
)
def test_what_an_uncorrected_error_means(facts, action, expected):
    gpu = counting(facts)
    assert gpu.see(*counts(0, 0, 0, action=action)) is OK
    assert gpu.see(*counts(1, action=action)) is expected


def test_how_many_errors_there_were_is_told():
    gpu = counting()
    gpu.see(*counts(1))
    assert gpu.latch.detail == "1 uncorrected memory error since the GPU was reset or the driver loaded"
    since = gpu.latch.since
    gpu.see(*counts(4))
    assert gpu.latch.detail == "4 uncorrected memory errors since the GPU was reset or the driver loaded"
    assert gpu.latch.since == since


@pytest.mark.parametrize("facts", [NEITHER, CONTAINS, SAYS, BOTH])
def test_errors_of_before_the_first_look_are_degraded(facts):
    assert counting(facts, first=7).verdict is DEGRADED


def test_errors_of_before_the_first_look_are_fatal_where_the_driver_asks_for_a_recovery():
    gpu = Watched("ecc-uncorrected", SAYS)
    assert gpu.see(*counts(7, action=1)) is FATAL


def test_a_count_that_stays_is_no_further_error():
    gpu = counting(first=7)
    assert set(gpu.steps(*counts(*[7] * 20))) == {DEGRADED}
    assert gpu.see(*counts(8)) is FATAL


@pytest.mark.parametrize("first", [None, 0])
def test_a_part_that_does_not_count_is_silent(first):
    gpu = counting(first=first)
    assert set(gpu.steps(*counts(*[None] * 10), HUNG, XidEvent(31))) == {OK}


def test_an_error_that_happened_while_nothing_could_be_read_is_seen_afterwards():
    assert counting().see(*counts(None, None), HUNG, *counts(1)) is FATAL


def test_a_driver_that_asks_for_a_recovery_later_makes_it_fatal_and_stays_so():
    gpu = counting(BOTH)
    assert gpu.see(*counts(1, 1, action=0)) is DEGRADED
    assert gpu.see(*counts(1, action=1)) is FATAL
    assert gpu.see(*counts(*[1] * 20, action=0)) is FATAL


@pytest.mark.parametrize("facts", [NEITHER, BOTH])
def test_what_the_driver_asks_for_after_the_count_was_set_back_is_for_something_else(facts):
    gpu = counting(facts)
    gpu.see(*counts(3))
    before = gpu.verdict
    assert gpu.see(*counts(0, 0), *counts(0, action=1)) is before
    assert gpu.see(*counts(*[0] * 10, action=0)) is OK


@pytest.mark.parametrize("facts", [NEITHER, BOTH])
def test_a_count_set_back_and_three_clean_samples_are_a_recovery(facts):
    gpu = counting(facts)
    gpu.see(*counts(3))
    before = gpu.verdict
    assert gpu.see(*counts(0, 0)) is before
    assert gpu.see(*counts(0)) is OK


def test_good_looks_alone_are_no_recovery():
    gpu = counting()
    assert gpu.see(*counts(3), *counts(*[3, None] * 50)) is FATAL
    assert gpu.see(*[Sample()] * 50) is FATAL


def test_a_failed_look_in_between_starts_the_count_of_looks_anew():
    gpu = counting()
    gpu.see(*counts(3))
    assert gpu.see(*counts(0, 0), ERROR, *counts(0, 0)) is FATAL
    assert gpu.see(*counts(0)) is OK


@pytest.mark.parametrize("interruption", [HUNG, *counts(0, action=1)])
def test_three_looks_count_only_once_nothing_else_is_wrong(interruption):
    gpu = counting(SAYS)
    gpu.see(*counts(3))
    assert gpu.see(*counts(0, 0, action=0), interruption, *counts(0, 0, action=0)) is DEGRADED
    assert gpu.see(*counts(*[0] * 10, action=0)) is OK
    assert gpu.ledger.standing(GPU) == []


def test_errors_right_after_a_reset_need_another_reset():
    gpu = counting()
    gpu.see(*counts(3))
    assert gpu.see(*counts(0, 0, 1), *counts(*[1] * 20)) is FATAL
    assert gpu.see(*counts(0, 0, 0)) is OK


def test_a_count_that_went_back_to_new_errors_is_no_recovery():
    gpu = counting()
    gpu.see(*counts(3))
    assert gpu.see(*counts(*[2] * 20)) is FATAL
    assert gpu.latch.detail.startswith("2 uncorrected")
    assert gpu.see(*counts(0, 0, 0)) is OK


def test_a_reset_that_other_marks_show_does_not_excuse_a_count_above_nothing():
    gpu = counting()
    gpu.see(*counts(3, energy=5_000))
    assert gpu.see(*counts(*[3] * 20, energy=10)) is FATAL
    assert not gpu.ledger.suspicious(GPU)
    assert gpu.see(*counts(0, energy=10)) is OK


def test_a_reset_that_took_the_count_away_is_a_recovery_by_other_marks():
    gpu = counting()
    gpu.see(*counts(3, energy=5_000))
    assert gpu.see(*counts(None, None, energy=10)) is FATAL
    assert gpu.see(*counts(None, energy=10)) is OK


def test_errors_that_come_and_are_reset_in_turns():
    gpu = counting()
    assert list(gpu.steps(*counts(*[1, 0, 0, 0] * 5))) == [FATAL, FATAL, FATAL, OK] * 5
    assert FATAL in set(gpu.steps(*counts(*[1, 0] * 50)))
    assert gpu.verdict is FATAL


def test_what_an_operator_vouches_for_ends_with_the_next_error():
    gpu = counting()
    gpu.see(*counts(1))
    assert gpu.vouch() is DEGRADED
    assert gpu.see(*counts(*[1] * 20)) is DEGRADED
    assert gpu.see(*counts(2)) is FATAL


def test_the_next_error_after_an_operators_word_is_judged_by_itself():
    gpu = counting(BOTH)
    gpu.see(*counts(1, action=1))
    assert gpu.vouch() is DEGRADED
    assert gpu.see(*counts(*[1] * 20, action=1)) is DEGRADED
    assert gpu.see(*counts(2, action=0)) is DEGRADED
    assert gpu.see(*counts(2, action=1)) is FATAL


@pytest.mark.parametrize("vouched", [False, True])
def test_errors_outlive_a_restart_which_is_no_further_error(vouched):
    gpu = counting()
    gpu.see(*counts(3))
    expected = gpu.vouch() if vouched else gpu.verdict
    gpu.see(*counts(0, 0))
    assert gpu.restart() is expected
    gpu = counting()
    gpu.see(*counts(3))
    expected = gpu.vouch() if vouched else gpu.verdict
    assert gpu.restart() is expected
    assert gpu.see(*counts(*[3] * 10)) is expected
    assert gpu.see(*counts(4)) is FATAL
    assert gpu.see(*counts(0, 0)) is FATAL
    assert gpu.see(*counts(0)) is OK


def test_a_reset_while_nobody_watched_is_seen_after_a_restart():
    gpu = counting()
    gpu.see(*counts(3))
    gpu.restart()
    assert gpu.see(*counts(0, 0)) is FATAL
    assert gpu.see(*counts(0)) is OK


# sram-threshold, remap-failure, unrepairable-memory

CONDEMNING = {
    "sram-threshold": "sram_threshold",
    "remap-failure": "remap_failure",
    "unrepairable-memory": "unrepairable_memory",
}
condemning = pytest.mark.parametrize("signal", CONDEMNING)


def flags(signal: str, *values: bool | None, binding: int | None = 1) -> list[Sample]:
    return [Sample(counting=0, binding=binding, **{CONDEMNING[signal]: value}) for value in values]  # type: ignore[arg-type]


def condemned(signal: str) -> Watched:
    """A GPU that its driver says is to be replaced."""
    gpu = Watched(signal, NEITHER)
    assert gpu.see(*flags(signal, False, None, False)) is OK
    assert gpu.see(*flags(signal, True)) is FATAL
    assert gpu.latch.detail
    return gpu


@condemning
def test_a_part_that_does_not_say_is_not_condemned(signal):
    gpu = Watched(signal, NEITHER)
    assert set(gpu.steps(*flags(signal, *[None] * 10), HUNG, XidEvent(31))) == {OK}


@condemning
def test_a_condemned_part_stays_so_whatever_is_read(signal):
    gpu = condemned(signal)
    seen = [*flags(signal, *[False] * 50), *flags(signal, *[None, True, False] * 10), HUNG]
    assert set(gpu.steps(*seen, every=86_400.0)) == {FATAL}
    assert gpu.see(*(Sample(counting=0, energy=at, ecc_uncorrected=0, binding=1) for at in (9, 1, 2, 3, 4))) is FATAL


@condemning
def test_a_condemned_part_found_anew_and_good_three_times_is_believed(signal):
    gpu = condemned(signal)
    assert gpu.see(*flags(signal, False, False, binding=2)) is FATAL
    assert gpu.see(*flags(signal, None, False, False, binding=2)) is FATAL
    assert gpu.see(*flags(signal, False, binding=2)) is OK


@condemning
def test_a_condemned_part_found_anew_and_still_bad_must_be_found_anew_again(signal):
    gpu = condemned(signal)
    assert gpu.see(*flags(signal, True, *[False] * 10, binding=2)) is FATAL
    assert gpu.see(*flags(signal, False, False, True, *[False] * 10, binding=3)) is FATAL
    assert gpu.see(*flags(signal, *[False] * 3, binding=4)) is OK


@condemning
def test_a_part_condemned_at_the_first_look_after_it_was_found_anew_must_be_found_anew_again(signal):
    gpu = Watched(signal, NEITHER)
    gpu.see(*flags(signal, False), *flags(signal, True, binding=2))
    assert gpu.see(*flags(signal, *[False] * 10, binding=2)) is FATAL
    assert gpu.see(*flags(signal, *[False] * 3, binding=3)) is OK


@condemning
def test_a_binding_first_told_after_the_part_was_condemned_is_no_new_one(signal):
    gpu = Watched(signal, NEITHER)
    gpu.see(*flags(signal, True, False, binding=None))
    assert gpu.see(*flags(signal, *[False] * 10, binding=2)) is FATAL
    assert gpu.see(*flags(signal, *[False] * 3, binding=3)) is OK


@condemning
def test_a_condemned_part_is_believed_after_a_boot_and_good_looks(signal):
    gpu = condemned(signal)
    gpu.ledger.booted("another")
    assert gpu.see(*flags(signal, None, False, False, binding=None)) is FATAL
    assert gpu.see(*flags(signal, False, binding=None)) is OK


@condemning
def test_an_operator_may_vouch_for_a_condemned_part_which_is_degraded_then(signal):
    gpu = condemned(signal)
    assert gpu.vouch() is DEGRADED
    assert set(gpu.steps(*flags(signal, True, False, None, True))) == {DEGRADED}
    assert gpu.restart() is DEGRADED
    assert gpu.see(*flags(signal, False, False)) is DEGRADED
    assert gpu.see(*flags(signal, False)) is OK
    assert gpu.see(*flags(signal, True)) is FATAL


@condemning
def test_a_condemned_part_outlives_a_restart(signal):
    gpu = condemned(signal)
    gpu.see(*flags(signal, True))
    assert gpu.restart() is FATAL
    assert gpu.see(*flags(signal, *[False] * 10)) is FATAL
    assert gpu.restart() is FATAL
    assert gpu.see(*flags(signal, *[False] * 3, binding=2)) is OK


@condemning
@pytest.mark.parametrize("flag", [True, False])
def test_a_reset_proves_nothing_for_other_signals_while_the_part_is_condemned(signal, flag):
    gpu = Watched("lost", NEITHER)
    bad, good = (*flags(signal, True), *flags(signal, flag))
    assert (
        gpu.see(replace(bad, energy=500), Sample(fault=Fault.LOST), *(replace(good, energy=at) for at in range(9)))
        is FATAL
    )
    gpu.see(ERROR)
    assert gpu.vouch() is FATAL, "what does not answer is still lost"
    assert gpu.see(*(replace(good, energy=at) for at in (9, 10, 11))) is OK


# remap-pending


def pending(*values: bool | None, energy: int | None = None) -> list[Observation]:
    return [Sample(counting=0, remap_pending=value, energy=energy) for value in values]


def remapping() -> Watched:
    """A GPU with a remapping that waits for a reset."""
    gpu = Watched("remap-pending", NEITHER)
    assert gpu.see(*pending(False, None, energy=5_000)) is OK
    assert gpu.see(*pending(True, energy=5_000)) is DEGRADED
    assert gpu.latch.detail == "the remapping of a memory row waits for a reset of the GPU; new work is not affected"
    return gpu


def test_a_remapping_is_pending_until_it_is_read_not_to_be():
    gpu = remapping()
    assert set(gpu.steps(*pending(True, None, True, None), HUNG, XidEvent(31), *pending(True))) == {DEGRADED}
    assert gpu.see(*pending(False)) is OK


def test_a_remapping_that_comes_and_goes_is_what_is_read():
    assert list(remapping().steps(*pending(*[False, True] * 10))) == [OK, DEGRADED] * 10


def test_a_remapping_that_cannot_be_read_stays_pending_until_a_reset():
    gpu = remapping()
    assert gpu.see(*pending(*[None] * 50, energy=6_000)) is DEGRADED
    assert gpu.see(*pending(None, None, energy=10)) is DEGRADED
    assert gpu.see(*pending(None, energy=10)) is OK


def test_a_remapping_that_a_reset_did_not_mend_needs_another():
    gpu = remapping()
    assert gpu.see(*pending(True, energy=10), *pending(*[None] * 10, energy=10)) is DEGRADED
    assert gpu.see(*pending(*[None] * 3, energy=4)) is OK


def test_a_part_that_remaps_nothing_is_silent():
    gpu = Watched("remap-pending", NEITHER)
    assert set(gpu.steps(*pending(*[None] * 10), HUNG)) == {OK}


def test_a_pending_remapping_outlives_a_restart():
    gpu = remapping()
    assert gpu.restart() is DEGRADED
    assert gpu.see(*pending(*[None] * 10, energy=5_000)) is DEGRADED
    assert gpu.see(*pending(False)) is OK


# retired-pages


def pages(*values: int | None, pending: bool | None = False, binding: int | None = 1) -> list[Observation]:
    return [Sample(retired_pages=value, retired_pending=pending, binding=binding) for value in values]


def retiring(*seen: Observation) -> Watched:
    """A GPU whose retired pages are looked at, after these samples."""
    gpu = Watched("retired-pages", NEITHER)
    gpu.see(*seen)
    return gpu


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (pages(0, 1, 59), OK),
        (pages(60), FATAL),
        (pages(64, pending=True), FATAL),
        (pages(3, pending=True), DEGRADED),
        (pages(None, pending=True), DEGRADED),
        (pages(60, pending=None), FATAL),
        (pages(*[None] * 10, pending=None), OK),
        ([HUNG, XidEvent(31)], OK),
    ],
)
def test_what_retired_pages_mean(seen, expected):
    assert retiring(*seen).verdict is expected


def test_a_retirement_is_pending_until_it_is_read_not_to_be():
    gpu = retiring(*pages(1, pending=True))
    assert gpu.latch.detail == "the retirement of a memory page waits for a reset of the GPU"
    assert gpu.see(*pages(1, None, pending=None), HUNG) is DEGRADED
    assert gpu.restart() is DEGRADED
    assert gpu.see(*pages(1)) is OK


def test_a_retirement_that_comes_and_goes_is_what_is_read():
    seen = [*pages(1, pending=True), *pages(1)] * 10
    assert list(retiring().steps(*seen)) == [DEGRADED, OK] * 10


def test_too_many_pages_while_one_is_pending_are_fatal_and_stay_so():
    gpu = retiring(*pages(59, pending=True))
    assert gpu.see(*pages(60, pending=True)) is FATAL
    assert gpu.latch.detail == "60 memory pages retired, 60 are too many"
    assert set(gpu.steps(*pages(*[59] * 10), *pages(None, pending=None), *pages(60))) == {FATAL}
    assert gpu.restart() is FATAL
    assert gpu.see(*pages(60), *pages(*[59] * 10)) is FATAL


def test_too_few_pages_after_a_new_enumeration_are_believed_but_silence_is_not():
    gpu = retiring(*pages(60))
    gpu.see(*pages(60))
    assert gpu.see(*pages(*[None] * 10, binding=2)) is FATAL
    assert gpu.see(*pages(0, 0, binding=2)) is FATAL
    assert gpu.see(*pages(0, binding=2)) is OK


def test_an_operator_may_vouch_for_worn_memory():
    gpu = retiring(*pages(60))
    assert gpu.vouch() is DEGRADED
    assert gpu.see(*pages(61, 62)) is DEGRADED
    assert gpu.restart() is DEGRADED


def test_every_memory_signal_is_shown_what_the_others_are_without_minding_it():
    healthy = Sample(
        temperature=40,
        energy=1,
        ecc_uncorrected=0,
        sram_threshold=False,
        remap_pending=False,
        remap_failure=False,
        retired_pending=False,
        retired_pages=0,
        unrepairable_memory=False,
        recovery_action=0,
    )
    gpu = Watched("sram-threshold", BOTH)
    gpu.see(*[replace(healthy, energy=at) for at in range(10)])
    assert gpu.ledger.standing(GPU) == []
