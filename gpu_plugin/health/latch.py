"""Verdicts, and the latch that holds one open from its evidence until there is proof of recovery."""

from dataclasses import dataclass
from enum import IntEnum

CLEAN_SAMPLES = 3
"""Samples in a row without a fault before a reset GPU is believed."""


class Verdict(IntEnum):
    """What a signal means, the worse the greater."""

    OK = 0
    APP = 1
    """An application's own error: counted, nothing else."""
    DEGRADED = 2
    """Worth an operator's look; still handed out."""
    FATAL = 3
    """Not fit for use: Unhealthy to the kubelet."""


@dataclass(frozen=True, slots=True)
class Latch:
    """One signal's memory of one GPU.

    `verdict` is OK while evidence is still being gathered. `since` is Unix time in seconds. `streak` counts samples in a row
    for whatever the signal is waiting for; `quiet_since` is when its exit condition began to hold. `energy` is the
    driver's counter as last seen; `reset` whether it was seen to go backwards since the evidence: the GPU was reset.
    """

    verdict: Verdict = Verdict.OK
    detail: str = ""
    since: float = 0.0
    streak: int = 0
    quiet_since: float | None = None
    energy: int | None = None
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """One GPU's own limits, °C, and the operator's wishes, seconds. None: the part does not say, so the signal is silent."""

    shutdown: int | None = None
    slowdown: int | None = None
    temperature_recovery: float = 300.0
    watch_temperature: bool = True
