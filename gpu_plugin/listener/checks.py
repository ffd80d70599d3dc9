"""What each probe looks at: facts in, lines and a verdict out. Pure; the time is one of the facts.

The lines are in the form of the Kubernetes API server's /livez?verbose (k8s.io/apiserver, pkg/server/healthz).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_plugin.devices.device import Resource
from gpu_plugin.kubelet.registrations import Standing

BEAT = 1.0
"""Seconds between two beats of the event loop."""

LATE = 5.0
"""Seconds without a beat after which the event loop is taken to be held up: the kubelet's calls then wait as long."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. It passed where `fault` is empty; `note` is then worth a word all the same."""

    name: str
    fault: str = ""
    note: str = ""

    def __str__(self) -> str:
        told = f"[-]{self.name} failed: {self.fault}" if self.fault else f"[+]{self.name} ok"
        told = f"{told}: {self.note}" if self.note and not self.fault else told
        return " ".join(told.split())  # a reason may hold line breaks


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of all checks of a probe, and the text that says so."""

    passed: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the daemon. Times are in seconds of the event loop's clock.

    `awaited` is what of the configuration is waited for, empty once it is read. `driver` is why there is no GPU to serve,
    empty once there is one, and None while the first attempt is under way. `turn_due` is by when the GPUs' present turn
    is over if all is well. `offered` says whether anything was published; `resources` is what is, by name. `registering` says
    whether the kubelet is to know of it, `standings` how each resource stands there. `unserved` are the reasons of what is
    not served; `cdi` is why no device can be used by CDI name, empty where they can, and None where none is named.
    """

    awaited: str = ""
    driver: str | None = None
    turn_due: float = math.inf
    offered: bool = False
    resources: Mapping[str, Resource] = field(default_factory=dict)
    registering: bool = True
    standings: Mapping[str, Standing] = field(default_factory=dict)
    unserved: Sequence[str] = ()
    cdi: str | None = None


def live(facts: Facts, now: float, beat: float, silent: Mapping[str, str]) -> Verdict:
    """Whether a restart of the process would help, which nothing outside it is a reason for.

    Args:
        facts: what is known of the daemon.
        now: the time.
        beat: when the event loop beat last.
        silent: why our own sockets do not answer, by resource; only of those that do not.
    """
    late, overdue = now - beat, now - facts.turn_due
    return _verdict(
        "livez",
        [
            Check("event-loop", f"it last turned {late:.1f} s ago" if late > LATE else ""),
            Check("gpu-looks", f"the turn of the GPUs is {overdue:.0f} s overdue" if overdue > 0 else ""),
            Check("sockets", _by_resource(silent)),
        ],
    )


def ready(facts: Facts, now: float) -> Verdict:
    """Whether the kubelet is told of this node's GPUs."""
    checks = [_configuration(facts), Check("driver", _ASKING if facts.driver is None else facts.driver)]
    checks.append(_resources(facts))
    if facts.registering:
        away = {name: facts.standings.get(name, Standing()) for name in facts.resources}
        lost = {name: _away(standing, now) for name, standing in away.items() if standing.registered is None}
        checks.append(Check("registrations", _by_resource(lost)))
    if facts.cdi is not None:
        checks.append(Check("cdi-specifications", facts.cdi))
    return _verdict("readyz", checks)


def started(facts: Facts) -> Verdict:
    """Whether the configuration was read and the driver asked for GPUs, whatever it said."""
    asked = Check("driver", _ASKING if facts.driver is None else "", facts.driver or "")
    return _verdict("startupz", [_configuration(facts), asked])


_ASKING = "it has not answered the first question for GPUs yet"


def _configuration(facts: Facts) -> Check:
    return Check("configuration", facts.awaited)


def _resources(facts: Facts) -> Check:
    """Serving nothing, or nothing healthy, can be what the operator asks for: it is no fault, and it is said."""
    if not facts.offered:
        why = "; ".join(facts.unserved)
        return Check("resources", f"none is served{f': {why}' if why else ' yet'}")
    if not facts.resources:
        return Check("resources", note="; ".join(("none is served", *facts.unserved)))
    idle = {name: _idle(resource) for name, resource in facts.resources.items()}
    return Check("resources", note=_by_resource({name: why for name, why in idle.items() if why}))


def _idle(resource: Resource) -> str:
    """Why nothing of a resource is handed out; empty where something is."""
    listed = [device for device in resource.devices if not device.retired]
    if any(device.healthy for device in listed):
        return ""
    first = next((device.reason for device in listed if device.reason), "")
    return f"no device is healthy: {first}" if first else "it has no device"


def _away(standing: Standing, now: float) -> str:
    since = f" (not registered for {now - standing.lost:.0f} s)" if standing.lost is not None else ""
    return f"{standing.why}{since}"


def _by_resource(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))


def _verdict(probe: str, checks: Sequence[Check]) -> Verdict:
    passed = not any(check.fault for check in checks)
    outcome = f"{probe} check {'passed' if passed else 'failed'}"
    return Verdict(passed, "\n".join((*map(str, checks), outcome, "")))
