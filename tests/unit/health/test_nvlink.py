"""nvlink: links that were up and are down. Counters of NVLink errors are in `test_counters`."""

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Facts, Sample, facts
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL


def links(up: str) -> Sample:
    """Return a look at links, link 0 first: `1` is up."""
    return Sample(nvlinks=tuple(one == "1" for one in up))


ALL, DOWN = links("1111"), links("1101")


@pytest.fixture
def gpu():
    return Watched("nvlink")


def test_a_look_at_a_link_that_went_down_asks_for_another_look_soon(gpu):
    for seen, suspicious in ((ALL, False), (DOWN, True), (DOWN, False)):
        gpu.see(seen)
        assert gpu.ledger.suspicious(GPU) is suspicious


@pytest.mark.parametrize(
    ("seen", "verdict", "named"),
    [
        ([DOWN] * 20, OK, ""),
        ([*[DOWN] * 20, *[links("0000")] * 2], DEGRADED, "NVLinks 0, 1 and 3 "),
        ([ALL, DOWN, DOWN], DEGRADED, "NVLink 2 "),
        ([ALL, *[links("0111"), links("1011"), links("1101"), links("1110")] * 5], OK, ""),
        ([ALL, DOWN, DOWN, *[links("1011")] * 10], DEGRADED, "NVLinks 1 and 2 "),
        ([DOWN, links("1001"), links("1001")], DEGRADED, "NVLink 1 "),
        ([DOWN, *[links("1001")] * 2, links("1011"), *[links("1001")] * 2], DEGRADED, "NVLinks 1 and 2 "),
        ([links("1" * 36), *[links("1" * 35 + "0")] * 2], DEGRADED, "NVLink 35 "),
    ],
)
def test_links_that_were_up_and_are_down_at_two_looks_open_it(gpu, seen, verdict, named):
    assert gpu.see(*seen) is verdict
    assert named == "" or named in gpu.latch.detail
    assert gpu.restart() is verdict
    assert named == "" or named in gpu.latch.detail


@pytest.mark.parametrize("seen", [[links("0000")] * 20, [Sample(nvlinks=())] * 5, [Sample()] * 20])
def test_without_a_link_that_was_up_nothing_is_stored(gpu, seen):
    assert gpu.see(*seen) is OK
    assert gpu.stored is None


@pytest.mark.parametrize("every", [5.0, 60.0])
def test_a_link_that_is_down_for_five_minutes_is_fatal(gpu, every):
    """NVIDIA's own validation also calls any inactive link critical."""
    gpu.see(ALL, every=every)
    assert gpu.see(*[DOWN] * round(300 / every), every=every) is DEGRADED
    assert gpu.see(DOWN) is FATAL
    assert gpu.restart() is FATAL
    assert gpu.steps(ALL, ALL, ALL) == [FATAL, FATAL, OK]


@pytest.mark.parametrize("between", ["the link comes back", "boot", "restart"])
def test_the_five_minutes_start_again_unless_the_process_restarts(gpu, between):
    gpu.see(ALL, *[DOWN] * 50)
    if between == "boot":
        gpu.ledger.booted("next")
    elif between == "restart":
        gpu.restart()
    else:
        gpu.see(ALL)
    assert gpu.see(*[DOWN] * 9) is DEGRADED
    assert gpu.see(*[DOWN] * 41) is (FATAL if between == "restart" else DEGRADED)


def test_another_link_keeps_the_time_of_the_first(gpu):
    gpu.see(ALL, DOWN, DOWN)
    since = gpu.latch.since
    gpu.see(links("0101"))
    gpu.restart()
    gpu.see(links("0101"))
    assert "NVLinks 0 and 2 " in gpu.latch.detail
    assert gpu.latch.since == since
    revision = gpu.ledger.revision
    gpu.see(*[links("0101")] * 10)
    assert gpu.ledger.revision == revision


def test_a_restart_keeps_which_links_were_up_and_down(gpu):
    gpu.see(ALL)
    assert gpu.restart() is OK
    assert gpu.see(DOWN) is OK
    gpu.restart()
    assert gpu.steps(ALL, DOWN) == [OK, OK]
    gpu.restart()
    assert gpu.see(DOWN) is DEGRADED
    gpu.restart()
    revision = gpu.ledger.revision
    gpu.see(*[DOWN] * 5)
    assert gpu.ledger.revision == revision, "nothing is new"
    gpu.see(links("1100"), links("1100"))
    assert "NVLinks 2 and 3 " in gpu.latch.detail


def test_links_do_not_count_in_mig_mode():
    assert facts(Gpu(GPU, 0, mig_enabled=True)).mig
    gpu = Watched("nvlink", Facts(mig=True))
    assert gpu.see(ALL, *[links("0000")] * 10) is OK
    gpu.ledger.watch(GPU, Facts())
    assert gpu.see(*[links("0000")] * 10) is OK
    assert gpu.steps(ALL, DOWN, DOWN) == [OK, OK, DEGRADED]
    gpu.ledger.watch(GPU, Facts(mig=True))
    assert gpu.see(links("0000")) is OK
