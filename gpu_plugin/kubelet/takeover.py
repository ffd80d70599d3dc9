"""Find resources that another plugin has registered while this plugin's stream is open.

A plugin that registers a resource takes it from the plugin that registered before. When it ends, the stream of the earlier
plugin shows nothing. A kubelet up to 1.36 then has no plugin and 0 devices. A kubelet from 1.37 on sends its requests to the
earlier plugin, and keeps the list of the plugin that ended. GetAllocatableResources of the PodResources service returns the
devices that the kubelet counts as healthy.
"""

import logging
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES, computed

log = logging.getLogger(__name__)

INTERVAL = 15.0  # seconds between two requests

# Seconds to the next request if an answer is suspicious: the kubelet may not have read our newest list yet.
CONFIRM = 3.0

# Seconds between two registrations of a resource that the kubelet still does not have: first and longest pause.
FIRST_PAUSE = 60.0
LONGEST_PAUSE = 3600.0

PATIENCE = 2.0  # seconds to wait for an answer

# Seconds in which a kubelet with an older list of ours may still read the newest list: its disk may be slow.
UNREAD = 30.0

Ids = Mapping[str, frozenset[str]]  # device ids by resource name

NO_DEVICES = "the kubelet has none of its devices, as after another plugin registered the resource and ended"
KEPT = (
    "the kubelet has other healthy devices than this plugin listed, as after another plugin registered the resource and ended; "
    "the next request of the kubelet makes this plugin send its list again, and so does a restart"
)
OTHERS = "another plugin has registered this resource since: the kubelet has devices of it that are not this plugin's"


NONE: Ids = {}

Requests = Mapping[str, int]  # the number of requests that the kubelet has sent, by resource name

NO_REQUESTS: Requests = {}


def lost(ours: Ids, allocatable: Ids, unfit: Ids = NONE) -> Mapping[str, str]:
    """Return the resources that the kubelet no longer has from this plugin, each with the reason. Pure.

    Args:
        ours: the healthy devices of each registered resource. A resource without healthy devices is never lost.
        allocatable: the devices that the kubelet counts as healthy.
        unfit: the unhealthy devices of each resource. Another plugin may list the same ids as healthy.
    """
    found = {}
    for resource, ids in ours.items():
        known = allocatable.get(resource, frozenset())
        if not known.isdisjoint(unfit.get(resource, frozenset())):
            found[resource] = OTHERS
        elif ids and not known:
            found[resource] = NO_DEVICES
        elif ids and ids.isdisjoint(known):
            found[resource] = OTHERS
    return found


def steady(before: Mapping[str, ResourceView], after: Mapping[str, ResourceView]) -> tuple[Ids, Ids]:
    """Return the healthy devices of each resource, and its unhealthy devices, according to both views. Pure.

    `before` and `after` are the views before and after a request. A device whose health differs is in neither result.
    """
    names = before.keys() & after.keys()
    return (
        {name: _ids(before[name], fit=True) & _ids(after[name], fit=True) for name in names},
        {name: _ids(before[name], fit=False) & _ids(after[name], fit=False) for name in names},
    )


def _ids(view: ResourceView, *, fit: bool) -> frozenset[str]:
    return frozenset([device.id for device in view.resource.devices if (not device.reason) is fit])


def differing(ours: Ids, allocatable: Ids, unfit: Ids = NONE) -> frozenset[str]:
    """Return the resources whose healthy devices in the kubelet differ from ours. The arguments are the same as for `lost`. Pure.

    The kubelet lacks a healthy device, or counts an unhealthy device as healthy.
    """
    known = {name: allocatable.get(name, frozenset()) for name in ours}
    return frozenset(
        name for name, ids in ours.items() if ids - known[name] or not known[name].isdisjoint(unfit.get(name, ()))
    )


class Outcome(msgspec.Struct, frozen=True):
    """The resources to register again, to note as another plugin's or as ours again, to send again, and to log (`kept`)."""

    again: Mapping[str, str] = msgspec.field(default_factory=dict)
    taken: Mapping[str, str] = msgspec.field(default_factory=dict)
    back: frozenset[str] = frozenset()
    resend: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


class Takeovers:
    """Decides from the latest answers what to do. Pure: takes the clock as an argument.

    A resource that another plugin serves is not registered again, because both plugins would do so forever. A resource without
    a plugin is registered again, at growing intervals if that does not help.
    """

    def __init__(self) -> None:
        self.taken: frozenset[str] = frozenset()
        """Resources that another plugin serves."""
        self.suspects: Mapping[str, str] = {}
        """Resources that are lost according to the last answer alone, with the reason."""
        self._last_known: dict[str, tuple[frozenset[str], float]] = {}
        """The kubelet's devices of each resource in the last answer that equaled our list, and its time."""
        self._differing: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()
        self._requests: Requests = NO_REQUESTS
        self._backoffs: dict[str, Backoff] = {}

    def judge(
        self, ours: Ids, allocatable: Ids, now: float, unfit: Ids = NONE, requests: Requests = NO_REQUESTS
    ) -> Outcome:
        """Compare one answer with our devices at `now`, in seconds. Only two equal results in a row have an effect.

        A resource of another plugin stays with it while we have no healthy device: no answer can differ then. Resources that
        are not in `ours` are dropped. A kubelet with an older list may not have read our newest list yet.

        `requests` are the requests of the kubelet so far. If a request arrives between two answers that differ from our list,
        the kubelet uses this plugin, and our list is sent again. Without a request, the other plugin may still run, and would get
        requests for our ids.
        """
        against = lost(ours, allocatable, unfit)
        unread = {name for name in ours if self._unread(name, allocatable.get(name, frozenset()), now)}
        found = {
            name: why for name, why in against.items() if why == NO_DEVICES or name in self.taken or name not in unread
        }
        found |= {name: OTHERS for name in self.taken if name in ours and not ours[name] and name not in found}
        self._last_known = {name: had for name, had in self._last_known.items() if name in ours}
        differ = differing(ours, allocatable, unfit)
        for name in ours.keys() - against.keys() - found.keys():  # the kubelet has devices of ours
            self._backoffs.pop(name, None)
            if name not in differ:
                self._last_known[name] = (allocatable.get(name, frozenset()), now)
        back = (self.taken & ours.keys()) - found.keys()
        confirmed = {name: why for name, why in found.items() if self.suspects.get(name) == why}
        again = {name: why for name, why in confirmed.items() if why == NO_DEVICES and self._backoff(name).due(now)}
        for name in again:
            self._backoff(name).failed(now)
        taken = {name: why for name, why in confirmed.items() if why == OTHERS and name not in self.taken}
        self.taken = (self.taken & found.keys() | taken.keys()) - again.keys()
        self.suspects = {name: why for name, why in found.items() if name not in again}
        asked = {name for name, number in requests.items() if number > self._requests.get(name, 0)}
        before, self._kept = self._kept, differ & self._differing - found.keys() - unread
        resend = differ & self._differing & asked
        self._differing, self._requests = differ, requests
        return Outcome(again, taken, back, resend, self._kept - before)

    def registered(self, names: AbstractSet[str]) -> None:
        """Drop the other plugins of these resources, which are registered again or not served any more."""
        self.taken -= names

    def _backoff(self, name: str) -> Backoff:
        return self._backoffs.setdefault(name, Backoff(FIRST_PAUSE, LONGEST_PAUSE))

    def _unread(self, name: str, known: frozenset[str], now: float) -> bool:
        had, at = self._last_known.get(name, (frozenset(), -math.inf))
        return now - at < UNREAD and known <= had


class TakeoverWatch:
    """Compares the kubelet's devices with ours every `INTERVAL` seconds, and acts on the result."""

    def __init__(
        self,
        store: SnapshotStore,
        registrations: Registrations,
        settings: SettingsStore,
        look: Pulse,
        counts: KubeletCounts,
    ) -> None:
        """`settings` names the PodResources socket, `look` wakes the endpoints, and `counts` has the kubelet's requests."""
        self._store = store
        self._registrations = registrations
        self._settings = settings
        self._look = look
        self._counts = counts
        self._takeovers = Takeovers()

    async def run(self) -> None:
        """Run the comparisons. Never returns."""
        while True:
            unconfirmed = self._takeovers.suspects.keys() - self._takeovers.taken
            await anyio.sleep(CONFIRM if unconfirmed else INTERVAL)
            await self.ask()

    async def ask(self) -> None:
        """Request the kubelet's devices once, and act on the answer."""
        before = self._served()
        if not before:
            return
        try:
            allocatable = await pod_resources.allocatable(
                Path(self._settings.current.effective_pod_resources_socket), PATIENCE
            )
        except CallError as error:
            log.debug("cannot read whether the kubelet still has our devices: %s", error)
            return
        after = self._served()
        self._takeovers.registered({name for name in self._takeovers.taken if not self._registrations.overtaken(name)})
        now = anyio.current_time()
        many = sum(len(view.resource.devices) for view in after.values()) >= OFF_LOOP_DEVICES
        requests = dict(self._counts.requests)
        outcome = await computed(self._judge, before, after, allocatable, now, requests, apart=many)
        for name in sorted(outcome.back):
            if self._registrations.returned(name):
                log.info("%s: the kubelet has this plugin's devices again", name, extra={"resource": name})
        for name, why in outcome.taken.items():
            if self._registrations.overtake(name, why):
                log.warning("%s: %s", name, why, extra={"resource": name})
        for name, why in outcome.again.items():
            self._registrations.register_again(name, why)
        if outcome.again:
            self._look.ring()
        for name in sorted(outcome.kept):
            log.warning("%s: %s", name, KEPT, extra={"resource": name})
        for name in sorted(outcome.resend):
            log.info("%s: sending this plugin's list again", name, extra={"resource": name})
            self._store.resend(name)

    def _judge(
        self,
        before: Mapping[str, ResourceView],
        after: Mapping[str, ResourceView],
        allocatable: Ids,
        now: float,
        requests: Requests,
    ) -> Outcome:
        ours, unfit = steady(before, after)
        return self._takeovers.judge(ours, allocatable, now, unfit, requests)

    def _served(self) -> Mapping[str, ResourceView]:
        """Return the resources whose stream to the kubelet is open."""
        return {
            name: view
            for name, view in self._store.current.resources.items()
            if self._registrations.heard(name) or self._registrations.overtaken(name)
        }
