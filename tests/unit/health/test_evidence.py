from dataclasses import fields, replace

import msgspec
import pytest

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Latch, LatchKey, Marks, Proof, Verdict
from tests.unit.health.ledgers import A

KEY = LatchKey("xid", "48", "MIG-1")
LATCH = Latch(
    Verdict.FATAL,
    "words",
    12.5,
    Proof.REBOOT,
    times=(1.0, 2.0),
    value=3.0,
    marks=Marks(5, 6, 7),
    reset=True,
    rebound=True,
    asked=True,
    overridden=True,
    pods=((1.0, "default/a"),),
)
REMEASURED = {"streak", "quiet_since", "readings"}


def test_a_latch_is_remembered_whole_but_for_what_is_measured_anew():
    entry = Evidence.of("boot-1", A, KEY, replace(LATCH, streak=2, quiet_since=9.0))
    assert (entry.boot_id, entry.uuid, entry.key) == ("boot-1", A, KEY)
    assert entry.latch() == LATCH


def test_no_field_of_a_latch_is_forgotten_unnoticed():
    plain = Latch()
    for field in fields(Latch):
        if field.name not in REMEASURED:
            assert getattr(LATCH, field.name) != getattr(plain, field.name), f"{field.name} is not in this test"
            assert getattr(Evidence.of("", A, KEY, LATCH).latch(), field.name) == getattr(LATCH, field.name)


def test_what_is_written_as_json_is_read_again():
    entry = Evidence.of("boot-1", A, KEY, replace(LATCH, marks=Marks(2**62, 0, 2**63 - 1)))
    assert msgspec.json.decode(msgspec.json.encode(entry), type=Evidence) == entry


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("proof", Proof)
def test_every_verdict_and_proof_is_remembered(verdict, proof):
    latch = Latch(verdict, "words", 1.0, proof)
    assert Evidence.of("", A, KEY, latch).latch() == latch


def test_words_of_another_version_are_taken_for_the_worst():
    latch = Evidence("", A, "xid", "DOOMED", "words", 1.0, "exorcism").latch()
    assert (latch.verdict, latch.proof) == (Verdict.FATAL, Proof.RESET)
