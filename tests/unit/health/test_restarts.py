"""No restart changes a verdict: what opens a signal opens it wherever the process was killed in between."""

import pytest

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Fabric, Facts, Fault, Observation, Sample, XidEvent
from tests.unit.health.ledgers import ERROR, SEEN, UNGUARDED, A

FACTS = Facts(Thresholds(95, 89, 95, 87), margins=Thresholds(-8, -2), contains_errors=True, says_action=True)
APART = Sample(fault=Fault.VANISHED)
JOINED, BROKEN = Fabric(3, 0, 0, 1), Fabric(3, 0, 0, 2)

Story = tuple[Observation, ...]

OPENINGS: dict[str, tuple[float, Story]] = {
    "temperature": (5.0, (Sample(temperature=94),) * 2),
    "slowdown-temperature": (5.0, (Sample(temperature=90),) * 4),
    "margin": (5.0, (Sample(margin=30), *(Sample(margin=-3),) * 4)),
    "margin near shutdown": (5.0, (Sample(margin=30), *(Sample(margin=-9),) * 2)),
    "margin after slowdown": (5.0, (Sample(margin=30), *(Sample(margin=-3),) * 4, *(Sample(margin=-9),) * 2)),
    "hw-slowdown": (60.0, (Sample(clocks_event_reasons=0),) * 8 + (Sample(clocks_event_reasons=0x40),) * 7),
    "unanswered": (5.0, (ERROR,) * 3),
    "unanswered, to the end": (5.0, (ERROR,) * 10),
    "unanswered now and then": (5.0, (ERROR, SEEN, ERROR, SEEN, ERROR)),
    "vanished": (5.0, (APART,) * 2),
    "nvlink": (5.0, (Sample(nvlinks=(True, True)), *(Sample(nvlinks=(True, False)),) * 2)),
    "nvlink, a further one": (
        5.0,
        (
            Sample(nvlinks=(True, True)),
            *(Sample(nvlinks=(True, False)),) * 2,
            *(Sample(nvlinks=(False, False)),) * 2,
        ),
    ),
    "nvlink-errors": (5.0, tuple(Sample(nvlink_crc_errors=at) for at in range(0, 120, 10))),
    "nvlink-errors, a failed recovery": (5.0, tuple(Sample(nvlink_failed_recoveries=at) for at in range(2))),
    "pcie-errors": (5.0, tuple(Sample(pcie_replays=at) for at in range(0, 70, 10))),
    "pcie-errors, fatal": (5.0, tuple(Sample(pcie_fatal_errors=at) for at in range(2))),
    "pcie-width": (5.0, (Sample(pcie_width=8, pcie_max_width=16),) * 4),
    "fabric": (
        5.0,
        (Sample(nvlinks=(True,), fabric=JOINED), *(Sample(nvlinks=(True,), fabric=BROKEN),) * 2),
    ),
    "fabric, from limited": (
        5.0,
        (
            *(Sample(nvlinks=(True,), fabric=Fabric(3, 0, 0, 3)),) * 3,
            *(Sample(nvlinks=(True,), fabric=BROKEN),) * 2,
        ),
    ),
    "xid, asked for": (5.0, (Sample(recovery_action=1), XidEvent(63), Sample(recovery_action=0))),
    "xid, ten times": (600.0, (XidEvent(74),) * 10),
    "ecc-uncorrected": (5.0, (Sample(ecc_uncorrected=0), Sample(ecc_uncorrected=1))),
}


class Killed:
    """A ledger, and what was written down of it when it last said that something is to be."""

    def __init__(self, ledger: HealthLedger) -> None:
        self.ledger = ledger
        self.written: tuple[Evidence, ...] = ()
        self.revision = ledger.revision

    def observe(self, seen: Observation, now: float) -> None:
        self.ledger.observe(A, seen, now)
        if self.ledger.revision != self.revision:
            self.written, self.revision = self.ledger.evidence(), self.ledger.revision


def begun(written: tuple[Evidence, ...] = ()) -> HealthLedger:
    made = HealthLedger(UNGUARDED, "boot-1")
    made.watch(A, FACTS)
    made.replay(written)
    return made


@pytest.mark.parametrize("name", OPENINGS)
def test_what_opens_a_signal_opens_it_wherever_the_process_is_killed(name):
    every, story = OPENINGS[name]
    signal = name.partition(",")[0].split()[0]
    found = set()
    for cut in range(len(story) + 1):
        with_ = Killed(begun())
        with_.observe(SEEN, 0.0)
        for at, seen in enumerate(story):
            if at == cut:
                with_ = Killed(begun(with_.written))
            with_.observe(seen, 1_000.0 + every * at)
        ours = [verdict for key, _, verdict in with_.ledger.standing(A) if key.signal == signal]
        found.add(max(ours, default=Verdict.OK))
    assert len(found) == 1
    assert found <= {Verdict.DEGRADED, Verdict.FATAL}
