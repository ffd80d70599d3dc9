"""The lanes of a GPU's PCIe link, and the errors on it."""

import pytest

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Fault, Sample
from tests.unit.health.looked_at import LookedAt
from tests.unit.health.watching import GPU

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
UNREAD, LOST = Sample(), Sample(fault=Fault.LOST, detail="the GPU is lost")


def lanes(width: int | None, most: int | None = 16) -> Sample:
    return Sample(pcie_width=width, pcie_max_width=most)


@pytest.fixture
def width():
    return LookedAt("pcie-width")


def test_too_few_lanes_count_at_the_fourth_look(width):
    assert width.told(lanes(16), *[lanes(8)] * 4) == [OK, OK, OK, OK, DEGRADED]
    assert (width.detail, width.latch.since) == ("its PCIe link has 8 of 16 lanes", width.now - 5)
    assert width.see(*[lanes(8)] * 50) is DEGRADED
    assert len(width.changes) == 1


@pytest.mark.parametrize("full", [lanes(16), lanes(8, 8), lanes(16, 8)])
def test_all_the_lanes_there_could_be_are_no_fault(width, full):
    assert width.see(*[full] * 20) is OK
    assert width.remembered is None


def test_no_lane_at_all_is_too_few(width):
    assert width.see(*[lanes(0)] * 4) is DEGRADED


def test_four_looks_at_all_lanes_end_it(width):
    width.see(*[lanes(8)] * 4)
    assert width.told(*[lanes(16)] * 4) == [DEGRADED, DEGRADED, DEGRADED, OK]


def test_coming_and_going_neither_opens_nor_ends_it(width):
    assert width.see(*[lanes(8), lanes(8), lanes(8), lanes(16)] * 10) is OK
    width.see(*[lanes(8)] * 4)
    assert width.see(*[lanes(16), lanes(16), lanes(16), lanes(8)] * 10) is DEGRADED


@pytest.mark.parametrize("unread", [UNREAD, LOST, lanes(None), lanes(16, None)])
def test_what_cannot_be_read_proves_nothing_of_lanes(width, unread):
    assert width.see(lanes(8), lanes(8), lanes(8), unread, lanes(8), lanes(8), lanes(8)) is OK
    assert width.see(lanes(8)) is DEGRADED
    assert width.see(*[unread] * 20, *[lanes(16)] * 3, unread, *[lanes(16)] * 3) is DEGRADED
    assert width.see(lanes(16)) is OK


def test_a_restart_keeps_a_link_with_too_few_lanes(width):
    width.see(*[lanes(8)] * 4, *[lanes(16)] * 3)
    assert width.restart() is DEGRADED
    assert width.told(*[lanes(16)] * 4) == [DEGRADED, DEGRADED, DEGRADED, OK]


# pcie-errors


def totals(replays: int | None = None, fatal: int | None = None, energy: int | None = None) -> Sample:
    return Sample(counting=0, pcie_replays=replays, pcie_fatal_errors=fatal, energy=energy)


@pytest.fixture
def errors():
    return LookedAt("pcie-errors")


def test_a_part_that_counts_nothing_is_never_judged(errors):
    assert errors.see(*[UNREAD] * 20) is OK
    assert errors.remembered is None


def test_what_was_counted_before_we_came_is_no_news(errors):
    assert errors.see(*[totals(1_000_000, 1_000)] * 20) is OK


def test_fifty_replays_a_minute_are_not_too_many_and_one_more_is(errors):
    assert errors.told(totals(7), totals(57), totals(58)) == [OK, OK, DEGRADED]
    assert errors.detail == "more than 50 replays on its PCIe link within a minute"


def test_replays_add_up_over_a_minute_and_no_longer(errors):
    assert errors.see(*[totals(at) for at in range(0, 1_000, 50)], every=61) is OK
    assert errors.see(*[totals(at) for at in range(1_000, 1_080, 20)], every=25) is DEGRADED


def test_what_is_remembered_of_a_storm_of_replays_is_bounded(errors):
    errors.see(*[totals(at) for at in range(0, 1_000_000, 1_001)])
    assert errors.verdict is DEGRADED
    assert len(errors.latch.memory.times) == 51
    assert len(errors.changes) == 1


def test_ten_minutes_without_end_it(errors):
    errors.see(totals(0), totals(51), every=60)
    assert errors.see(*[totals(51)] * 10, every=60) is DEGRADED
    assert errors.see(totals(51)) is OK
    assert errors.told(totals(51), totals(102)) == [OK, DEGRADED]


def test_few_replays_do_not_keep_it_open_and_many_do(errors):
    errors.see(totals(0), totals(51), every=60)
    assert errors.see(*[totals(51 + at) for at in range(0, 55, 5)], every=60) is OK
    errors.see(totals(1_000), every=60)
    assert errors.verdict is DEGRADED
    assert errors.see(*[totals(1_000 + 60 * at) for at in range(30)], every=60) is DEGRADED


@pytest.mark.parametrize("unread", [UNREAD, LOST])
def test_what_cannot_be_read_is_no_quiet(errors, unread):
    errors.see(totals(0), totals(51), every=60)
    assert errors.see(*[unread] * 50, *[totals(51)] * 9, unread, *[totals(51)] * 10, every=60) is DEGRADED
    assert errors.see(totals(51)) is OK


@pytest.mark.parametrize("unread", [UNREAD, LOST])
def test_growth_while_nothing_could_be_read_shows_once_it_can(errors, unread):
    assert errors.told(totals(0, 0), unread, totals(0, 1)) == [OK, OK, FATAL]


def test_counters_that_were_set_back_begin_anew(errors):
    assert errors.told(totals(900, 9), totals(0, 0), totals(50, 0), totals(50, 1)) == [OK, OK, OK, FATAL]


def opened(gpu: LookedAt) -> None:
    assert gpu.told(totals(0, 0, 9_000), totals(0, 0, 9_100), totals(0, 1, 9_200)) == [OK, OK, FATAL]
    assert gpu.detail == "fatal errors on its PCIe link"
    assert gpu.ledger.reason(GPU) == "fatal errors on its PCIe link"


def test_one_fatal_error_is_enough_and_good_looks_alone_are_no_end(errors):
    opened(errors)
    since = errors.latch.since
    assert errors.see(*[totals(0, 1, 9_200 + at) for at in range(200)], every=60) is FATAL
    assert (errors.latch.since, len(errors.changes)) == (since, 1)


def test_a_reset_and_three_looks_without_a_fault_end_it(errors):
    opened(errors)
    after = [totals(0, 0, at) for at in (10, 20, 30)]
    assert errors.told(*after) == [FATAL, FATAL, OK]
    assert errors.told(totals(0, 0, 40), totals(0, 1, 50)) == [OK, FATAL]


def test_a_reset_with_a_fault_or_a_wish_of_the_driver_in_between_is_no_end_yet(errors):
    opened(errors)
    wish, none = (Sample(counting=0, pcie_fatal_errors=0, energy=30, recovery_action=action) for action in (1, 0))
    assert errors.see(totals(0, 0, 10), totals(0, 0, 20), wish) is FATAL
    assert errors.told(*[none] * 5) == [FATAL] * 4 + [
        OK
    ]  # three until the wish itself is over, which is the first good look
    errors.see(totals(0, 1, 40), totals(0, 0, 10), totals(0, 0, 20), LOST)
    assert errors.verdict is FATAL


def test_another_fatal_error_after_a_reset_needs_another_reset(errors):
    opened(errors)
    errors.see(totals(0, 0, 10), totals(0, 0, 20), totals(0, 1, 30))
    assert errors.see(*[totals(0, 1, 40 + at) for at in range(20)]) is FATAL
    assert errors.told(*[totals(0, 0, at) for at in (1, 2, 3)]) == [FATAL, FATAL, OK]


def test_a_reset_that_shows_in_the_same_look_as_the_error_is_no_proof_against_it(errors):
    errors.see(totals(0, 0, 9_000))
    assert errors.see(totals(0, 1, 10)) is FATAL
    assert errors.see(*[totals(0, 1, 20 + at) for at in range(20)]) is FATAL


def test_a_fatal_error_among_too_many_replays_is_fatal_and_takes_a_reset(errors):
    assert errors.told(totals(0, 0, 9_000), totals(60, 0, 9_001), totals(60, 1, 9_002)) == [OK, DEGRADED, FATAL]
    assert errors.see(*[totals(60, 1, 9_003 + at) for at in range(100)], every=60) is FATAL
    assert errors.told(*[totals(0, 0, at) for at in (1, 2, 3)]) == [FATAL, FATAL, OK]


def test_an_operator_who_vouches_for_it_is_believed_until_the_next(errors):
    opened(errors)
    assert errors.vouch() is OK
    assert errors.told(totals(0, 1, 9_300), totals(0, 1, 9_400), totals(0, 2, 9_500)) == [OK, OK, FATAL]


def test_a_restart_knows_what_it_waits_for(errors):
    opened(errors)
    assert errors.restart() is FATAL
    assert errors.see(*[totals(0, 1, 9_300 + at) for at in range(20)]) is FATAL
    assert errors.told(*[totals(0, 0, at) for at in (1, 2, 3)]) == [FATAL, FATAL, OK]


def test_what_was_counted_is_compared_over_a_restart(errors):
    errors.see(totals(100, 0))
    assert errors.restart() is OK
    assert errors.see(totals(140, 1)) is FATAL
    assert errors.detail == "fatal errors on its PCIe link"


def test_a_counter_that_was_set_back_over_a_restart_is_counted_from_there(errors):
    errors.see(totals(100, 3))
    errors.restart()
    assert errors.see(totals(0, 0)) is OK
    assert errors.see(totals(0, 1)) is FATAL


def test_growing_replays_are_written_down_once_a_minute_and_none_is_lost_by_a_kill(errors):
    errors.see(totals(0, 0), totals(1, 0))
    written, revision = errors.ledger.evidence(), errors.ledger.revision
    errors.see(*[totals(at) for at in range(2, 12)])
    assert errors.ledger.revision == revision
    errors.ledger = errors._ledger()
    errors.ledger.replay(written)
    assert errors.told(totals(50), totals(51)) == [OK, DEGRADED]
    revision = errors.ledger.revision
    errors.see(*[totals(60 + at // 3) for at in range(120)])  # ten minutes
    assert revision < errors.ledger.revision <= revision + 10
