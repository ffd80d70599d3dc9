import pytest

from gpu_plugin.health.latch import Latch, LatchKey, Marks, Proof, Verdict
from gpu_plugin.health.observation import DriverEvent, Facts, Fault, Observation, Sample
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Context
from gpu_plugin.health.signals.driver_events import EventMemory, driver_event
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
HOUR, DAY = 3_600.0, 86_400.0
LOST = Sample(fault=Fault.LOST, detail="the GPU is lost")
BAD = {0x800: FATAL, 0x2000: FATAL, 0x4000: FATAL, 0x400: DEGRADED, 0x1000: DEGRADED, 0x200: DEGRADED, 0x2: DEGRADED}
bad = pytest.mark.parametrize("kind", BAD)
fatal = pytest.mark.parametrize("kind", [kind for kind, verdict in BAD.items() if verdict is FATAL])
degraded = pytest.mark.parametrize("kind", [kind for kind, verdict in BAD.items() if verdict is DEGRADED])


def heard(kind: int, part: str = "") -> Watched:
    """A GPU on which an event of this kind happened."""
    gpu = Watched("driver-event", Facts(), part=part)
    gpu.see(*energies(5_000), DriverEvent(kind))
    return gpu


def energies(*values: int | None) -> list[Observation]:
    return [Sample(counting=0, energy=value) for value in values]


@bad
def test_what_an_event_means(kind):
    gpu = heard(kind)
    assert gpu.verdict is BAD[kind]
    assert gpu.latch.detail.startswith(f"driver event {kind:#x} (")


@pytest.mark.parametrize("kind", [0x1, 0x4, 0x8, 0x10, 0x80, 0x100, 0x8000, 0x10000])
def test_other_events_are_none_of_its_business(kind):
    assert heard(kind).verdict is OK


def test_each_kind_has_a_latch_of_its_own():
    gpu = heard(0x800)
    gpu.see(DriverEvent(0x400), DriverEvent(0x400), DriverEvent(0x8))
    assert {(key.part, verdict) for key, _, verdict in gpu.ledger.standing(GPU)} == {
        ("0x800", FATAL),
        ("0x400", DEGRADED),
    }


@bad
def test_a_reset_and_three_clean_looks_are_a_recovery(kind):
    gpu = heard(kind)
    assert gpu.see(*energies(10, 20)) is BAD[kind]
    assert gpu.see(*energies(30)) is OK


@bad
def test_good_looks_alone_are_no_recovery(kind):
    assert heard(kind).see(*energies(*range(5_001, 5_100))) is BAD[kind]


@bad
@pytest.mark.parametrize(
    "interruption", [LOST, Sample(counting=0, recovery_action=1), Sample(fault=Fault.HUNG, detail="no answer")]
)
def test_what_is_not_clean_in_between_starts_the_looks_anew(kind, interruption):
    gpu = heard(kind)
    assert gpu.see(*energies(10, 20), interruption, *energies(30, 40)) is BAD[kind]


@bad
def test_the_same_event_after_a_reset_needs_another(kind):
    gpu = heard(kind)
    assert gpu.see(*energies(10, 20), DriverEvent(kind), *energies(30, 40, 50, 60)) is BAD[kind]
    assert gpu.see(*energies(5, 6, 7)) is OK


@degraded
def test_a_day_without_another_is_enough_for_what_is_degraded(kind):
    gpu = heard(kind)
    assert gpu.see(*energies(*[None] * 24), every=HOUR) is DEGRADED
    assert gpu.see(*energies(None)) is OK


@fatal
def test_no_time_is_enough_for_what_is_fatal(kind):
    assert heard(kind).see(*energies(*[None] * 100), every=DAY) is FATAL


@degraded
def test_another_event_starts_the_day_anew(kind):
    gpu = heard(kind)
    assert gpu.see(*energies(*[None] * 20), DriverEvent(kind), *energies(*[None] * 24), every=HOUR) is DEGRADED
    assert gpu.see(*energies(None)) is OK


def test_another_kind_of_event_does_not_start_the_day_anew():
    gpu = heard(0x400, part="0x400")
    assert gpu.see(*energies(*[None] * 24), DriverEvent(0x200), every=HOUR) is DEGRADED
    assert gpu.see(*energies(None)) is OK


@degraded
def test_silence_and_faults_are_no_day_of_quiet(kind):
    gpu = heard(kind)
    assert gpu.see(*[LOST] * 100, every=HOUR) is DEGRADED
    assert gpu.see(*energies(None), *[LOST] * 100, every=HOUR) is DEGRADED
    assert gpu.see(*energies(None)) is OK


@bad
def test_an_operators_word_ends_it_until_it_happens_again(kind):
    gpu = heard(kind)
    assert gpu.vouch() is OK
    assert gpu.see(*energies(5_001)) is OK
    assert gpu.see(DriverEvent(kind)) is BAD[kind]


@bad
def test_an_event_outlives_a_restart_and_its_day_begins_anew(kind):
    gpu = heard(kind)
    gpu.see(*energies(*[None] * 23), every=HOUR)
    assert gpu.restart() is BAD[kind]
    assert gpu.see(*energies(*[None] * 24), every=HOUR) is BAD[kind]
    assert gpu.see(*energies(10, 20, 30)) is OK


def test_a_storm_of_one_kind_writes_nothing_down():
    gpu = heard(0x200)
    gpu.see(*energies(5_001))
    revision = gpu.ledger.revision
    gpu.see(*[DriverEvent(0x200)] * 50, every=0.01)
    assert gpu.ledger.revision == revision


@pytest.mark.parametrize(("kind", "proof"), [(0x800, Proof.RESET), (0x1000, Proof.QUIET)])
def test_a_latch_says_what_it_waits_for(kind, proof):
    ctx = Context(7.0, LatchKey("driver-event", f"{kind:#x}"), Facts(), HealthPolicy(), Marks(energy=5))
    latch = driver_event(None, DriverEvent(kind), ctx)
    assert latch is not None
    assert (latch.verdict, latch.since, latch.proof, latch.recovery.marks) == (BAD[kind], 7.0, proof, Marks(energy=5))


@bad
def test_what_is_no_event_of_its_own_leaves_it_as_it_is(kind):
    ctx = Context(7.0, LatchKey("driver-event", f"{kind:#x}"), Facts(), HealthPolicy())
    latch = Latch(EventMemory(), BAD[kind], "it", 1.0, Proof.RESET)
    assert driver_event(latch, DriverEvent(0x100), ctx) is latch
    assert driver_event(None, Sample(), ctx) is None
