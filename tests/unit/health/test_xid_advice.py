"""For every Xid of the table, whatever it comes to: what is advised is what would clear it, and no more."""

import pytest

from gpu_plugin.health.explain import clears
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


def comes_to(policy: HealthPolicy, number: int) -> set[Verdict]:
    """Every verdict that an Xid may have: by itself, by others or its repetition, by what the driver asks for or does not."""
    judged = policy.xids.judge(number)
    found = {judged.verdict, judged.raised, *((judged.beside[1],) if judged.beside else ())}
    if not judged.firm:
        found |= {judged.silent}
        found |= {FATAL} if DEGRADED in found and judged.resets else set()
        found |= {DEGRADED} if FATAL in found and judged.linked is not None else set()
    return found - {Verdict.OK}


def advice(policy: HealthPolicy, number: int, verdict: Verdict) -> tuple[Proof, str, str]:
    """What ends an Xid of this verdict, what is said to clear it, and what is advised."""
    proof = policy.xids.judge(number).proof(verdict)
    key, latch = LatchKey("xid", str(number)), Latch(SIGNALS["xid"].memory, verdict, "words", 1.0, proof)
    return (
        proof,
        clears(Case(key, latch, policy, "GPU", 2.0, Facts())),
        xid.advice(Case(key, latch, policy)),
    )


def agrees(proof: Proof, cleared: str, advised: str, verdict: Verdict) -> bool:
    asks_nothing = advised.startswith("nothing need be done")
    asks_more = "reset" in advised or "reboot" in advised
    match proof:
        case Proof.RESET:
            return cleared.startswith("a reset of the GPU") and asks_more and not asks_nothing
        case Proof.REBOOT:
            return cleared.startswith("a reboot of the node") and "reboot" in advised and "reset the GPU" not in advised
        case Proof.RMA:
            return advised in cleared and "vendor" in advised
        case Proof.QUIET:  # a reset ends it as well
            return "unless another comes; or a reset" in cleared and bool(advised)
        case _:
            return "unless another comes" in cleared and not asks_more and verdict is APP


@pytest.mark.parametrize("said", [None, *WORDS])
def test_what_is_advised_is_what_clears_it(said):
    """Also where the operator says what each of them means."""
    policy = SHIPPED if said is None else shipped(health={"xid": {str(number): said for number in NUMBERS}})
    wrong = [
        (number, verdict.name, proof.value, cleared, advised)
        for number in NUMBERS
        for verdict in comes_to(policy, number)
        for proof, cleared, advised in [advice(policy, number, verdict)]
        if not agrees(proof, cleared, advised, verdict)
    ]
    assert wrong == []
    if said is not None:
        assert all(comes_to(policy, number) == {WORDS[said]} for number in NUMBERS if number != 79)


@pytest.mark.parametrize(
    ("number", "verdict", "advised"),
    [
        (63, DEGRADED, "nothing at once, since work continues; reset the GPU when no pod has it, which ends it"),
        (63, FATAL, "reset the GPU when no pod has it"),
        (61, FATAL, "reset the GPU when no pod has it; if it comes again, have the GPU inspected by its vendor"),
        (74, FATAL, "look at its NVLinks (nvidia-smi nvlink --status -i {gpu}), reset all GPUs that they join"),
        (92, DEGRADED, "nothing need be done"),
        (94, DEGRADED, "reset the GPU when no pod has it"),
        (138, APP, "if it comes again, have the GPU inspected by its vendor"),
        (142, DEGRADED, "have the GPU inspected by its vendor"),
        (164, DEGRADED, "look at the kernel's log and at NVIDIA's catalogue of Xid errors"),
        (
            167,
            FATAL,
            "drain the node and reboot it; if the GPU does not come back, have it serviced",
        ),
        (
            BEYOND,
            DEGRADED,
            "look at the kernel's log and at NVIDIA's catalogue of Xid errors; reset the GPU when no pod has it",
        ),
    ],
)
def test_the_words_of_some(number, verdict, advised):
    assert advice(SHIPPED, number, verdict)[2] == advised
