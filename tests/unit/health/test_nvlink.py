"""NVLinks that were up and are down, and the errors on them."""

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Fault, Sample, facts
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.looked_at import LookedAt
from tests.unit.health.watching import GPU

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
UNREAD, LOST = Sample(), Sample(fault=Fault.LOST, detail="the GPU is lost")


def links(up: str) -> Sample:
    """A look at links, link 0 first: `1` is up."""
    return Sample(nvlinks=tuple(one == "1" for one in up))


ALL, DOWN = links("1111"), links("1101")


@pytest.fixture
def gpu():
    return LookedAt("nvlink")


def test_a_link_that_was_up_is_down_at_the_second_look(gpu):
    assert gpu.told(ALL, DOWN, DOWN) == [OK, OK, DEGRADED]
    assert (gpu.detail, gpu.latch.since) == ("NVLink 2 went down", gpu.now - 5)
    assert gpu.overall is DEGRADED


def test_it_is_looked_at_again_soon_while_a_link_is_made_out(gpu):
    gpu.see(ALL)
    assert not gpu.ledger.suspicious(GPU)
    gpu.see(DOWN)
    assert gpu.ledger.suspicious(GPU)
    gpu.see(DOWN)
    assert not gpu.ledger.suspicious(GPU)


def test_a_link_that_never_was_up_is_no_news(gpu):
    assert gpu.see(*[DOWN] * 20) is OK
    assert gpu.see(*[links("0000")] * 2) is DEGRADED
    assert gpu.detail == "NVLinks 0, 1 and 3 went down"


def test_a_gpu_none_of_whose_links_was_ever_up_is_nothing_to_remember(gpu):
    assert gpu.see(*[links("0000")] * 20, *[Sample(nvlinks=())] * 5) is OK
    assert gpu.remembered is None


def test_a_part_without_nvlink_is_never_judged(gpu):
    assert gpu.see(*[UNREAD] * 20) is OK
    assert gpu.remembered is None


def test_links_that_are_down_in_turn_for_one_look_each_are_no_fault(gpu):
    assert gpu.see(ALL, *[DOWN, ALL] * 20) is OK
    assert gpu.see(*[links("0111"), links("1011"), links("1101"), links("1110")] * 5) is OK


@pytest.mark.parametrize("unread", [UNREAD, LOST])
def test_what_cannot_be_read_makes_no_row_and_keeps_the_links_known(gpu, unread):
    assert gpu.see(ALL, DOWN, unread, DOWN) is OK
    assert gpu.see(DOWN) is DEGRADED
    assert gpu.see(*[unread] * 20) is DEGRADED
    assert gpu.see(ALL, ALL, unread, ALL, ALL) is DEGRADED
    assert gpu.see(ALL) is OK


def test_it_stays_for_as_long_as_the_link_is_down(gpu):
    gpu.see(ALL, *[DOWN] * 50)
    assert gpu.verdict is DEGRADED
    assert len(gpu.changes) == 1


@pytest.mark.parametrize("every", [5.0, 60.0])
def test_a_link_that_stays_down_for_five_minutes_makes_the_gpu_unfit(gpu, every):
    """As NVIDIA's own validation has it: any inactive link is critical."""
    gpu.see(ALL, every=every)
    assert gpu.see(*[DOWN] * round(300 / every), every=every) is DEGRADED
    assert gpu.see(DOWN) is FATAL
    assert gpu.restart() is FATAL
    assert gpu.told(ALL, ALL, ALL) == [FATAL, FATAL, OK]


@pytest.mark.parametrize("between", [ALL, links("1111")])
def test_links_that_come_back_in_between_begin_the_five_minutes_again(gpu, between):
    gpu.see(ALL, *[DOWN] * 50, between, *[DOWN] * 50)
    assert gpu.verdict is DEGRADED


def test_five_minutes_that_a_restart_cuts_are_five_minutes(gpu):
    gpu.see(ALL, *[DOWN] * 30)
    gpu.restart()
    assert gpu.see(*[DOWN] * 29) is DEGRADED
    assert gpu.see(*[DOWN] * 2) is FATAL


def test_a_boot_begins_the_five_minutes_again(gpu):
    gpu.see(ALL, *[DOWN] * 50)
    gpu.ledger.booted("next")
    assert gpu.see(*[DOWN] * 50) is DEGRADED


def test_three_looks_at_all_links_up_end_it(gpu):
    assert gpu.told(ALL, DOWN, DOWN, ALL, ALL, ALL) == [OK, OK, DEGRADED, DEGRADED, DEGRADED, OK]
    assert gpu.told(DOWN, DOWN) == [OK, DEGRADED]  # and what was up is not forgotten


def test_a_link_that_comes_and_goes_stays_a_fault(gpu):
    assert gpu.see(ALL, DOWN, DOWN, *[ALL, ALL, DOWN] * 20) is DEGRADED
    assert len(gpu.changes) == 1


def test_links_that_only_others_are_up_for_do_not_end_it(gpu):
    gpu.see(ALL, DOWN, DOWN)
    assert gpu.see(*[links("1101")] * 10) is DEGRADED
    assert gpu.see(*[links("1011")] * 10) is DEGRADED  # link 2 is back, another is down


def test_a_further_link_is_named_at_its_second_look_and_keeps_the_first_time(gpu):
    gpu.see(ALL, DOWN, DOWN)
    since = gpu.latch.since
    gpu.see(links("0101"))
    gpu.restart()
    gpu.see(links("0101"))
    assert (gpu.detail, gpu.latch.since) == ("NVLinks 0 and 2 went down", since)
    revision = gpu.ledger.revision
    gpu.see(*[links("0101")] * 10)
    assert gpu.ledger.revision == revision


def test_a_link_that_comes_up_later_is_watched_from_then_on(gpu):
    gpu.see(DOWN, *[links("1001")] * 2)
    assert gpu.detail == "NVLink 1 went down"
    gpu.see(links("1011"))  # link 2 comes up while link 1 is down
    gpu.see(*[links("1001")] * 2)
    assert gpu.detail == "NVLinks 1 and 2 went down"


def test_every_link_that_nvml_can_count_fits(gpu):
    gpu.see(links("1" * 36), *[links("1" * 35 + "0")] * 2)
    assert gpu.detail == "NVLink 35 went down"
    assert gpu.restart() is DEGRADED
    assert gpu.told(*[links("1" * 36)] * 3) == [DEGRADED, DEGRADED, OK]


def test_a_restart_remembers_which_links_were_up(gpu):
    gpu.see(ALL, DOWN, DOWN, ALL, ALL)
    assert gpu.restart() is DEGRADED
    assert gpu.detail == "NVLink 2 went down"
    assert gpu.see(*[DOWN] * 5) is DEGRADED
    assert gpu.told(ALL, ALL, ALL) == [DEGRADED, DEGRADED, OK]


def test_a_restart_takes_a_named_link_for_no_news_and_a_further_one_for_news(gpu):
    gpu.see(ALL, DOWN, DOWN)
    gpu.restart()
    revision = gpu.ledger.revision
    gpu.see(*[DOWN] * 5)
    assert gpu.ledger.revision == revision
    gpu.see(links("1100"), links("1100"))
    assert gpu.detail == "NVLinks 2 and 3 went down"


def test_a_link_that_went_down_while_we_were_away_is_news(gpu):
    gpu.see(ALL)
    assert gpu.restart() is OK
    assert gpu.told(DOWN, DOWN) == [OK, DEGRADED]


def test_a_link_that_was_down_once_is_written_down(gpu):
    gpu.see(ALL, DOWN)
    gpu.restart()
    assert gpu.told(ALL, DOWN) == [OK, OK]
    gpu.restart()
    assert gpu.see(DOWN) is DEGRADED


def test_links_are_of_no_use_in_mig_mode_and_judged_afresh_after_it():
    assert facts(Gpu(GPU, 0, mig_enabled=True)).mig
    cut = LookedAt("nvlink", Facts(mig=True))
    assert cut.see(ALL, *[links("0000")] * 10) is OK
    cut.ledger.watch(GPU, Facts())
    assert cut.see(*[links("0000")] * 10) is OK
    assert cut.told(ALL, DOWN, DOWN) == [OK, OK, DEGRADED]
    cut.ledger.watch(GPU, Facts(mig=True))
    assert cut.see(links("0000")) is OK


def test_the_operator_may_call_it_fatal():
    gpu = LookedAt("nvlink", policy=HealthPolicy(flap_hold=0, signals={"nvlink": FATAL}))
    assert gpu.see(ALL, DOWN, DOWN) is FATAL
    assert gpu.overall is FATAL


# nvlink-errors


def totals(failed: int | None = None, crc: int | None = None) -> Sample:
    return Sample(nvlink_failed_recoveries=failed, nvlink_crc_errors=crc)


@pytest.fixture
def errors():
    return LookedAt("nvlink-errors")


def test_one_recovery_that_failed_is_enough(errors):
    assert errors.told(totals(7), totals(7), totals(8)) == [OK, OK, DEGRADED]
    assert errors.detail == "an NVLink failed to recover"


def test_what_failed_before_we_came_is_no_news(errors):
    assert errors.see(*[totals(1000, 1_000_000)] * 20) is OK


def test_a_part_that_counts_nothing_is_never_judged(errors):
    assert errors.see(*[UNREAD] * 20) is OK
    assert errors.remembered is None


def test_a_hundred_crc_errors_an_hour_are_not_too_many_and_one_more_is(errors):
    assert errors.told(totals(0, 5), totals(0, 105), totals(0, 106)) == [OK, OK, DEGRADED]
    assert errors.detail == "more than 100 CRC errors on NVLinks within an hour"


def test_crc_errors_add_up_over_an_hour_and_no_longer(errors):
    slow = [totals(0, at) for at in range(0, 1000, 10)]
    assert errors.see(*slow, every=361) is OK  # a hundred in 3610 seconds
    fast = [totals(0, at) for at in range(1000, 1200, 10)]
    assert errors.see(*fast, every=300) is DEGRADED


def test_what_is_remembered_of_a_storm_of_errors_is_bounded(errors):
    errors.see(*[totals(0, at) for at in range(0, 10_000_000, 10_001)])
    assert errors.verdict is DEGRADED
    assert len(errors.latch.memory.times) == 101
    assert len(errors.changes) == 1


def test_counters_that_were_set_back_begin_anew(errors):
    assert errors.told(totals(500, 500), totals(0, 0), totals(0, 100), totals(1, 100)) == [OK, OK, OK, DEGRADED]
    fresh = LookedAt("nvlink-errors")
    assert fresh.told(totals(500, 500), totals(500, 0), totals(500, 101)) == [OK, OK, DEGRADED]


@pytest.mark.parametrize("unread", [UNREAD, LOST])
def test_growth_while_nothing_could_be_read_shows_once_it_can(errors, unread):
    assert errors.told(totals(0, 0), unread, totals(1, 0)) == [OK, OK, DEGRADED]


def test_growth_of_one_counter_that_could_not_be_read_shows_once_it_can(errors):
    assert errors.told(totals(0, 0), totals(None, 0), totals(1, 0)) == [OK, OK, DEGRADED]


def quiet(minutes: int) -> list[Sample]:
    return [totals(1, 0)] * (minutes + 1)


def failed(gpu: LookedAt) -> None:
    gpu.see(totals(0, 0), totals(1, 0), every=60)
    assert gpu.verdict is DEGRADED


def test_an_hour_without_ends_it(errors):
    failed(errors)
    assert errors.see(*quiet(59), every=60) is DEGRADED
    assert errors.see(totals(1, 0)) is OK
    assert errors.told(totals(1, 0), totals(2, 0)) == [OK, DEGRADED]  # what was counted is not forgotten


def test_few_crc_errors_do_not_keep_it_open(errors):
    failed(errors)
    assert errors.see(*[totals(1, at) for at in range(61)], every=60) is OK


def test_another_failure_begins_the_hour_anew(errors):
    failed(errors)
    errors.see(*quiet(59), totals(2, 0), every=60)
    assert errors.see(*[totals(2, 0)] * 60, every=60) is DEGRADED
    assert errors.see(totals(2, 0)) is OK
    assert len(errors.changes) == 2


@pytest.mark.parametrize("unread", [UNREAD, LOST, totals(None, 0), totals(1, None)])
def test_what_cannot_be_read_is_no_quiet(errors, unread):
    failed(errors)
    assert errors.see(*[unread] * 200, every=60) is DEGRADED
    assert errors.see(*quiet(30), unread, *quiet(59), every=60) is DEGRADED
    assert errors.see(totals(1, 0)) is OK


def test_too_many_crc_errors_end_an_hour_after_the_last_of_them(errors):
    errors.see(totals(0, 0), totals(0, 200), every=60)
    assert errors.see(*[totals(0, 200)] * 60, every=60) is DEGRADED
    assert errors.see(totals(0, 200)) is OK


def test_a_restart_waits_for_the_whole_hour_again(errors):
    failed(errors)
    errors.see(*quiet(50), every=60)
    assert errors.restart() is DEGRADED
    assert errors.see(*quiet(59), every=60) is DEGRADED
    assert errors.see(totals(1, 0)) is OK


def test_an_operator_who_vouches_for_it_is_believed_until_the_next(errors):
    failed(errors)
    assert errors.vouch() is OK
    assert errors.told(totals(1, 0), totals(1, 0), totals(2, 0)) == [OK, OK, DEGRADED]


@pytest.mark.parametrize(
    ("signal", "counters", "bad", "quiet"),
    [
        ("nvlink-errors", ("nvlink_failed_recoveries", "nvlink_crc_errors"), (1, 0), 3_600.0),
        ("nvlink-errors", ("nvlink_failed_recoveries", "nvlink_crc_errors"), (0, 101), 3_600.0),
        ("pcie-errors", ("pcie_fatal_errors", "pcie_replays"), (0, 51), 600.0),
    ],
)
def test_counters_that_looks_ask_for_in_turns_grow_and_rest_as_if_all_were_asked(signal, counters, bad, quiet):
    def looks(*totals: int, both: bool = False) -> list[Sample]:
        asked = (
            [dict(zip(counters, totals, strict=True))]
            if both
            else [{n: t} for n, t in zip(counters, totals, strict=True)]
        )
        return [Sample(**one, asked=frozenset(one)) for one in asked]

    gpu = LookedAt(signal)
    gpu.see(*looks(0, 0, both=True))
    assert gpu.see(*looks(*bad)) is DEGRADED
    for _ in range(int(quiet / 10) - 2):
        assert gpu.see(*looks(*bad)) is DEGRADED
    assert gpu.see(*looks(*bad) * 4) is OK
