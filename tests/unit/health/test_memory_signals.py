"""Memory signals: uncorrected errors, flags that condemn a part, pending remappings and retired pages."""

import pytest

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Observation, Sample, XidEvent
from tests.unit.health.ledgers import ERROR, HUNG
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
NEITHER, SAYS, CONTAINS = Facts(), Facts(says_action=True), Facts(contains_errors=True)
BOTH = Facts(says_action=True, contains_errors=True)


# ecc-uncorrected


def counting(facts: Facts = NEITHER, first: int | None = 0) -> Watched:
    """Return a GPU after a first look with this count of uncorrected errors."""
    gpu = Watched("ecc-uncorrected", facts)
    gpu.see(*counts(first))
    return gpu


def counts(*values: int | None, action: int | None = None, energy: int | None = None) -> list[Observation]:
    return [Sample(counting=0, ecc_uncorrected=value, recovery_action=action, energy=energy) for value in values]


@pytest.mark.parametrize(
    ("facts", "first", "seen", "verdict"),
    [
        (NEITHER, 0, counts(0, 0, 1), FATAL),
        (CONTAINS, 0, counts(0, 0, 1), DEGRADED),
        (SAYS, 0, counts(0, 0, 1, action=0), DEGRADED),
        (SAYS, 0, counts(1, action=1), FATAL),
        (SAYS, 0, counts(0, 0, 1), DEGRADED),
        (BOTH, 0, counts(0, 0, 1, action=0), DEGRADED),
        (BOTH, 0, counts(1, action=1), FATAL),
        # Errors from before the first look
        *[(facts, 7, [], DEGRADED) for facts in (NEITHER, CONTAINS, SAYS, BOTH)],
        (SAYS, None, counts(7, action=1), FATAL),
        (NEITHER, 7, counts(*[7] * 20), DEGRADED),
        (NEITHER, 7, counts(*[7] * 20, 8), FATAL),
        # A part that does not count
        *[(NEITHER, first, [*counts(*[None] * 10), HUNG, XidEvent(31)], OK) for first in (None, 0)],
        (NEITHER, 0, [*counts(None, None), HUNG, *counts(1)], FATAL),
        (BOTH, 0, [*counts(1, 1, action=0), *counts(1, action=1), *counts(*[1] * 20, action=0)], FATAL),
        # Without a reset it stays
        (NEITHER, 0, [*counts(3), *counts(*[3, None] * 50), *[Sample()] * 50], FATAL),
        (NEITHER, 0, [*counts(3), *counts(*[2] * 20)], FATAL),
        (NEITHER, 0, counts(3, 0, 0, 1, *[1] * 20), FATAL),
        (NEITHER, 0, counts(3, 0, 0, 1, *[1] * 20, 0, 0, 0), OK),
        (NEITHER, 0, counts(3, *[2] * 20, 0, 0, 0), OK),
    ],
)
def test_an_uncorrected_error_counts_by_the_part_and_by_the_drivers_request(facts, first, seen, verdict):
    gpu = counting(facts, first)
    assert gpu.see(*seen) is verdict


def test_the_detail_has_the_count():
    gpu = counting()
    gpu.see(*counts(1))
    since = gpu.latch.since
    for count in (1, 4, 2):
        gpu.see(*counts(count))
        assert gpu.latch.detail.startswith(f"{count} uncorrected memory error")
        assert gpu.latch.since == since


@pytest.mark.parametrize("facts", [NEITHER, BOTH])
def test_a_count_that_a_reset_set_back_closes_it_after_three_clean_looks(facts):
    gpu = counting(facts)
    gpu.see(*counts(3))
    before = gpu.verdict
    assert gpu.steps(*counts(0, 0, 0)) == [before, before, OK]
    gpu.see(*counts(3))
    assert gpu.see(*counts(0, 0), *counts(0, action=1)) is before, "such a request is for another fault"
    assert gpu.see(*counts(*[0] * 10, action=0)) is OK


@pytest.mark.parametrize("between", [ERROR, HUNG, *counts(0, action=1)])
def test_the_clean_looks_start_again_after_another_fault(between):
    gpu = counting(SAYS)
    gpu.see(*counts(3))
    assert gpu.see(*counts(0, 0, action=0), between, *counts(0, 0, action=0)) is DEGRADED
    assert gpu.see(*counts(*[0] * 10, action=0)) is OK
    assert gpu.ledger.standing(GPU) == []


def test_a_reset_that_other_marks_show_closes_it_unless_there_is_a_count():
    gpu = counting()
    gpu.see(*counts(3, energy=5_000))
    assert gpu.see(*counts(*[3] * 20, energy=10)) is FATAL
    assert not gpu.ledger.suspicious(GPU)
    assert gpu.see(*counts(0, energy=10)) is OK
    gpu.see(*counts(3, energy=5_000))
    assert gpu.see(*counts(None, None, energy=10)) is FATAL
    assert gpu.see(*counts(None, energy=10)) is OK


def test_an_override_lasts_until_the_next_error():
    gpu = counting()
    gpu.see(*counts(1))
    assert gpu.override() is DEGRADED
    assert gpu.see(*counts(*[1] * 20)) is DEGRADED
    assert gpu.see(*counts(2)) is FATAL
    gpu = counting(BOTH)
    gpu.see(*counts(1, action=1))
    assert gpu.override() is DEGRADED
    assert gpu.see(*counts(*[1] * 20, action=1)) is DEGRADED
    assert gpu.see(*counts(2, action=0)) is DEGRADED, "the next error is judged by itself"
    assert gpu.see(*counts(2, action=1)) is FATAL


@pytest.mark.parametrize("overridden", [False, True])
def test_a_restart_keeps_the_count(overridden):
    for cleared in ([], counts(0, 0)):
        gpu = counting()
        gpu.see(*counts(3))
        verdict = gpu.override() if overridden else gpu.verdict
        gpu.see(*cleared)
        assert gpu.restart() is verdict
    gpu = counting()
    gpu.see(*counts(3))
    if overridden:
        gpu.override()
    gpu.restart()
    assert gpu.see(*counts(*[3] * 10)) is verdict
    assert gpu.see(*counts(4)) is FATAL
    gpu.restart()
    assert gpu.steps(*counts(0, 0, 0)) == [FATAL, FATAL, OK], "after a reset while no process ran"


# sram-threshold, remap-failure, unrepairable-memory

condemning = pytest.mark.parametrize("signal", ["sram-threshold", "remap-failure", "unrepairable-memory"])


def flags(signal: str, *values: bool | None, binding: int | None = 1) -> list[Sample]:
    name = signal.replace("-", "_")
    return [Sample(counting=0, binding=binding, **{name: value}) for value in values]  # type: ignore[arg-type]


def condemned(signal: str) -> Watched:
    """Return a GPU that the driver reports as one to be replaced."""
    gpu = Watched(signal)
    assert set(gpu.steps(*flags(signal, False, None, False), HUNG, XidEvent(31))) == {OK}
    assert gpu.see(*flags(signal, True)) is FATAL
    assert gpu.latch.detail
    return gpu


@condemning
@pytest.mark.parametrize(
    ("first", "binding"),
    [
        ([False, True, None], 1),
        ([True, *[False] * 10], 2),  # still bad after the GPU was enumerated again
        ([False, False, True, *[False] * 10], 2),
    ],
)
def test_a_condemned_part_closes_if_it_is_enumerated_again_and_good_three_times(signal, first, binding):
    gpu = condemned(signal)
    seen = [*flags(signal, *[False] * 50), *flags(signal, *[None, True, False] * 10), HUNG]
    assert set(gpu.steps(*seen, every=86_400.0)) == {FATAL}
    assert gpu.see(*(Sample(counting=0, energy=at, ecc_uncorrected=0, binding=1) for at in (9, 1, 2, 3, 4))) is FATAL
    assert gpu.see(*flags(signal, *first, binding=binding)) is FATAL
    assert gpu.restart() is FATAL
    assert gpu.see(*flags(signal, False, False, binding=7)) is FATAL
    assert gpu.see(*flags(signal, None, False, False, binding=7)) is FATAL
    assert gpu.see(*flags(signal, False, binding=7)) is OK


@condemning
@pytest.mark.parametrize(("first", "then"), [((False, 1), (True, 2)), ((True, None), (False, None))])
def test_a_new_binding_at_the_bad_look_itself_or_a_first_one_after_it_proves_nothing(signal, first, then):
    gpu = Watched(signal)
    gpu.see(*flags(signal, first[0], binding=first[1]), *flags(signal, then[0], binding=then[1]))
    assert gpu.see(*flags(signal, *[False] * 10, binding=2)) is FATAL
    assert gpu.see(*flags(signal, *[False] * 3, binding=3)) is OK


@condemning
def test_a_condemned_part_closes_after_a_boot_and_three_good_looks(signal):
    gpu = condemned(signal)
    gpu.ledger.booted("another")
    assert gpu.see(*flags(signal, None, False, False, binding=None)) is FATAL
    assert gpu.see(*flags(signal, False, binding=None)) is OK


@condemning
def test_an_override_of_a_condemned_part_lasts_until_it_reads_good(signal):
    gpu = condemned(signal)
    assert gpu.override() is DEGRADED
    assert set(gpu.steps(*flags(signal, True, False, None, True))) == {DEGRADED}
    assert gpu.restart() is DEGRADED
    assert gpu.see(*flags(signal, False, False)) is DEGRADED
    assert gpu.see(*flags(signal, False)) is OK
    assert gpu.see(*flags(signal, True)) is FATAL


# remap-pending and retired-pages


def pending(*values: bool | None, energy: int | None = None) -> list[Observation]:
    return [Sample(counting=0, remap_pending=value, energy=energy) for value in values]


def test_a_remapping_that_cannot_be_read_stays_pending_until_a_reset():
    gpu = Watched("remap-pending")
    assert gpu.steps(*pending(False, None, True, energy=5_000)) == [OK, OK, DEGRADED]
    assert gpu.restart() is DEGRADED
    assert gpu.see(*pending(*[None] * 50, energy=6_000)) is DEGRADED
    assert gpu.see(*pending(True, energy=10), *pending(*[None] * 10, energy=10)) is DEGRADED, "it was read after it"
    assert gpu.steps(*pending(None, None, None, energy=4)) == [DEGRADED, DEGRADED, OK]


def pages(*values: int | None, pending: bool | None = False, binding: int | None = 1) -> list[Observation]:
    return [Sample(retired_pages=value, retired_pending=pending, binding=binding) for value in values]


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (pages(0, 1, 59), OK),
        (pages(60), FATAL),
        (pages(64, pending=True), FATAL),
        (pages(3, pending=True), DEGRADED),
        (pages(None, pending=True), DEGRADED),
        ([*pages(1, pending=True), *pages(1, None, pending=None), HUNG], DEGRADED),
        (pages(60, pending=None), FATAL),
        (pages(*[None] * 10, pending=None), OK),
        ([*pages(59, pending=True), *pages(60, pending=True)], FATAL),
        ([*pages(60), *pages(*[59] * 10), *pages(None, pending=None), *pages(60)], FATAL),
        ([*pages(60, 60), *pages(*[None] * 10, binding=2), *pages(0, 0, binding=2)], FATAL),
        ([*pages(60, 60), *pages(*[None] * 10, binding=2), *pages(0, 0, 0, binding=2)], OK),
    ],
)
def test_sixty_retired_pages_are_fatal_and_a_pending_one_is_degraded(seen, verdict):
    gpu = Watched("retired-pages")
    assert gpu.see(*seen) is verdict
    assert gpu.restart() is verdict
    if verdict is FATAL and seen[-1].binding == 1:
        assert gpu.see(*pages(60), *pages(*[59] * 10)) is FATAL
        assert gpu.override() is DEGRADED
        assert gpu.see(*pages(61, 62)) is DEGRADED
        assert gpu.restart() is DEGRADED
