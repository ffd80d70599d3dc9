"""Explanations for people: the open latches of each GPU, their start, the recovery that closes them, and advice."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from gpu_plugin.config.times import duration, utc
from gpu_plugin.config.words import are, counted
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.hysteresis import Level
from gpu_plugin.health.latch import CLEAN_SAMPLES, XID, AnyLatch, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.proof import RECOVERIES
from gpu_plugin.health.signal import KERNEL_LOG, Case
from gpu_plugin.health.signals import SIGNALS, Signal, SignalKind, advice, recovery_action, xid
from gpu_plugin.health.signals.heat import Measured, Reading, spelled
from gpu_plugin.health.signals.orders import ANNOTATED, CORDON, released


class Remedy(StrEnum):
    """The kind of work that ends a fault. `status.remedies` has the steps."""

    NONE = "none"  # It ends by itself, or the advice is all that there is to do
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"
    UNCORDON = "uncordon"
    ANNOTATION = "annotation"
    RESUME = "resume"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """An open signal of a GPU.

    `device` is the MIG device that it concerns, empty for the whole GPU. `since` is Unix time in seconds, None if unknown.
    `recovers` completes the sentence "Recovers when". `note` has sentences about the proof of a recovery. `action` is advice in
    a few words, and `remedy` the kind of work that it is. `persistent` is whether the GPU is in
    persistence mode, in which the driver refuses a reset. `readings` are the measures that the signal judges. `xid` is the number
    of an Xid.
    """

    name: str
    detail: str
    verdict: str
    since: float | None = None
    device: str = ""
    recovers: str = ""
    note: str = ""
    action: str = ""
    remedy: Remedy = Remedy.NONE
    persistent: bool = False
    readings: tuple[Reading, ...] = ()
    xid: int | None = None


class MigHealth(msgspec.Struct, frozen=True):
    """The health of a MIG device for the kubelet, and its verdict, or the GPU's verdict if it is worse."""

    uuid: str
    healthy: bool
    verdict: str


class Explained(msgspec.Struct, frozen=True):
    """The health of a GPU.

    `healthy` is its state for the kubelet, as a whole. `verdict` is the worst verdict, including its MIG devices. `signals` are
    its open signals, the worst first. `devices` are its MIG devices.
    """

    healthy: bool
    verdict: Verdict
    signals: tuple[Explanation, ...] = ()
    devices: tuple[MigHealth, ...] = ()


def explain(ledger: HealthLedger, gpu: Gpu, now: float) -> Explained:
    """Return the health of a GPU at Unix time `now`."""
    unfit = ledger.unfit(gpu.uuid)
    standing = ledger.standing(gpu.uuid, None)
    if gpu.unreadable is not None:  # the reason below says more than the signal first-look
        standing = [each for each in standing if not SIGNALS[each[0].signal].of_process]
    open_ = sorted(standing, key=lambda each: (-each[2], each[1].since, each[0].signal, each[0].part))
    signals = []
    for key, latch, verdict in open_:
        case = Case(key, latch, ledger.policy, gpu.uuid, now, ledger.facts(gpu.uuid))
        readings = latch.memory.readings if isinstance(latch.memory, Measured) else ()
        to_do = advice(key, ledger.policy, gpu.uuid, latch, case.facts)
        signals.append(
            Explanation(
                name=key.signal,
                detail=(spelled(readings) if readings else latch.detail) or key.signal,
                verdict=verdict.name,
                since=latch.since or None,
                device=key.device,
                recovers=recovers(case, unfit=unfit),
                note=note(case),
                action=f"nothing: {counted(_missing(latch), 'more check')} to go" if _seen(latch) else to_do,
                remedy=_remedy(case),
                persistent=latch.recovery.marks.counting == 0,
                readings=tuple(readings),
                xid=key.xid,
            )
        )
    worst = max((verdict for _, _, verdict in open_), default=Verdict.OK)
    whole = ledger.verdict(gpu.uuid)
    if gpu.unreadable is not None:
        if not any(v is Verdict.FATAL and not key.device for key, _, v in open_):
            signals.insert(0, _unreadable(gpu.unreadable))  # otherwise an open signal explains it already
        worst = whole = Verdict.FATAL
    of_each = [(mig.uuid, max(whole, ledger.verdict(gpu.uuid, mig.uuid))) for mig in gpu.mig_devices]
    devices = tuple(MigHealth(uuid, v is not Verdict.FATAL, v.name) for uuid, v in of_each)
    return Explained(whole is not Verdict.FATAL, worst, tuple(signals), devices)


# The work that ends a fault of a signal, if the proof of its latch names none. The signal's advice has the same in words.
_BY_SIGNAL: Mapping[str, Remedy] = {
    "hung": Remedy.REBOOT,
    "lost": Remedy.REBOOT,
    "reset-required": Remedy.RESET,
    "retired-pages": Remedy.RESET,
    "nvlink": Remedy.RESET,
    "application-errors": Remedy.RESET,
    "driver-event": Remedy.RESET,
    "pcie-errors": Remedy.RESET,
}
_BY_REQUEST: Mapping[int, Remedy] = {
    RecoveryAction.GPU_RESET: Remedy.RESET,
    RecoveryAction.DRAIN_AND_RESET: Remedy.RESET,
    RecoveryAction.NODE_REBOOT: Remedy.REBOOT,
}


def _remedy(case: Case) -> Remedy:
    """Return the kind of work that closes a latch; NONE once the recovery was seen."""
    signal, latch = case.key.signal, case.latch
    if signal in (CORDON, ANNOTATED):
        return Remedy.UNCORDON if signal == CORDON else Remedy.ANNOTATION
    if released(latch):
        return Remedy.RESUME
    if _seen(latch) or latch.verdict <= Verdict.APP:
        return Remedy.NONE
    if latch.proof is Proof.RMA:
        return Remedy.REPLACE
    if latch.proof is Proof.REBOOT:
        return Remedy.REBOOT
    advised = _advised(case)
    return Remedy.RESET if latch.proof is Proof.RESET and advised is Remedy.NONE else advised


def _advised(case: Case) -> Remedy:
    """Return the kind of work that the signal itself advises for a latch."""
    signal, latch = case.key.signal, case.latch
    if signal == recovery_action.NAME:
        return _BY_REQUEST.get(latch.memory.action, Remedy.NONE)
    if signal == XID:
        judged = case.policy.xids.judge(int(case.key.part))
        repeated = judged.count > 1 and latch.verdict > judged.verdict and latch.proof is Proof.QUIET
        return Remedy.RESET if repeated else Remedy.NONE
    return _BY_SIGNAL.get(signal, Remedy.NONE)


def recovers(case: Case, *, unfit: Sequence[str] = ()) -> str:
    """Return the condition under which a latch closes, with the missing checks or time, for "Recovers when".

    `unfit` are the signals that call the GPU FATAL by their own readings (`HealthLedger.unfit`): no recovery can be proven
    while they do.
    """
    latch, signal = case.latch, SIGNALS[case.key.signal]
    if signal.kind is SignalKind.ORDER:
        return _said(signal, case)
    if latch.proof is Proof.RMA:
        means = _condemned(signal, latch)
    elif signal.kind is SignalKind.GUARD:
        means = _said(signal, case)
    elif latch.proof is Proof.READING:
        means = _read(signal, case)
    elif latch.proof is Proof.APPLICATION:
        means = _quiet(signal, latch)
    elif latch.proof is Proof.QUIET:
        means = f"{_quiet(signal, latch)}, or {_recovered(signal, latch, unfit)}"
    else:
        means = _recovered(signal, latch, unfit)
    return f"{means}; an operator has overridden it until then" if latch.overridden else means


def note(case: Case) -> str:
    """Return sentences about the proof of the recovery, and about other changes of the verdict; empty if there are none."""
    latch, signal = case.latch, SIGNALS[case.key.signal]
    found = []
    if case.key.xid is not None and (lowered := xid.lowered_by(case)):
        found.append(lowered)
    if latch.proof in (Proof.RESET, Proof.QUIET) and not _seen(latch):
        found.append(signal.shown or _shown_by(latch))
    return " ".join(filter(None, found))


def _unreadable(why: str) -> Explanation:
    return Explanation(
        name="unreadable",
        detail=why,
        verdict=Verdict.FATAL.name,
        recovers="the driver describes the GPU again",
        action=KERNEL_LOG,
    )


def _said(signal: Signal, case: Case) -> str:
    return signal.clears if isinstance(signal.clears, str) else signal.clears(case)


def _read(signal: Signal, case: Case) -> str:
    """Return the readings that close a latch, and for how long they have been good."""
    means = _said(signal, case) or "its readings are good"
    memory = case.latch.memory
    since = memory.quiet_since if isinstance(memory, Level) else None
    return f"{means} ({duration(case.now - since)} of it so far)" if since is not None else means


def _condemned(signal: Signal, latch: AnyLatch) -> str:
    """Return the recovery of a part that must be replaced."""
    if latch.overridden or latch.recovery.rebound:
        return _to_go(latch)
    if signal.kind is SignalKind.EVENT:
        return "it is repaired: nothing ends this by itself"
    return "it is replaced or repaired and enumerated again, and its readings are good"


def _quiet(signal: Signal, latch: AnyLatch) -> str:
    end = signal.until(latch) if signal.until is not None else None
    return f"no further error comes {'for a day' if end is None else f'until {utc(end)}'}"


def _recovered(signal: Signal, latch: AnyLatch, unfit: Sequence[str]) -> str:
    """Return the recovery that `proof.after_recovery` still waits for."""
    names = dict.fromkeys(unfit)
    only = f" after {' and '.join(names)} {are(len(names))} over" if names else ""
    if _seen(latch):
        return f"{_to_go(latch)}{only}"
    if latch.proof is Proof.REBOOT:
        recovery = "the node was rebooted or the driver bound to the GPU again"
    else:
        recovery = signal.recovery or "the GPU was reset"
    return f"{recovery}, and {counted(CLEAN_SAMPLES, 'check')} in a row succeed{only}"


def _shown_by(latch: AnyLatch) -> str:
    """Return the evidence by which the plugin can recognize a reset of this GPU; empty if nothing was read of it."""
    marks = latch.recovery.marks
    if marks.counting:
        return (
            "Without persistence mode, the driver's counters restart whenever no process has the GPU open, so they do not prove "
            "a reset. A reboot or a new binding of the driver does."
        )
    if marks.counting is None:
        return ""
    if marks.energy is None and not marks.ecc:
        return "No counter of this GPU shows a reset. A reboot or a new binding of the driver does."
    counter = "energy counter" if marks.energy is not None else "count of memory errors"
    return f"A reset shows if its {counter} restarts. If not, a reboot or a new binding of the driver shows."


def _seen(latch: AnyLatch) -> bool:
    """Return True if the recovery was seen, so that only good looks are missing."""
    if latch.proof not in RECOVERIES:
        return False
    return latch.recovery.rebound if latch.proof is Proof.REBOOT else latch.recovery.reset


def _to_go(latch: AnyLatch) -> str:
    count = _missing(latch)
    return f"{counted(count, 'more check')} in a row succeed{'s' if count == 1 else ''}"


def _missing(latch: AnyLatch) -> int:
    memory = latch.memory
    seen = memory.row if isinstance(memory, Level) else latch.recovery.clean
    return max(1, CLEAN_SAMPLES - seen)
