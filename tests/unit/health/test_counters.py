"""nvlink-errors and pcie-errors: two counters each, of which the first counts at any growth and the second above a limit."""

from typing import NamedTuple

import pytest

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Sample
from tests.unit.health.ledgers import LOST
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
UNREAD = Sample()


class Pair(NamedTuple):
    """A signal of two counters: more than `limit` of the second `within` seconds are too many, `quiet` seconds close it."""

    signal: str
    first: str
    second: str
    limit: int
    within: float
    quiet: float
    worst: Verdict

    def watched(self) -> Watched:
        return Watched(self.signal)

    def look(self, first: int | None = 0, second: int | None = 0, energy: int | None = None) -> Sample:
        return Sample(counting=0, energy=energy, **{self.first: first, self.second: second})  # type: ignore[arg-type]

    def seconds(self, *totals: int) -> list[Sample]:
        return [self.look(second=total) for total in totals]

    def minutes(self, *, less: int = 0) -> list[Sample]:
        """Return looks with too many of the second counter, one for each quiet minute."""
        return [self.look(second=self.limit + 1)] * (int(self.quiet / 60) - less)


NVLINK = Pair("nvlink-errors", "nvlink_failed_recoveries", "nvlink_crc_errors", 100, 3_600.0, 3_600.0, DEGRADED)
PCIE = Pair("pcie-errors", "pcie_fatal_errors", "pcie_replays", 50, 60.0, 600.0, FATAL)
pairs = pytest.mark.parametrize("pair", [NVLINK, PCIE], ids=lambda pair: pair.signal)


def opened(pair: Pair) -> Watched:
    """Return a GPU with too many of the second counter, a minute ago."""
    gpu = pair.watched()
    assert gpu.see(*pair.seconds(0, pair.limit + 1), every=60) is DEGRADED
    return gpu


@pairs
def test_growth_opens_the_signal(pair):
    first, second = pair.look(1_001, 1_000_000), pair.limit
    for seen, verdict in (
        ([UNREAD] * 20, OK),
        ([pair.look(1_000, 1_000_000)] * 20, OK),  # counted before this process started
        ([pair.look(1_000, 1_000_000), first], pair.worst),
        (pair.seconds(7, 7 + second), OK),
        (pair.seconds(7, 7 + second, 8 + second), DEGRADED),
        ([pair.look(900, 900), pair.look(0, 0), pair.look(0, second)], OK),  # the counters were set back
        ([pair.look(900, 900), pair.look(0, 0), pair.look(0, second + 1)], DEGRADED),
        ([pair.look(900, 900), pair.look(900, 0), pair.look(900, second + 1)], DEGRADED),
        ([pair.look(900, 900), pair.look(0, 0), pair.look(1, 0)], pair.worst),
        *[([pair.look(), unread, pair.look(1)], pair.worst) for unread in (UNREAD, LOST, pair.look(None))],
    ):
        assert pair.watched().see(*seen) is verdict, seen
    silent = pair.watched()
    silent.see(UNREAD, UNREAD)
    assert silent.stored is None


@pairs
def test_the_detail_names_the_counter_and_its_limit(pair):
    gpu = pair.watched()
    gpu.see(*pair.seconds(0, pair.limit + 1))
    for word in ("NVLink" if pair is NVLINK else "PCIe", f"more than {pair.limit}"):
        assert word in gpu.latch.detail
    gpu.see(pair.look(1, pair.limit + 1))
    assert ("NVLink" if pair is NVLINK else "PCIe") in gpu.latch.detail


@pairs
def test_the_second_counter_adds_up_within_its_time(pair):
    gpu, ten = pair.watched(), pair.limit // 10
    slow, fast = range(0, 20 * pair.limit, ten), range(20 * pair.limit, 22 * pair.limit, ten)
    assert gpu.see(*pair.seconds(*slow), every=pair.within / 10 + 1) is OK
    assert gpu.see(*pair.seconds(*fast), every=pair.within / 12) is DEGRADED


@pairs
def test_a_storm_is_stored_in_bounded_memory_and_reported_once(pair):
    gpu = pair.watched()
    gpu.see(*pair.seconds(*range(0, 1_000_000, 1_001)))
    assert gpu.verdict is DEGRADED
    assert len(gpu.latch.memory.times) == pair.limit + 1
    assert len(gpu.changes) == 1


@pairs
@pytest.mark.parametrize("between", [UNREAD, LOST, "first unread", "second unread"])
def test_the_quiet_time_starts_again_after_a_look_that_did_not_read_both(pair, between):
    gpu, total = opened(pair), pair.limit + 1
    parts = {"first unread": pair.look(None, total), "second unread": pair.look(0, None)}
    unread = between if isinstance(between, Sample) else parts[between]
    assert gpu.see(*[unread] * 200, every=60) is DEGRADED
    assert gpu.see(*pair.minutes(less=1), unread, *pair.minutes(), every=60) is DEGRADED
    assert gpu.see(pair.look(second=total)) is OK
    assert gpu.see(pair.look(second=total), pair.look(second=2 * total)) is DEGRADED, "the totals are still known"


@pairs
def test_the_quiet_time_starts_again_after_a_restart(pair):
    gpu = opened(pair)
    gpu.see(*pair.minutes(less=1), every=60)
    assert gpu.restart() is DEGRADED
    assert gpu.see(*pair.minutes(), every=60) is DEGRADED
    assert gpu.see(*pair.minutes()[:1]) is OK


@pairs
def test_few_more_of_the_second_counter_do_not_keep_it_open_and_many_do(pair):
    gpu = pair.watched()
    first, second = (1, 0) if pair is NVLINK else (0, 51)
    assert gpu.see(pair.look(0, 0), pair.look(first, second), every=60) is DEGRADED
    minutes = range(int(pair.quiet / 60) + 1)
    assert gpu.see(*[pair.look(first, second + at) for at in minutes], every=60) is OK
    assert gpu.see(*[pair.look(first, 2_000 + 120 * at) for at in minutes], every=60) is DEGRADED


def test_another_failed_recovery_starts_the_hour_again():
    gpu = NVLINK.watched()
    gpu.see(NVLINK.look(0), *[NVLINK.look(1)] * 60, NVLINK.look(2), every=60)
    assert gpu.see(*[NVLINK.look(2)] * 59, every=60) is DEGRADED
    assert gpu.steps(NVLINK.look(2), NVLINK.look(2), every=60) == [DEGRADED, OK]
    assert len(gpu.changes) == 2


@pairs
def test_an_override_lasts_until_the_next_growth(pair):
    gpu = pair.watched()
    gpu.see(pair.look(0), pair.look(1))
    assert gpu.override() is OK
    assert gpu.steps(pair.look(1), pair.look(1), pair.look(2)) == [OK, OK, pair.worst]


@pairs
def test_totals_are_compared_over_a_restart(pair):
    gpu = pair.watched()
    gpu.see(pair.look(0, 100))
    assert gpu.restart() is OK
    assert gpu.see(pair.look(1, 140)) is pair.worst
    gpu = pair.watched()
    gpu.see(pair.look(3, 100))
    gpu.restart()
    assert gpu.steps(pair.look(0), pair.look(1)) == [OK, pair.worst], "the counter was set back"


def test_growth_is_stored_once_a_minute_and_a_kill_loses_none():
    gpu = PCIE.watched()
    gpu.see(*PCIE.seconds(0, 1))
    written, revision = gpu.ledger.evidence(), gpu.ledger.revision
    gpu.see(*PCIE.seconds(*range(2, 12)))
    assert gpu.ledger.revision == revision
    gpu.ledger = gpu.new_ledger()
    gpu.ledger.replay(written)
    assert gpu.steps(*PCIE.seconds(50, 51)) == [OK, DEGRADED]
    revision = gpu.ledger.revision
    gpu.see(*PCIE.seconds(*(60 + at // 3 for at in range(120))))  # ten minutes
    assert revision < gpu.ledger.revision <= revision + 10


@pytest.mark.parametrize(("pair", "bad"), [(NVLINK, (1, 0)), (NVLINK, (0, 101)), (PCIE, (0, 51))])
def test_counters_that_looks_request_in_turns_count_like_counters_of_every_look(pair, bad):
    turns = [
        Sample(**{name: total}, asked=frozenset({name}))
        for name, total in zip((pair.first, pair.second), bad, strict=True)
    ]
    gpu = pair.watched()
    gpu.see(pair.look())
    assert gpu.see(*turns) is DEGRADED
    assert set(gpu.steps(*turns * (int(pair.quiet / 10) - 2))) == {DEGRADED}
    assert gpu.see(*turns * 4) is OK


# A fatal PCIe error closes by a reset


def fatal() -> Watched:
    gpu = PCIE.watched()
    looks = PCIE.look(energy=9_000), PCIE.look(energy=9_100), PCIE.look(1, energy=9_200)
    assert gpu.steps(*looks) == [OK, OK, FATAL]
    assert gpu.ledger.reason(GPU) == gpu.latch.detail
    assert gpu.latch.since == gpu.now - 5
    return gpu


def looks(*energies: int, first: int = 0, second: int = 0) -> list[Sample]:
    return [PCIE.look(first, second, energy) for energy in energies]


def test_a_fatal_error_closes_after_a_reset_and_three_clean_looks():
    gpu = fatal()
    since = gpu.latch.since
    assert gpu.see(*looks(*range(9_200, 9_400), first=1), every=60) is FATAL
    assert (gpu.latch.since, len(gpu.changes)) == (since, 1)
    assert gpu.steps(*looks(10, 20, 30)) == [FATAL, FATAL, OK]
    assert gpu.steps(*looks(40), *looks(50, first=1)) == [OK, FATAL]
    gpu.restart()
    assert gpu.steps(*looks(1, 2, 3)) == [FATAL, FATAL, OK]


def test_a_look_with_a_fault_or_a_requested_recovery_is_not_clean():
    gpu = fatal()
    request, none = (Sample(counting=0, pcie_fatal_errors=0, energy=30, recovery_action=action) for action in (1, 0))
    assert gpu.see(*looks(10, 20), request) is FATAL
    assert gpu.steps(*[none] * 5) == [FATAL] * 4 + [OK], "the first of these looks closes recovery-action"
    gpu.see(*looks(40, first=1), *looks(10, 20), LOST)
    assert gpu.verdict is FATAL


def test_another_fatal_error_after_a_reset_needs_another_reset():
    for gpu, seen in ((fatal(), looks(10, 20)), (PCIE.watched(), looks(9_000))):
        gpu.see(*seen)
        assert gpu.see(*looks(30, *range(40, 60), first=1)) is FATAL
        assert gpu.steps(*looks(1, 2, 3)) == [FATAL, FATAL, OK]


def test_a_fatal_error_among_many_replays_takes_a_reset():
    gpu = PCIE.watched()
    seen = [*looks(9_000), *looks(9_001, second=60), *looks(9_002, first=1, second=60)]
    assert gpu.steps(*seen) == [OK, DEGRADED, FATAL]
    assert gpu.latch.since == gpu.now - 10, "since there were too many replays"
    assert gpu.see(*looks(*range(9_003, 9_103), first=1, second=60), every=60) is FATAL
    assert gpu.steps(*looks(1, 2, 3)) == [FATAL, FATAL, OK]
