"""Evidence as version 0.1.0 wrote it: one flat record for every signal, whose fields meant what each signal made of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import NOTHING, Memory, Proof, Verdict
from gpu_plugin.health.signals import application_errors, flapping, heat, margin, nvlink, orders, recovery_action, xid
from gpu_plugin.health.signals.unanswered import Answers
from gpu_plugin.health.totals import Counted

FORMER = frozenset({"asked", "value", "times", "pods"})
"""Fields of such an entry that no other has; it had all of them."""


class FormerEvidence(Evidence, frozen=True, kw_only=True):
    """An entry of its health.json. `value`, `times` and `pods` were the signal's own; `times` are Unix seconds."""

    asked: bool = False
    value: float | None = None
    times: tuple[float, ...] = ()
    pods: tuple[tuple[float, str], ...] = ()

    def evidence(self) -> Evidence:
        """The entry as it is written now. What was FATAL by errors of applications is DEGRADED now, and ends with them.

        A reset that a mere step back of a counter showed is not believed; a new binding is, and where nothing was known of a
        lost GPU that a reset would change.
        """
        remembered = _REMEMBERED.get(self.signal)
        memory = NOTHING if remembered is None else remembered(self)
        errors = self.signal == application_errors.NAME and self.verdict == Verdict.FATAL.name
        changed = {
            "verdict": Verdict.DEGRADED.name if errors else self.verdict,
            "proof": Proof.APPLICATION.value if errors else self.proof,
            "reset": self.rebound
            or (self.reset and self.signal == "lost" and self.energy is None and self.binding is None),
            "memory": msgspec.json.decode(msgspec.json.encode(memory)),
        }
        return Evidence(**{name: getattr(self, name) for name in Evidence.__struct_fields__} | changed)


def without_imex(found: Iterable[tuple[Evidence, bool]]) -> list[Evidence]:
    """The entries, each told with whether 0.1.0 wrote it, less what that version made of an IMEX domain to be recovered.

    To it that was a recovery that the driver asked for, by which any other Xid was FATAL for good. What it asked for then is
    believed where the GPU is still unfit by it.
    """
    entries = list(found)
    asking = {e.uuid for e, _ in entries if e.signal == recovery_action.NAME and e.verdict == Verdict.FATAL.name}
    return [
        msgspec.structs.replace(entry, memory=entry.memory | {"asked": False})
        if former and entry.signal == xid.NAME and entry.uuid not in asking
        else entry
        for entry, former in entries
    ]


def _happened(was: FormerEvidence) -> Memory:
    weighed = {1.0: xid.Adjustment.RAISED, -1.0: xid.Adjustment.LOWERED}
    return xid.Occurrences(was.times, weighed=weighed.get(was.value or 0.0, xid.Adjustment.AS_IT_IS), asked=was.asked)


def _errors(was: FormerEvidence) -> Memory:
    owned = tuple(
        (at, tuple(sorted({application_errors.owner(pod) for pod in pods.split(",")}))) for at, pods in was.pods
    )
    return application_errors.Errors(owned, was.times, wedged=was.verdict == Verdict.FATAL.name)


_REMEMBERED: Mapping[str, Callable[[FormerEvidence], Any]] = {
    "xid": _happened,
    application_errors.NAME: _errors,
    flapping.NAME: lambda was: flapping.HealthDrops(was.times, was.value or 0.0),
    orders.MAINTENANCE: lambda was: orders.Release(resumed=bool(was.value)),
    "margin": lambda _: margin.MarginMemory(),
    "nvlink": lambda was: nvlink.Links(int(was.value or 0)),
    "recovery-action": lambda was: recovery_action.RequestedAction(action=int(was.value or 0)),
    "slowdown-temperature": lambda was: heat.HeatMemory(sensors=int(was.value or 0)),
    "unanswered": lambda was: Answers(int(was.value or 0), was.times),
    "nvlink-errors": lambda was: Counted(times=was.times),
    "pcie-errors": lambda was: Counted(times=was.times),
}
"""Makes of an entry the memory of its signal; the signals that are not here remembered nothing."""
