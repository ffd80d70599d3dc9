"""Looks that fail, over a restart."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import CORE, Fabric, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import ERROR, H200
from tests.unit.health.watching import GPU, Watched

GOOD = Sample()
OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL


@pytest.mark.parametrize("failed", range(1, 10))
@pytest.mark.parametrize("good", range(3))
def test_looks_that_failed_before_a_restart_count_after_it(failed, good):
    """Also those that are not enough yet, of a process that was killed: all that was told of as news is written down."""
    ledger = HealthLedger(HealthPolicy(), "boot-1")
    written: tuple[Evidence, ...] = ()
    revision = 0
    ledger.watch("GPU-0", H200)
    for at, seen in enumerate([GOOD, *[ERROR] * failed, *[GOOD] * good]):
        ledger.observe("GPU-0", seen, 1_000.0 + at)
        if ledger.revision != revision:
            written, revision = ledger.evidence(), ledger.revision
    new = HealthLedger(HealthPolicy(), "boot-1")
    new.watch("GPU-0", H200)
    new.replay(written)
    for at in range(10):
        for each in (ledger, new):
            each.observe("GPU-0", ERROR, 1_020.0 + at)
        here, there = (
            [verdict for key, _, verdict in each.standing("GPU-0") if key.signal == "unanswered"]
            for each in (ledger, new)
        )
        assert there >= here


# Core readings that the driver refuses, while it answers other questions

SILENT = Sample(refused=CORE, nvlinks=(True, True), fabric=Fabric(3), recovery_action=0)


def watched(signal="unanswered"):
    return Watched(signal, H200)


def test_a_gpu_whose_core_readings_are_all_refused_is_fatal_at_the_tenth_look():
    gpu = watched()
    verdicts = list(gpu.steps(*[SILENT] * 10))
    assert verdicts == [OK] * 2 + [DEGRADED] * 7 + [FATAL]
    assert gpu.ledger.verdict(GPU) is FATAL
    assert all(name in gpu.ledger.reason(GPU) for name in ("temperature", "energy", "memory used", "utilization"))
    assert gpu.see(*[Sample(temperature=30)] * 4) is FATAL
    assert gpu.see(Sample(temperature=30)) is OK


@pytest.mark.parametrize("refused", [{"temperature", "energy"}, {"temperature"}, {"energy", "utilization"}])
def test_a_gpu_that_tells_neither_temperature_nor_energy_is_unfit_whatever_else_it_tells(refused):
    """The other one is not supported, where it is not refused."""
    seen = Sample(refused=frozenset(refused), memory_used=5, utilization=0)
    assert watched().see(*[seen] * 10) is FATAL


@pytest.mark.parametrize("refused", sorted(CORE))
def test_a_core_reading_that_is_refused_beside_others_is_degraded_for_as_long_as_it_lasts(refused):
    told: dict[str, Any] = {"temperature": 30, "energy": 5_000, "memory_used": 1, "utilization": 1} | {refused: None}
    seen = Sample(**told, refused=frozenset({refused}))
    gpu = watched()
    assert gpu.see(*[seen] * 100) is DEGRADED
    assert refused.replace("_", " ") in gpu.ledger.standing(GPU)[0][1].detail
    assert gpu.see(*[Sample(temperature=30)] * 4, seen, *[Sample(temperature=30)] * 4) is DEGRADED
    assert gpu.see(Sample(temperature=30)) is OK


def test_a_reading_that_a_part_does_not_support_is_none_that_is_refused():
    assert watched().see(*[Sample(asked=frozenset({"nvlinks"}), nvlinks=(True,))] * 20) is OK


def test_a_gpu_that_was_never_seen_to_answer_is_not_handed_out():
    gpu = Watched("first-look", H200, seen=False)
    assert gpu.see(*[SILENT] * 2) is FATAL
    one_odd = Sample(temperature=30, refused=frozenset({"utilization"}))
    assert gpu.see(one_odd) is OK, "which has a signal of its own"


@pytest.mark.parametrize("signal", ["hung", "reset-required", "vanished", "driver"])
@pytest.mark.parametrize("refused", sorted(CORE))
def test_a_look_with_a_core_reading_refused_ends_no_fault(signal, refused):
    gpu = watched(signal)
    fault = Fault(signal)
    odd = Sample(temperature=30, refused=frozenset({refused}))
    assert gpu.see(*[Sample(fault=fault)] * 2) is FATAL
    assert gpu.see(*[odd] * 10) is FATAL
    assert gpu.see(*[Sample(temperature=30)] * 3) is OK


@pytest.mark.parametrize("xid", [48, 64, 95, 119])
def test_no_xid_is_over_by_looks_in_which_core_readings_are_refused(xid):
    gpu = Watched("xid", H200, part=str(xid))
    gpu.see(Sample(counting=0, energy=10**10), XidEvent(xid))
    odd = replace(SILENT, refused=CORE - {"energy"}, counting=0, energy=10)
    assert gpu.see(*[replace(odd, energy=10 + at, recovery_action=None) for at in range(9)]) > OK
    assert gpu.see(*[Sample(counting=0, energy=100 + at) for at in range(3)]) is OK
