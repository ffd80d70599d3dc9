"""The checks of each probe: compute an answer with a line for each check from given facts. Pure; the time is an argument.

The lines have the format of the Kubernetes API server's /livez?verbose (k8s.io/apiserver, pkg/server/healthz).
"""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec

from gpu_plugin.devices.device import Resource
from gpu_plugin.kubelet.registrations import ResourceRegistration
from gpu_plugin.runtime.histogram import Histogram
from gpu_plugin.telemetry.listener.answer import Answer

BEAT_INTERVAL = 1.0  # seconds between two beats of the event loop

# A beat that is later than this number of seconds is reported, since the kubelet's calls waited that long too.
LATE = 5.0

# Bounds of the histogram of delays, in seconds: an idle loop is a millisecond late, and each delay delays the kubelet.
LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)

RECENT = 60.0  # seconds for which a pause is reported


class Check(msgspec.Struct, frozen=True):
    """The result of one check. It passed if `fault` is empty; then `note` may have further information."""

    name: str
    fault: str = ""
    note: str = ""

    def __str__(self) -> str:
        text = f"[-]{self.name} failed: {self.fault}" if self.fault else f"[+]{self.name} ok"
        text = f"{text}: {self.note}" if self.note and not self.fault else text
        return " ".join(text.split())  # a reason may have line breaks


class Pause(msgspec.Struct, frozen=True):
    """The event loop was blocked for `seconds`, until the time `until`."""

    seconds: float
    until: float


class LoopLag:
    """Measures delays of the event loop by its beats, and keeps long pauses."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._pauses: list[Pause] = []
        self.lag = Histogram(LAGS)  # delay of each beat, in seconds

    def beat(self, now: float) -> None:
        """Record that the loop runs at this time."""
        if self._last is not None:
            self.lag.observe(max(0.0, now - self._last - BEAT_INTERVAL))
        self._pauses = self._recent(now)
        self._last = now

    def longest(self, now: float) -> Pause | None:
        """Return the longest recent pause; None if there was no pause. A pause that has just ended is included."""
        return max(self._recent(now), key=attrgetter("seconds"), default=None)

    def _recent(self, now: float) -> list[Pause]:
        pauses = [pause for pause in self._pauses if now - pause.until <= RECENT]
        if self._last is not None and now - self._last - BEAT_INTERVAL > LATE:
            pauses.append(Pause(now - self._last, now))
        return pauses


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the daemon. Times are in seconds of the event loop's clock.

    `waits_for` is a sentence about another daemon that has the node; empty while this daemon has it. If it is set, no other
    fact is known. `standby`: the other daemon uses the same state directory, so that this daemon continues its work.
    `takes_over`: a former daemon still answers the kubelet, until this daemon has registered a healthy device.
    `awaited` is why there is no configuration yet; empty once there is a configuration. `tried`: the first attempt to get it is
    over. `refused` is why a newer configuration is not in force. `driver` is the reason why no GPU can be reached now, or why
    the node has no GPU; empty if a GPU can be reached, and None during the first attempt.
    `turn_due` is the time by which the present turn of the GPUs should be over.
    `offered`: a snapshot was published. `resources` are its resources by name. `registering`: resources should be registered
    with the kubelet. `standings` are their registrations. `unserved` are the parts of the configuration that are not served
    as configured, with reasons. `cdi` is why no device can be used by CDI name; empty if devices can be used, and None if no
    CDI names are used.
    """

    waits_for: str = ""
    standby: bool = False
    takes_over: bool = False
    awaited: str = ""
    tried: bool = False
    refused: str = ""
    driver: str | None = None
    turn_due: float = math.inf
    offered: bool = False
    resources: Mapping[str, Resource] = msgspec.field(default_factory=dict)
    registering: bool = True
    standings: Mapping[str, ResourceRegistration] = msgspec.field(default_factory=dict)
    unserved: Sequence[str] = ()
    cdi: str | None = None


def live(facts: Facts, now: float, silent: Mapping[str, str], unasked: str = "", paused: Pause | None = None) -> Answer:
    """Check whether a restart of the process would help. Reasons outside of the process do not count.

    A blocked event loop sends no answer, so the probe fails. An answer can only report that the loop was blocked recently, as
    a note.

    Args:
        facts: the state of the daemon.
        now: the time.
        silent: by resource, why a socket of this daemon does not answer; other sockets are not included.
        unasked: why some sockets could not be called, so that their state is unknown; empty if all were called.
        paused: the longest recent time for which the event loop was blocked.
    """
    overdue = now - facts.turn_due
    blocked = (
        "" if paused is None else f"it was blocked for {paused.seconds:.1f} s, until {now - paused.until:.0f} s ago"
    )
    return _verdict(
        "livez",
        [
            Check("event-loop", note=blocked),
            Check("gpu-looks", f"the turn of the GPUs is {overdue:.0f} s overdue" if overdue > 0 else ""),
            Check("sockets", _by_resource(silent), unasked and f"not all were called: {unasked}"),
        ],
    )


def ready(facts: Facts, now: float) -> Answer:
    """Check whether the plugin does its work: the kubelet has the list of each resource to be served.

    A node without GPUs, or with a broken driver, is ready and serves nothing. So a DaemonSet counts its pod as available, and
    a roll-out continues on other nodes. Metrics and alerts report the driver.
    """
    if facts.waits_for:
        # A DaemonSet ends the former pod only when this pod is ready.
        note, fault = (facts.waits_for, "") if facts.standby else ("", facts.waits_for)
        return _verdict("readyz", [Check("node", fault, note)])
    if facts.takes_over:  # even without a driver here: the former daemon has an open driver
        fault = "the former daemon answers the kubelet until this one has registered a healthy device"
        return _verdict("readyz", [Check("node", fault), Check("driver", note=facts.driver or "")])
    if facts.awaited:  # without a configuration, neither the driver nor the kubelet is used
        return _verdict("readyz", [Check("configuration", facts.awaited)])
    asking = facts.driver is None
    driver = Check("driver", _ASKING if asking else "", facts.driver or "")
    checks = [_configuration(facts), driver, _resources(facts)]
    if facts.registering:
        away = {name: facts.standings.get(name, ResourceRegistration()) for name in facts.resources}
        lost = {
            name: _why_unregistered(standing, now) for name, standing in away.items() if standing.registered is None
        }
        checks.append(Check("registrations", _by_resource(lost)))
    if facts.cdi is not None:
        checks.append(Check("cdi-specifications", facts.cdi))
    return _verdict("readyz", checks)


def started(facts: Facts, before: bool = False) -> Answer:  # noqa: FBT001, FBT002 - one of two facts
    """Check whether the first attempts to get a configuration and to open the driver are over, with any result.

    Without a configuration the driver is not opened, and a restart would help with neither. `before`: this check has passed
    once; then it passes always.
    """
    if facts.waits_for:  # a restarted daemon would wait too
        return _verdict("startupz", [Check("node", note=facts.waits_for)])
    if facts.awaited:
        over = facts.tried or before
        return _verdict("startupz", [Check("configuration", "" if over else facts.awaited, facts.awaited)])
    asking = facts.driver is None
    driver = Check("driver", _ASKING if asking and not before else "", _ASKING if asking else facts.driver or "")
    return _verdict("startupz", [_configuration(facts), driver])


_ASKING = "the first attempt to find GPUs is not over yet"


def _configuration(facts: Facts) -> Check:
    return Check(
        "configuration", note=facts.refused and f"the former configuration is in force; refused: {facts.refused}"
    )


def _resources(facts: Facts) -> Check:
    """Check the served resources. Serving nothing, or nothing healthy, may be intended: it is a note, not a fault."""
    if not facts.offered and facts.driver:
        return Check("resources", note="no resource is served, since no GPU can be reached")
    if not facts.offered:
        why = "; ".join(facts.unserved)
        return Check("resources", f"no resource is served{f': {why}' if why else ' yet'}")
    if not facts.resources:
        return Check("resources", note="; ".join(("no resource is served", *facts.unserved)))
    idle = {name: _idle(resource) for name, resource in facts.resources.items()}
    notes = (_by_resource({name: why for name, why in idle.items() if why}), *facts.unserved)
    return Check("resources", note="; ".join(filter(None, notes)))


def _idle(resource: Resource) -> str:
    """Return why a resource has no device for pods; empty if it has a healthy device."""
    listed = [device for device in resource.devices if not device.retired]
    if any(device.healthy for device in listed):
        return ""
    first = next((device.reason for device in listed if device.reason), "")
    return f"no device is healthy: {first}" if first else "it has no device"


def _why_unregistered(standing: ResourceRegistration, now: float) -> str:
    since = f" (lost {now - standing.lost:.0f} s ago)" if standing.lost is not None else ""
    return f"{standing.why}{since}"


def _by_resource(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))


def _verdict(probe: str, checks: Sequence[Check]) -> Answer:
    passed = not any(check.fault for check in checks)
    outcome = f"{probe} check {'passed' if passed else 'failed'}"
    return Answer(200 if passed else 503, "\n".join((*map(str, checks), outcome, "")))
