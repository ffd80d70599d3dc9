"""Why each GPU is in the state it is in, since when, what would clear it, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.signals.driver_events import QUIET_SECONDS
from gpu_plugin.health.signals.flapping import until
from gpu_plugin.health.signals.xid import APPLICATION_QUIET, QUIET
from gpu_plugin.health.words import advice

Explained = Mapping[str, Any]
"""An object of JSON."""


def explain(ledger: HealthLedger, gpus: Iterable[Gpu], now: float) -> Explained:
    """`{"gpus": [...]}` for people and programs, at Unix time `now`, in the order of the GPUs given.

    Each has `index`, `uuid`, `health` ("Healthy" or "Unhealthy", of the whole GPU), `verdict` ("OK", "APP", "DEGRADED" or
    "FATAL": the worst, its MIG devices' included) and `signals`, the worst first: `name`, `detail`, `since` (Unix seconds,
    null where nobody knows), `clears`, `verdict`, `action`, and `device` where one MIG device alone is meant. A GPU with MIG
    devices also has `devices`: `uuid`, `health` and `verdict` of each.
    """
    return {"gpus": [_gpu(ledger, gpu, now) for gpu in gpus]}


def clears(
    key: LatchKey,
    latch: Latch,
    *,
    gpu: str | int,
    now: float,
    policy: HealthPolicy,
    facts: Facts,
    unfit: Sequence[str] = (),
) -> str:
    """What would clear a latch of a GPU, exact about what is still missing, as words that can end a sentence.

    `gpu` is the index or uuid that commands name it by; `unfit` are the signals that call it FATAL by their own readings, of
    which no proof of a recovery can be gathered meanwhile (`HealthLedger.unfit`).
    """
    if key.signal == "cordon":
        return f"gpu-plugin uncordon --gpu {gpu}"
    if key.signal == "maintenance":
        return "the first look at it without a fault" if latch.value else f"gpu-plugin resume --gpu {gpu}"
    if key.signal == "flapping":
        means = _held(latch, now, policy)
    elif latch.proof is Proof.READING:
        means = _read(key, latch, now, policy, facts)
    elif latch.proof is Proof.APPLICATION:
        means = f"time without another, until {_clock(_last(latch) + APPLICATION_QUIET)} if none comes"
    elif latch.proof is Proof.QUIET:
        means = f"{_quiet(key, latch)}, or {_recovered(latch, gpu, unfit)}"
    elif latch.proof is Proof.RMA:
        means = f"nothing by itself: {advice(key, policy.xids, gpu)}"
    else:
        means = _recovered(latch, gpu, unfit)
    if latch.overridden:
        return f"{means}; an operator vouches for it meanwhile"
    essential = SIGNALS[key.signal].essential
    if essential or policy.standing(key.signal, latch, essential=essential) is not Verdict.FATAL:
        return means
    return f"{means}; or gpu-plugin uncordon --gpu {gpu}, by which you vouch for it"


def _gpu(ledger: HealthLedger, gpu: Gpu, now: float) -> Explained:
    unfit, facts = ledger.unfit(gpu.uuid), ledger.facts(gpu.uuid)
    standing = sorted(
        ledger.standing(gpu.uuid, None), key=lambda one: (-one[2], one[1].since, one[0].signal, one[0].part)
    )
    signals: list[Explained] = []
    for key, latch, verdict in standing:
        words = clears(key, latch, gpu=gpu.index, now=now, policy=ledger.policy, facts=facts, unfit=unfit)
        signals.append(
            {
                "name": key.signal,
                "detail": latch.detail or key.signal,
                "since": latch.since,
                "clears": words,
                "verdict": verdict.name,
                "action": advice(key, ledger.policy.xids, gpu.index),
                **({"device": key.device} if key.device else {}),
            }
        )
    if gpu.unreadable is not None:
        signals.append(_unreadable(gpu.unreadable))
    worst = max((verdict for _, _, verdict in standing), default=Verdict.OK)
    whole = ledger.verdict(gpu.uuid)
    if gpu.unreadable is not None:
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


def _read(key: LatchKey, latch: Latch, now: float, policy: HealthPolicy, facts: Facts) -> str:
    """What must be read, and for how long it was."""
    said = SIGNALS[key.signal].clears
    means = (said if isinstance(said, str) else said(facts, policy)) or "good readings"
    return (
        f"{means} (it was so for {_spelt(now - latch.quiet_since)} by now)" if latch.quiet_since is not None else means
    )


def _held(latch: Latch, now: float, policy: HealthPolicy) -> str:
    if now >= until(latch) or not policy.flap_hold:
        return "the next look without a fault"
    return f"time: it is held back until {_clock(until(latch))}, {_spelt(until(latch) - now)} from now"


def _quiet(key: LatchKey, latch: Latch) -> str:
    if key.signal == "xid":
        return f"a day without another, until {_clock(_last(latch) + QUIET)} if none comes"
    if latch.quiet_since is None:
        return "a day without another"
    return f"a day without another, until {_clock(latch.quiet_since + QUIET_SECONDS)} if none comes"


def _recovered(latch: Latch, gpu: str | int, unfit: Sequence[str]) -> str:
    """What `proof.after_recovery` still waits for."""
    looks = "looks in a row without a fault and without the driver asking for a recovery"
    only = f", none of them while {' or '.join(dict.fromkeys(unfit))} holds" if unfit else ""
    if latch.proof is Proof.REBOOT and not latch.rebound:
        return f"a boot of the node (or the driver bound to the GPU anew), then {CLEAN_SAMPLES} {looks}{only}"
    if latch.reset:
        missing = max(1, CLEAN_SAMPLES - latch.streak)
        return f"{missing} more {looks}{only}: its reset was seen"
    how = f"gpu-plugin release --gpu {gpu}, nvidia-smi --gpu-reset -i {gpu}, gpu-plugin resume --gpu {gpu}"
    return f"a reset of the GPU ({how}), then {CLEAN_SAMPLES} {looks}{only}"


def _last(latch: Latch) -> float:
    return max((*latch.times[-1:], *(at for at, _ in latch.pods[-1:])), default=latch.since)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _spelt(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
