"""Looks that fail, over a restart."""

import pytest

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import ERROR, H200

GOOD = Sample()


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
