"""Reports for people: the open latches of each GPU, their start, the recovery that closes them, and advice."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpu_plugin.config.times import duration, utc
from gpu_plugin.config.words import are, counted
from gpu_plugin.devices import absent
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.hysteresis import Level, Measured, spelled
from gpu_plugin.health.latch import CLEAN_SAMPLES, RESET, AnyLatch, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.proof import RECOVERIES
from gpu_plugin.health.resetting import reset_commands
from gpu_plugin.health.signal import Case
from gpu_plugin.health.signals import SIGNALS, Signal, SignalKind, advice, standing, xid, xid_number
from gpu_plugin.health.signals.orders import released

Explained = Mapping[str, Any]  # An object of JSON


def explain(ledger: HealthLedger, gpus: Iterable[Gpu], now: float) -> Explained:
    """Return `{"gpus": [...]}` at Unix time `now`, in the order of the given GPUs.

    Each GPU has `index`, `uuid`, `health` ("Healthy" or "Unhealthy", of the whole GPU), `verdict` ("OK", "APP", "DEGRADED" or
    "FATAL": the worst, including its MIG devices) and `signals`, the worst first. A signal has `name`, `detail`, `since` (Unix
    seconds, null if unknown), `clears`, `verdict` and `action`, also `device` if it concerns a single MIG device, `xid` with the
    number of its Xid, and `readings`, a list of `Reading`s as objects, if it judges a measure. A GPU with MIG devices also has
    `devices`: `uuid`, `health` and `verdict` of each.
    """
    return {"gpus": [_gpu(ledger, gpu, now) for gpu in gpus]}


def missing(gpu: Gpu) -> Explained:
    """Return an object as in `explain`'s list for a GPU that is not listed: `index` null, `health` "Missing", and the reason."""
    return {
        "index": None,
        "uuid": gpu.uuid,
        "bus_id": short_bus_id(gpu.pci_bus_id),
        "model": gpu.model,
        "health": "Missing",
        "verdict": Verdict.FATAL.name,
        "signals": [
            {
                "name": "missing",
                "detail": gpu.unreadable or "it is not known on this node",
                "since": None,
                "clears": "the driver listing the GPU again",
                "verdict": Verdict.FATAL.name,
                "action": absent.remedy(gpu.uuid),
            }
        ],
    }


def clears(case: Case, *, unfit: Sequence[str] = (), is_released: bool = False) -> str:
    """Return the recovery that closes a latch of a GPU, with the steps that are still missing, as words that end a sentence.

    `unfit` are the signals that call the GPU FATAL by their own readings (`HealthLedger.unfit`): no recovery can be proven
    while they do. `is_released` is whether the GPU is released for maintenance.
    """
    key, latch, policy, gpu = case.key, case.latch, case.policy, case.gpu
    signal = SIGNALS[key.signal]
    if signal.kind is SignalKind.ORDER:
        return _said(signal, case)
    persistent = latch.recovery.marks.counting == 0
    how = reset_commands(gpu, released=is_released, persistent=persistent)
    override = f"gpu-plugin uncordon --gpu {gpu} --override, which overrides it"
    advised = advice(key, policy, gpu, latch, case.facts)
    if latch.proof is Proof.RMA:
        return _condemned(signal, latch, override, advised)
    if signal.kind is SignalKind.GUARD:
        means = _said(signal, case)
    elif latch.proof is Proof.READING:
        means = _read(signal, case, f", as after a reset ({how})" if RESET in advised else "")
    elif latch.proof is Proof.APPLICATION:
        means = _quiet(signal, latch)
    elif latch.proof is Proof.QUIET:
        means = f"{_quiet(signal, latch)}; or {_recovered(signal, latch, how, unfit)}"
    else:
        means = _recovered(signal, latch, how, unfit)
    if latch.overridden:
        return f"{means}; overridden by an operator until then"
    if standing(key, latch, policy) is not Verdict.FATAL or not signal.takes_override(latch):
        return means
    if key.signal == xid.NAME and (lowered := xid.lowered_by(case)):
        means = f"{means}; {lowered}"
    return f"{means}; or {override}"


def _gpu(ledger: HealthLedger, gpu: Gpu, now: float) -> Explained:
    unfit = ledger.unfit(gpu.uuid)
    standing = ledger.standing(gpu.uuid, None)
    if gpu.unreadable is not None:  # the reason below says more than the signal first-look
        standing = [each for each in standing if not SIGNALS[each[0].signal].of_process]
    open_ = sorted(standing, key=lambda each: (-each[2], each[1].since, each[0].signal, each[0].part))
    is_released = any(released(latch) for _, latch, _ in open_)
    signals: list[Explained] = []
    for key, latch, verdict in open_:
        case = Case(key, latch, ledger.policy, gpu.uuid, now, ledger.facts(gpu.uuid))
        readings = latch.memory.readings if isinstance(latch.memory, Measured) else ()
        to_do = advice(key, ledger.policy, gpu.uuid, latch, case.facts)
        signals.append(
            {
                "name": key.signal,
                "detail": (spelled(readings) if readings else latch.detail) or key.signal,
                "since": latch.since or None,
                "clears": clears(case, unfit=unfit, is_released=is_released),
                "verdict": verdict.name,
                "action": f"nothing more: {_missing(latch)} to go" if _seen(latch) else to_do,
                **({"device": key.device} if key.device else {}),
                **({} if (number := xid_number(key)) is None else {"xid": number}),
                **({"readings": [*map(msgspec.structs.asdict, readings)]} if readings else {}),
            }
        )
    worst = max((verdict for _, _, verdict in open_), default=Verdict.OK)
    whole = ledger.verdict(gpu.uuid)
    if gpu.unreadable is not None:
        if not any(v is Verdict.FATAL and not key.device for key, _, v in open_):
            signals.insert(0, _unreadable(gpu.unreadable))  # otherwise an open signal explains it already
        worst = whole = Verdict.FATAL
    explained: dict[str, object] = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "health": _health(whole),
        "verdict": worst.name,
        "signals": signals,
    }
    if gpu.mig_devices:
        of_each = [(mig.uuid, max(whole, ledger.verdict(gpu.uuid, mig.uuid))) for mig in gpu.mig_devices]
        explained["devices"] = [{"uuid": uuid, "health": _health(v), "verdict": v.name} for uuid, v in of_each]
    return explained


def _unreadable(why: str) -> Explained:
    return {
        "name": "unreadable",
        "detail": why,
        "since": None,
        "clears": "the driver describing the GPU again",
        "verdict": Verdict.FATAL.name,
        "action": "look at the kernel's log; reload the driver or reboot the node",
    }


def _health(verdict: Verdict) -> str:
    return "Unhealthy" if verdict is Verdict.FATAL else "Healthy"


def _said(signal: Signal, case: Case) -> str:
    return signal.clears if isinstance(signal.clears, str) else signal.clears(case)


def _read(signal: Signal, case: Case, reset: str) -> str:
    """Return the readings that close a latch, and for how long they have been good."""
    means = (_said(signal, case) or "good readings") + reset
    memory = case.latch.memory
    since = memory.quiet_since if isinstance(memory, Level) else None
    return f"{means} ({duration(case.now - since)} of it so far)" if since is not None else means


def _condemned(signal: Signal, latch: AnyLatch, override: str, advised: str) -> str:
    """Return the recovery of a part that must be replaced."""
    if latch.overridden:
        return f"{counted(CLEAN_SAMPLES, 'good look')} in a row; overridden by an operator until then"
    if latch.recovery.rebound:
        return f"{_to_go(latch)}: it was enumerated again; or {override}"
    if signal.kind is SignalKind.EVENT:
        return f"nothing by itself: {advised}; or {override}"
    reenumerated = "good readings after the GPU was enumerated again (a repaired part)"
    return f"nothing by itself: have the GPU replaced; {reenumerated}, or {override}"


def _quiet(signal: Signal, latch: AnyLatch) -> str:
    end = signal.until(latch) if signal.until is not None else None
    return "a day without another" if end is None else f"at {utc(end)}, unless another comes"


def _recovered(signal: Signal, latch: AnyLatch, how: str, unfit: Sequence[str]) -> str:
    """Return the recovery that `proof.after_recovery` still waits for."""
    names, marks = dict.fromkeys(unfit), latch.recovery.marks
    only = f", counted once {' and '.join(names)} {are(len(names))} over" if names else ""
    if _seen(latch):
        why = "it was found again" if signal.shown else "its reset was seen"
        if marks.energy is None and marks.binding is None:
            why = "the plugin knew no counter of it that a reset changes"
        return f"{_to_go(latch)}{only}: {why}"
    if signal.recovery:
        recovery = signal.recovery.format(reset=how)
    elif latch.proof is Proof.REBOOT:
        reenumerated = "unbind and bind it in /sys/bus/pci/drivers/nvidia while it is released"
        recovery = f"a reboot of the node, or the driver rebound to the GPU ({reenumerated})"
    else:
        recovery = f"a reset of the GPU ({how})"
    shown = signal.shown or ("" if latch.proof is Proof.REBOOT else _shown_by(latch))
    return f"{recovery}, then {counted(CLEAN_SAMPLES, 'good look')} in a row{only}{shown}"


def _shown_by(latch: AnyLatch) -> str:
    """Return the evidence by which the plugin can recognize a reset of this GPU; empty if nothing was read of it."""
    marks = latch.recovery.marks
    if marks.counting:
        return (
            "; without persistence mode the driver's counters restart whenever no process has the GPU open, and prove no "
            "reset: a reboot or a new binding of the driver does, or an override"
        )
    if marks.counting is None:
        return ""
    if marks.energy is None and not marks.ecc:
        return (
            "; this GPU shows no reset in a counter: a reboot or a new binding of the driver proves it, or an override"
        )
    counter = "energy counter" if marks.energy is not None else "count of memory errors"
    return f"; its {counter} shows that if it restarts, else a reboot or a new binding of the driver does"


def _seen(latch: AnyLatch) -> bool:
    """Return True if the recovery was seen, so that only good looks are missing."""
    if latch.proof not in RECOVERIES:
        return False
    return latch.recovery.rebound if latch.proof is Proof.REBOOT else latch.recovery.reset


def _to_go(latch: AnyLatch) -> str:
    return _missing(latch, "more ") + " in a row"


def _missing(latch: AnyLatch, more: str = "") -> str:
    memory = latch.memory
    seen = memory.row if isinstance(memory, Level) else latch.recovery.clean
    return counted(max(1, CLEAN_SAMPLES - seen), f"{more}good look")
