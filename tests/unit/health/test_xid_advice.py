"""For every Xid of the table and each verdict, the advice agrees with the recovery that closes it."""

import pytest

from gpu_plugin.health.explain import recovers
from gpu_plugin.health.latch import Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.observation import Facts
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import Case
from gpu_plugin.health.signals import SIGNALS, xid
from gpu_plugin.health.xid_table import XID_TABLE
from tests.unit.health.shipped import SHIPPED, shipped

APP, DEGRADED, FATAL = Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
BEYOND = 998
NUMBERS = (*XID_TABLE, BEYOND)
WORDS = {"app": APP, "degraded": DEGRADED, "fatal": FATAL}


def possible(policy: HealthPolicy, number: int) -> set[Verdict]:
    """Return the verdicts of an Xid: its own, and those after repetitions, other Xids or requests of the driver."""
    judged = policy.xids.judge(number)
    found = {judged.verdict, judged.raised, *((judged.beside[1],) if judged.beside else ())}
    if not judged.firm:
        found |= {judged.silent}
        found |= {FATAL} if DEGRADED in found and judged.resets else set()
        found |= {DEGRADED} if FATAL in found and judged.linked is not None else set()
    return found - {Verdict.OK}


def advice(policy: HealthPolicy, number: int, verdict: Verdict) -> tuple[Proof, str, str]:
    """Return the proof that closes an Xid of this verdict, the words for it, and the advice."""
    proof = policy.xids.judge(number).proof(verdict)
    key, latch = LatchKey("xid", str(number)), Latch(SIGNALS["xid"].memory, verdict, "words", 1.0, proof)
    return (
        proof,
        recovers(Case(key, latch, policy, "GPU", 2.0, Facts())),
        xid.advice(Case(key, latch, policy)),
    )


def agrees(proof: Proof, cleared: str, advised: str, verdict: Verdict) -> bool:
    asks_nothing = advised.startswith("nothing need be done")
    asks_more = "reset" in advised or "reboot" in advised
    match proof:
        case Proof.RESET:
            return cleared.startswith("the GPU was reset") and asks_more and not asks_nothing
        case Proof.REBOOT:
            return (
                cleared.startswith("the node was rebooted") and "reboot" in advised and "reset the GPU" not in advised
            )
        case Proof.RMA:
            return cleared.startswith("it is repaired") and "vendor" in advised
        case Proof.QUIET:  # a reset ends it as well
            return "no further error" in cleared and "or the GPU was reset" in cleared and bool(advised)
        case _:
            return "no further error" in cleared and not asks_more and verdict is APP


@pytest.mark.parametrize("said", [None, *WORDS])
def test_the_advice_is_the_recovery(said):
    policy = SHIPPED if said is None else shipped(health={"xid": {str(number): said for number in NUMBERS}})
    wrong = [
        (number, verdict.name, proof.value, cleared, advised)
        for number in NUMBERS
        for verdict in possible(policy, number)
        for proof, cleared, advised in [advice(policy, number, verdict)]
        if not agrees(proof, cleared, advised, verdict)
    ]
    assert wrong == []
    if said is not None:
        assert all(possible(policy, number) == {WORDS[said]} for number in NUMBERS if number != 79)


@pytest.mark.parametrize(
    ("number", "verdict", "named"),
    [
        (63, DEGRADED, ["nothing at once", "reset the GPU"]),
        (63, FATAL, ["reset the GPU"]),
        (61, FATAL, ["reset the GPU", "inspected by its vendor"]),
        (74, FATAL, ["nvidia-smi nvlink --status -i {gpu}", "reset all GPUs"]),
        (92, DEGRADED, ["nothing need be done"]),
        (94, DEGRADED, ["reset the GPU"]),
        (138, APP, ["inspected by its vendor"]),
        (142, DEGRADED, ["inspected by its vendor"]),
        (164, DEGRADED, ["kernel's log", "catalogue"]),
        (167, FATAL, ["drain the node and reboot it", "serviced"]),
        (BEYOND, DEGRADED, ["kernel's log", "catalogue", "reset the GPU"]),
    ],
)
def test_the_advice_names_the_remedy(number, verdict, named):
    advised = advice(SHIPPED, number, verdict)[2]
    assert [words for words in named if words not in advised] == []
    assert ("reset the GPU" in advised) is ("reset the GPU" in named)
