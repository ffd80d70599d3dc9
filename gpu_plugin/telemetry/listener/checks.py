"""What each probe looks at: facts in, an answer with a line for each check out. Pure; the time is one of the facts.

The lines are in the form of the Kubernetes API server's /livez?verbose (k8s.io/apiserver, pkg/server/healthz).
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from gpu_plugin.devices.device import Resource
from gpu_plugin.kubelet.registrations import ResourceRegistration
from gpu_plugin.runtime.histogram import Histogram
from gpu_plugin.telemetry.listener.answer import Answer

BEAT_INTERVAL = 1.0
"""Seconds between two beats of the event loop."""

LATE = 5.0
"""Seconds by which a beat must be late to be worth a word: the kubelet's calls waited as long."""

LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Seconds by which beats are told apart: an idle loop is a millisecond late, and the kubelet waits for as long as it is."""

RECENT = 60.0
"""Seconds for which that is told."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. It passed where `fault` is empty; `note` is then worth a word all the same."""

    name: str
    fault: str = ""
    note: str = ""

    def __str__(self) -> str:
        told = f"[-]{self.name} failed: {self.fault}" if self.fault else f"[+]{self.name} ok"
        told = f"{told}: {self.note}" if self.note and not self.fault else told
        return " ".join(told.split())  # a reason may hold line breaks


class Pause(msgspec.Struct, frozen=True):
    """The event loop stood still for so many `seconds`, and went on at the time `until`."""

    seconds: float
    until: float


class LoopLag:
    """The beats of the event loop, of which those are kept that came late."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._pauses: list[Pause] = []
        self.lag = Histogram(LAGS)
        """By how much each beat was late."""

    def beat(self, now: float) -> None:
        """The loop turns at this time."""
        if self._last is not None:
            self.lag.observe(max(0.0, now - self._last - BEAT_INTERVAL))
        self._pauses = self._recent(now)
        self._last = now

    def longest(self, now: float) -> Pause | None:
        """The longest recent pause; None where there was none. A loop that has just gone on may not have beaten yet."""
        return max(self._recent(now), key=lambda pause: pause.seconds, default=None)

    def _recent(self, now: float) -> list[Pause]:
        pauses = [pause for pause in self._pauses if now - pause.until <= RECENT]
        if self._last is not None and now - self._last - BEAT_INTERVAL > LATE:
            pauses.append(Pause(now - self._last, now))
        return pauses


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the daemon. Times are in seconds of the event loop's clock.

    `waits_for` is which other daemon has the node, in a sentence, empty while this one has it: nothing else is known meanwhile.
    `standby` is whether that daemon uses the same state directory, so that this one continues its work.
    `takes_over` is whether a former daemon still answers the kubelet, until this one has registered a healthy device.
    `awaited` is why there is no configuration yet, empty once there is one; `tried` whether the first attempt at it is over
    meanwhile. `refused` is why a newer configuration is not in force. `driver` is the reason why no GPU can be reached now, or
    why the node has none; empty if a GPU can be reached, and None while the first attempt is under way.
    `turn_due` is by when the GPUs' present turn is over if all is well.
    `offered` says whether anything was published; `resources` is what is, by name. `registering` says whether the kubelet is to
    know of it, `standings` how each resource stands there. `unserved` is what of the configuration is not served as it says, and
    why; `cdi` is why no device can be used by CDI name, empty where they can, and None where none is named.
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
    """Whether a restart of the process would help, which nothing outside it is a reason for.

    An event loop that stands still answers nobody, which is what a prober hears of it. Whoever is answered can only be told
    that it stood still a while ago: that is a note.

    Args:
        facts: what is known of the daemon.
        now: the time.
        silent: why our own sockets do not answer, by resource; only of those that do not.
        unasked: why they could not all be asked, which says nothing of them; empty where they were.
        paused: the longest time for which the event loop stood still of late.
    """
    overdue = now - facts.turn_due
    stood = "" if paused is None else f"it stood still for {paused.seconds:.1f} s, until {now - paused.until:.0f} s ago"
    return _verdict(
        "livez",
        [
            Check("event-loop", note=stood),
            Check("gpu-looks", f"the turn of the GPUs is {overdue:.0f} s overdue" if overdue > 0 else ""),
            Check("sockets", _by_resource(silent), unasked and f"not all were asked: {unasked}"),
        ],
    )


def ready(facts: Facts, now: float) -> Answer:
    """Whether the plugin does its work: the kubelet has the list of every resource that there is to serve.

    A node without GPUs, or with a driver that does not work, is ready and serves nothing: a DaemonSet counts its pod as
    available, and a roll-out goes on to the other nodes. Metrics and alerts report the driver.
    """
    if facts.waits_for:
        # A DaemonSet ends the former pod only when this pod is ready.
        note, fault = (facts.waits_for, "") if facts.standby else ("", facts.waits_for)
        return _verdict("readyz", [Check("node", fault, note)])
    if facts.takes_over:  # also without a driver: the former daemon has one
        fault = "the former daemon answers the kubelet until this one has registered a healthy device"
        return _verdict("readyz", [Check("node", fault), Check("driver", note=facts.driver or "")])
    if facts.awaited:  # until there is a configuration, nobody asks the driver or the kubelet for anything
        return _verdict("readyz", [Check("configuration", facts.awaited)])
    asking = facts.driver is None
    driver = Check("driver", _ASKING if asking else "", facts.driver or "")
    checks = [_configuration(facts), driver, _resources(facts)]
    if facts.registering:
        away = {name: facts.standings.get(name, ResourceRegistration()) for name in facts.resources}
        lost = {name: _away(standing, now) for name, standing in away.items() if standing.registered is None}
        checks.append(Check("registrations", _by_resource(lost)))
    if facts.cdi is not None:
        checks.append(Check("cdi-specifications", facts.cdi))
    return _verdict("readyz", checks)


def started(facts: Facts, before: bool = False) -> Answer:  # noqa: FBT001, FBT002 - one of two facts
    """Whether the first attempt at the configuration and at the driver is over, whatever came of it.

    Without a configuration the driver is not asked, and a restart would bring neither. `before` says whether this has passed
    once, which it then does for good.
    """
    if facts.waits_for:  # a restart would wait as well
        return _verdict("startupz", [Check("node", note=facts.waits_for)])
    if facts.awaited:
        over = facts.tried or before
        return _verdict("startupz", [Check("configuration", "" if over else facts.awaited, facts.awaited)])
    asking = facts.driver is None
    driver = Check("driver", _ASKING if asking and not before else "", _ASKING if asking else facts.driver or "")
    return _verdict("startupz", [_configuration(facts), driver])


_ASKING = "it has not answered the first question for GPUs yet"


def _configuration(facts: Facts) -> Check:
    return Check("configuration", note=facts.refused and f"the one in force; refused: {facts.refused}")


def _resources(facts: Facts) -> Check:
    """Serving nothing, or nothing healthy, can be what the operator asks for: it is no fault, and it is said."""
    if not facts.offered and facts.driver:
        return Check("resources", note="none is served, since no GPU can be reached")
    if not facts.offered:
        why = "; ".join(facts.unserved)
        return Check("resources", f"none is served{f': {why}' if why else ' yet'}")
    if not facts.resources:
        return Check("resources", note="; ".join(("none is served", *facts.unserved)))
    idle = {name: _idle(resource) for name, resource in facts.resources.items()}
    notes = (_by_resource({name: why for name, why in idle.items() if why}), *facts.unserved)
    return Check("resources", note="; ".join(filter(None, notes)))


def _idle(resource: Resource) -> str:
    """Why nothing of a resource is handed out; empty where something is."""
    listed = [device for device in resource.devices if not device.retired]
    if any(device.healthy for device in listed):
        return ""
    first = next((device.reason for device in listed if device.reason), "")
    return f"no device is healthy: {first}" if first else "it has no device"


def _away(standing: ResourceRegistration, now: float) -> str:
    since = f" (lost {now - standing.lost:.0f} s ago)" if standing.lost is not None else ""
    return f"{standing.why}{since}"


def _by_resource(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))


def _verdict(probe: str, checks: Sequence[Check]) -> Answer:
    passed = not any(check.fault for check in checks)
    outcome = f"{probe} check {'passed' if passed else 'failed'}"
    return Answer(200 if passed else 503, "\n".join((*map(str, checks), outcome, "")))
