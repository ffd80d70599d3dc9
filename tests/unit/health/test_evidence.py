from contextlib import suppress

import msgspec
import pytest

from gpu_plugin.health.evidence import Evidence, decode, newer
from gpu_plugin.health.latch import Latch, LatchKey, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.signals.application_errors import Errors
from gpu_plugin.health.signals.clocks import SlowMinutes
from gpu_plugin.health.signals.flapping import HealthDrops
from gpu_plugin.health.signals.recovery_action import RequestedAction
from gpu_plugin.health.signals.unanswered import Answers
from gpu_plugin.health.signals.xid import Adjustment, Occurrences
from tests.unit.health.ledgers import GUARDED, H200, A

KEY = LatchKey("xid", "48", "MIG-1")
MEMORY = Occurrences((1.0, 2.0), 600.0, Adjustment.RAISED, asked=True, last=3.0)
MARKS = Marks(5, 6, 7, 8, 9.0, 3)
LATCH = Latch(
    MEMORY, Verdict.FATAL, "words", 12.5, Proof.REBOOT, Recovery(MARKS, reset=True, rebound=True), overridden=True
)


def test_a_latch_is_stored_without_the_progress_of_its_recovery():
    clean = msgspec.structs.replace(LATCH, recovery=msgspec.structs.replace(LATCH.recovery, clean=2))
    entry = Evidence.of("boot-1", A, KEY, clean)
    assert (entry.boot_id, entry.uuid, entry.key) == ("boot-1", A, KEY)
    assert entry.latch == LATCH
    blank = Latch(Occurrences())
    assert all(getattr(LATCH, name) != getattr(blank, name) for name in Latch.__struct_fields__), "all is in this test"
    assert all(getattr(MARKS, name) is not None for name in Marks.__struct_fields__ if name != "suspended")


def test_an_entry_survives_json():
    entry = Evidence.of("boot-1", A, KEY, msgspec.structs.replace(LATCH, recovery=Recovery(Marks(2**62, 0, 2**63 - 1))))
    assert decode(msgspec.json.encode(entry)) == entry


def test_every_verdict_and_proof_is_stored():
    for verdict in Verdict:
        for proof in Proof:
            latch = Latch(MEMORY, verdict, "words", 1.0, proof)
            assert Evidence.of("", A, KEY, latch).latch == latch


def test_unknown_verdicts_are_fatal_and_an_unknown_memory_is_empty():
    stored = {"verdict": 9, "detail": "words", "since": 1.0, "proof": "exorcism", "memory": {"moons": 3}}
    latch = decode(
        msgspec.json.encode({"boot_id": "", "uuid": A, "signal": "xid", "part": "48", "latch": stored})
    ).latch
    assert (latch.verdict, latch.proof, latch.memory) == (Verdict.FATAL, Proof.RESET, Occurrences())


@pytest.mark.parametrize(("within", "kept"), [(600.0, True), (0.0, False)])
def test_times_of_an_xid_that_count_no_longer_are_dropped(within, kept):
    ledger = HealthLedger(GUARDED, "boot-1")
    ledger.watch(A, H200)
    ledger.replay([Evidence.of("boot-1", A, KEY, Latch(Occurrences((1.0, 2.0), within)))])
    assert ("xid" in {entry.signal for entry in ledger.evidence()}) is kept


@pytest.mark.parametrize(
    ("signal", "part", "memory", "shifted"),
    [
        ("xid", "74", Occurrences((100.0, 200.0), 600.0, last=201.0), Occurrences((130.0, 230.0), 600.0, last=231.0)),
        ("flapping", "lost", HealthDrops((100.0,), 3600.0), HealthDrops((130.0,), 3600.0)),
        ("application-errors", "", Errors(((100.0, ("a/b",)),), (5.0,)), Errors(((130.0, ("a/b",)),), (35.0,))),
        ("unanswered", "", Answers(3, (100.0,)), Answers(3, (130.0,))),
        ("recovery-action", "", RequestedAction(action=1, excused=50.0), RequestedAction(action=1, excused=80.0)),
        (
            "hw-slowdown",
            "",
            SlowMinutes(watched=1.0, last=2.0, minutes=((1.0, 9.0),)),
            SlowMinutes(watched=31.0, last=32.0, minutes=((31.0, 9.0),)),
        ),
    ],
)
def test_a_corrected_clock_shifts_every_time(signal, part, memory, shifted):
    entry = Evidence.of("one", A, LatchKey(signal, part), Latch(memory, since=10.0, recovery=Recovery(MARKS)), 1_000.0)
    latch = entry.moved(1_030.0).latch
    assert (latch.since, latch.memory, latch.recovery.marks.taken) == (40.0, shifted, 39.0)
    assert entry.moved(1_030.0) == Evidence.of("one", A, LatchKey(signal, part), latch, 1_030.0)
    assert entry.moved(1_000.5) == entry, "two clocks are read one after the other"
    assert entry.moved(None) == entry, "nobody knows by how much"


def test_counters_of_persistence_mode_that_are_suspended_are_not_written_down():
    marks = msgspec.structs.replace(MARKS, suspended=Marks(4, 3, counting=0, taken=2.0))
    entry = Evidence.of("one", A, LatchKey("xid", "74"), Latch(Occurrences(), recovery=Recovery(marks)))
    assert entry.latch.recovery.marks == MARKS


def test_a_reset_that_no_second_look_confirmed_is_not_written_down():
    before = Recovery(MARKS, clean=0)
    shown = Recovery(Marks(1, 0, 7, 8, 11.0, 3), reset=True, clean=1, since=9.0, before=before)
    assert Evidence.of("one", A, KEY, msgspec.structs.replace(LATCH, recovery=shown)).latch.recovery == before
    confirmed = msgspec.structs.replace(shown, clean=0, before=None)
    entry = Evidence.of("one", A, KEY, msgspec.structs.replace(LATCH, recovery=confirmed), 1_000.0)
    assert entry.latch.recovery == confirmed
    assert entry.moved(1_030.0).latch.recovery.since == 39.0


def test_newer_evidence_is_a_new_fault_or_a_worse_verdict():
    known = Evidence.of("boot-1", A, KEY, msgspec.structs.replace(LATCH, verdict=Verdict.DEGRADED))
    worse = Evidence.of("boot-1", A, KEY, LATCH)
    other = msgspec.structs.replace(known, part="79")
    count = Evidence.of("boot-1", A, KEY, msgspec.structs.replace(LATCH, verdict=Verdict.OK))
    assert newer((known, count), (known,)) == ()
    assert newer((worse, other, count), (known,)) == (worse, other)


def entry(signal, latch, **of_evidence):
    return msgspec.json.encode({"boot_id": "boot-1", "uuid": A, "signal": signal, "latch": latch, **of_evidence})


@pytest.mark.parametrize(
    ("signal", "memory"),
    [
        ("margin", {"row": -1000}),
        ("unanswered", {"looks": -1}),
        ("unanswered", {"looks": 2**60}),
        ("recovery-action", {"worse": -2}),
        ("nvlink", {"up": -1}),
        ("slowdown-temperature", {"sensors": -1}),
        ("pcie-errors", {"totals": [1]}),
        ("nvlink-errors", {"totals": [-1, 5]}),
    ],
)
def test_a_stored_count_that_cannot_be_true_is_forgotten(signal, memory):
    assert decode(entry(signal, {"memory": memory})).latch.memory == SIGNALS[signal].memory


def test_fields_of_a_recovery_that_are_never_stored_are_not_read():
    marks = {"energy": 7, "suspended": {"energy": 5}}
    recovery = {"reset": True, "clean": 2, "before": {"marks": marks, "clean": -9}}
    latch = decode(entry("lost", {"memory": {}, "verdict": 3, "recovery": recovery})).latch
    assert latch.recovery == Recovery(Marks(7))


@pytest.mark.parametrize("depth", [300, 700, 5000])
@pytest.mark.parametrize("signal", ["lost", "of a later version"])
def test_an_entry_of_any_depth_is_read_or_refused(signal, depth):
    nested = b'{"before":' * depth + b"{}" + b"}" * depth
    with suppress(ValueError):
        decode(entry(signal, {"memory": {}, "recovery": {}}).replace(b'"recovery":{}', b'"recovery":' + nested))


def test_no_stored_energy_is_too_great_to_compare():
    ledger = HealthLedger(GUARDED, "boot-1")
    ledger.watch(A, H200)
    marks = {"energy": 10**400, "counting": 0}
    ledger.replay([decode(entry("lost", {"memory": {}, "verdict": 3, "recovery": {"marks": marks}}))])
    ledger.observe(A, Sample(energy=5, counting=0), 1000.0)
    assert ledger.verdict(A) is Verdict.FATAL
