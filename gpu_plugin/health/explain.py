"""Why each GPU is in the state it is in, since when, what would clear it, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.proof import RECOVERIES
from gpu_plugin.health.signals import OPERATORS, SIGNALS
from gpu_plugin.health.signals.driver_events import QUIET_SECONDS
from gpu_plugin.health.signals.flapping import until
from gpu_plugin.health.signals.orders import RELEASED, RESUMED
from gpu_plugin.health.signals.xid import APPLICATION_QUIET, QUIET
from gpu_plugin.health.words import advice
from gpu_plugin.health.xids import RESET

Explained = Mapping[str, Any]
"""An object of JSON."""

NO_ORDERS: Mapping[str, Latch] = MappingProxyType({})
"""Of a GPU that its operator leaves alone."""


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
    gpu: str,
    now: float,
    policy: HealthPolicy,
    facts: Facts,
    unfit: Sequence[str] = (),
    orders: Mapping[str, Latch] = NO_ORDERS,
) -> str:
    """What would clear a latch of a GPU, exact about what is still missing, as words that can end a sentence.

    `gpu` is the uuid that commands name it by: indices shift when another one is gone. `unfit` are the signals that call it
    FATAL by their own readings, of which no proof of a recovery can be gathered meanwhile (`HealthLedger.unfit`). `orders`
    are the operator's that stand, by signal.
    """
    if key.signal == "cordon":
        return f"gpu-plugin uncordon --gpu {gpu}"
    if key.signal == "maintenance":
        return "the first good look at it" if latch.value else f"gpu-plugin resume --gpu {gpu}"
    how = _reset_of(gpu, released=_released(orders))
    vouch = f"gpu-plugin uncordon --gpu {gpu}{' --override' if 'cordon' in orders else ''}, by which you vouch for it"
    if latch.proof is Proof.RMA:
        return _condemned(key, latch, vouch, advice(key, policy.xids, gpu, latch))
    if key.signal == "flapping":
        means = _held(latch, now, policy)
    elif latch.proof is Proof.READING:
        resets = RESET in advice(key, policy.xids, gpu, latch)
        means = _read(key, latch, now, policy, facts, f", as after a reset ({how})" if resets else "")
    elif latch.proof is Proof.APPLICATION:
        means = _unless_another(_last(latch) + APPLICATION_QUIET)
    elif latch.proof is Proof.QUIET:
        means = f"{_quiet(key, latch)}; or {_recovered(key, latch, how, unfit)}"
    else:
        means = _recovered(key, latch, how, unfit)
    if latch.overridden:
        return f"{means}; an operator vouches for it meanwhile"
    essential = SIGNALS[key.signal].essential
    if essential or policy.standing(key.signal, latch, essential=essential) is not Verdict.FATAL:
        return means
    return f"{means}; or {vouch}"


def _gpu(ledger: HealthLedger, gpu: Gpu, now: float) -> Explained:
    unfit, facts = ledger.unfit(gpu.uuid), ledger.facts(gpu.uuid)
    standing = sorted(
        ledger.standing(gpu.uuid, None), key=lambda one: (-one[2], one[1].since, one[0].signal, one[0].part)
    )
    orders = {key.signal: latch for key, latch, _ in standing if key.signal in OPERATORS}
    signals: list[Explained] = []
    for key, latch, verdict in standing:
        words = clears(key, latch, gpu=gpu.uuid, now=now, policy=ledger.policy, facts=facts, unfit=unfit, orders=orders)
        signals.append(
            {
                "name": key.signal,
                "detail": latch.detail or key.signal,
                "since": latch.since,
                "clears": words,
                "verdict": verdict.name,
                "action": _nothing_more(key, latch) or advice(key, ledger.policy.xids, gpu.uuid, latch),
                **({"device": key.device} if key.device else {}),
            }
        )
    worst = max((verdict for _, _, verdict in standing), default=Verdict.OK)
    whole = ledger.verdict(gpu.uuid)
    if gpu.unreadable is not None:
        if whole is not Verdict.FATAL:  # what is says why it is not read, or is why
            signals.insert(0, _unreadable(gpu.unreadable))
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
    resumed = why == RELEASED  # the operator's word is over, what the driver said meanwhile is not yet
    return {
        "name": "unreadable",
        "detail": RESUMED if resumed else why,
        "since": None,
        "clears": "the first good look at it" if resumed else "the driver describing the GPU again",
        "verdict": Verdict.FATAL.name,
        "action": "" if resumed else "look at the kernel's log; reload the driver or reboot the node",
    }


def _health(verdict: Verdict) -> str:
    return "Unhealthy" if verdict is Verdict.FATAL else "Healthy"


def _read(key: LatchKey, latch: Latch, now: float, policy: HealthPolicy, facts: Facts, reset: str) -> str:
    """What must be read, and for how long it was."""
    said = SIGNALS[key.signal].clears
    means = ((said if isinstance(said, str) else said(facts, policy)) or "good readings") + reset
    return f"{means} ({_spelt(now - latch.quiet_since)} of it so far)" if latch.quiet_since is not None else means


def _held(latch: Latch, now: float, policy: HealthPolicy) -> str:
    if now >= until(latch) or not policy.flap_hold:
        return "the next good look at it"
    return f"time: it is held back until {_clock(until(latch))}, {_spelt(until(latch) - now)} from now"


def _condemned(key: LatchKey, latch: Latch, vouch: str, advised: str) -> str:
    """What ends the latch of a part that is to be replaced."""
    if latch.overridden:
        return f"{_looks(CLEAN_SAMPLES)} in a row; an operator vouches for it meanwhile"
    if latch.rebound:
        return f"{_to_go(latch)}: it was enumerated anew; or {vouch}"
    if SIGNALS[key.signal].event:
        return f"nothing by itself: {advised}; or {vouch}"
    anew = "what is read good after the GPU was enumerated anew (a repaired part)"
    return f"nothing by itself: have the GPU replaced; {anew}, or {vouch}"


def _quiet(key: LatchKey, latch: Latch) -> str:
    if key.signal == "xid":
        return _unless_another(_last(latch) + QUIET)
    return "a day without another" if latch.quiet_since is None else _unless_another(latch.quiet_since + QUIET_SECONDS)


def _recovered(key: LatchKey, latch: Latch, how: str, unfit: Sequence[str]) -> str:
    """What `proof.after_recovery` still waits for."""
    only = f", counted once {' and '.join(dict.fromkeys(unfit))} {_are(unfit)} over" if unfit else ""
    if _seen(key, latch):
        return f"{_to_go(latch)}{only}: its reset was seen"
    if latch.proof is Proof.REBOOT or key.signal == "lost":
        anew = "unbind and bind it in /sys/bus/pci/drivers/nvidia while it is released"
        recovery = f"a reboot of the node, or the driver bound to the GPU anew ({anew})"
    else:
        recovery = f"a reset of the GPU ({how})"
    return f"{recovery}, then {_looks(CLEAN_SAMPLES)} in a row{only}"


def _seen(key: LatchKey, latch: Latch) -> bool:
    """Whether the recovery that a latch waits for was seen, and good looks alone are missing."""
    if latch.proof not in RECOVERIES:
        return False
    if key.signal == "lost":  # one whose marks are unknown proves its recovery by answering
        return latch.rebound or (latch.reset and latch.streak > 0)
    return latch.rebound if latch.proof is Proof.REBOOT else latch.reset


def _nothing_more(key: LatchKey, latch: Latch) -> str:
    """The advice where the recovery was seen already; empty where it was not."""
    return f"nothing more: {_missing(latch)} to go" if _seen(key, latch) else ""


def _to_go(latch: Latch) -> str:
    return _missing(latch).replace(" good", " more good") + " in a row"


def _missing(latch: Latch) -> str:
    return _looks(max(1, CLEAN_SAMPLES - latch.streak))


def _looks(count: int) -> str:
    return f"{count} good look{'' if count == 1 else 's'}"


def _are(names: Sequence[str]) -> str:
    return "is" if len(set(names)) == 1 else "are"


def _released(orders: Mapping[str, Latch]) -> bool:
    return "maintenance" in orders and not orders["maintenance"].value


def _reset_of(gpu: str, *, released: bool) -> str:
    """The commands of a reset, for a shell; of a GPU that is released already without that step."""
    commands = [f"nvidia-smi --gpu-reset -i {gpu}", f"gpu-plugin resume --gpu {gpu}"]
    return " && ".join(commands if released else [f"gpu-plugin release --gpu {gpu}", *commands])


def _unless_another(at: float) -> str:
    return f"at {_clock(at)}, unless another comes"


def _last(latch: Latch) -> float:
    return max((*latch.times[-1:], *(at for at, _ in latch.pods[-1:])), default=latch.since)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _spelt(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
