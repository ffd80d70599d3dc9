"""Values that cannot be true are unknown, one by one, and so are counters that go back once."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Fabric, Sample
from gpu_plugin.nvml.plausible import COUNTERS, RANGES, CounterHistory, flag, plausible
from tests.unit.health.ledgers import H200
from tests.unit.health.watching import GPU, Watched
from tests.unit.nvml.monitored import NEVER, Bench

UINT_MAX, ALL_ONES = 2**32 - 1, 2**64 - 1


@pytest.mark.parametrize("name", sorted(RANGES))
def test_no_field_is_all_ones_and_the_others_are_as_they_were(name):
    for odd in (ALL_ONES, UINT_MAX) if RANGES[name].most < UINT_MAX else (ALL_ONES,):
        assert plausible({name: odd, "nvlinks": (True,), "binding": 3}) == {
            name: None,
            "nvlinks": (True,),
            "binding": 3,
        }


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_range_has_its_ends_and_a_source(name):
    least, most, source = RANGES[name]
    assert plausible({name: least}) == {name: least}
    assert plausible({name: most}) == {name: most}
    assert plausible({name: least - 1}) == plausible({name: most + 1}) == {name: None}
    assert source


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("temperature", UINT_MAX),
        ("temperature", -1),
        ("temperature", 201),
        ("memory_temperature", 255),
        ("energy", 0),
        ("pcie_width", 0),
        ("pcie_max_width", 0),
        ("power", UINT_MAX),
        ("utilization", 101),
        ("pcie_replays", UINT_MAX),
    ],
)
def test_values_that_drivers_report_without_a_reading_are_unknown(name, odd):
    assert plausible({name: odd}) == {name: None}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (Fabric(3, 0, 0x1AA, 1), Fabric(3, 0, 0x1AA, 1)),
        (Fabric(3, 0, UINT_MAX, 1), Fabric(3, 0, 0, 1)),
        (Fabric(255), None),
        (Fabric(3, UINT_MAX), None),
        (Fabric(3, 15), Fabric(3, 15)),
        (None, None),
    ],
)
def test_a_fabric_that_is_all_ones_is_unknown(told, found):
    assert plausible({"fabric": told}) == {"fabric": found}


def read(name, *values):
    """The values of a counter, one a look, after a history checked them."""
    history = CounterHistory()
    samples: list[dict[str, Any]] = [{name: value} for value in values]
    return [getattr(history.confirmed(Sample(**told)), name) for told in samples]


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_goes_back_once_is_unknown_then(name):
    assert read(name, 900, 0, 901, 902) == [900, None, 901, 902]
    assert read(name, 900, 100, 50, 901) == [900, None, None, 901]
    assert read(name, 900, 0, None, 901) == [900, None, None, 901]


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_was_set_back_is_known_from_the_second_look_on(name):
    assert read(name, 900, 10, 10, 11, 900) == [900, None, 10, 11, 900]
    assert read(name, 900, 10, 20, 5, 6) == [900, None, 20, None, 6]


def test_one_counter_that_goes_back_leaves_the_others_alone():
    history = CounterHistory()
    history.confirmed(Sample(energy=5, pcie_replays=7))
    assert not history.doubtful
    seen = history.confirmed(Sample(energy=6, pcie_replays=2, temperature=30))
    assert (seen.energy, seen.pcie_replays, seen.temperature, history.doubtful) == (6, None, 30, True)
    assert seen.unknown == {"pcie_replays"}


@pytest.mark.parametrize(
    "name", ["temperature", "slowdown-temperature", "pcie-width", "pcie-errors", "ecc-uncorrected"]
)
def test_no_signal_rises_by_what_is_implausible(name):
    odd: dict[str, Any] = dict.fromkeys(RANGES, ALL_ONES)
    gpu = Watched(name, H200)
    gpu.see(Sample(temperature=30, pcie_width=16, pcie_max_width=16, pcie_replays=0, ecc_uncorrected=0))
    assert gpu.see(*[Sample(**plausible(odd))] * 20) is Verdict.OK
    assert gpu.ledger.verdict(GPU) is Verdict.OK


async def test_a_monitor_passes_on_nothing_implausible_and_looks_again_soon(monkeypatch):
    bench = Bench(poll=NEVER)
    counts_of: dict[int, Iterator[int]] = {}
    monkeypatch.setattr(
        bench.driver, "uncorrected_ecc_errors", lambda handle: next(counts_of.setdefault(handle, counts()))
    )
    async with bench.watching(rounds=0):
        bench.monitor.look_now()
        await bench.until(lambda: len(bench.samples(2)) >= 2)  # the last one without waiting for the next turn
    uuid = bench.uuids[2]
    first = [seen for whose, seen in bench.first if whose == uuid]
    told = [seen.ecc_uncorrected for seen in [*first, *bench.samples(2)] if isinstance(seen, Sample)]
    assert told[:3] == [4, None, 4]


def counts() -> Iterator[int]:
    yield from (4, 0)
    while True:
        yield 4


@pytest.mark.parametrize(
    ("value", "found"), [(0, False), (1, True), (2, True), (UINT_MAX, None), (ALL_ONES, None), (-1, None)]
)
def test_a_flag_that_is_all_ones_is_unknown(value, found):
    assert flag(value) is found
