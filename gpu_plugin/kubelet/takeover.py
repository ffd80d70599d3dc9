"""Whether the kubelet still has this plugin's devices, which an open stream does not say.

A plugin that registers a resource takes it from the one before, whose stream may stay open (kubelets up to 1.36). Where it ends
then, the kubelet has no plugin for the resource and 0 devices, and nothing of that reaches the first one. What the kubelet
takes for healthy it tells whoever asks: GetAllocatableResources of its PodResources service.
"""

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.inventory.snapshot import ResourceView, SnapshotStore
from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES, computed

log = logging.getLogger(__name__)

INTERVAL = 15.0
"""Seconds between two questions."""

CONFIRM = 3.0
"""Seconds to the next one where something is amiss: the kubelet may be reading our list just then."""

FIRST_PAUSE = 60.0
LONGEST_PAUSE = 3600.0
"""Seconds between two registrations of a resource that the kubelet still does not have: the first time, and at most."""

PATIENCE = 2.0
"""Seconds that an answer may take."""

UNREAD = 30.0
"""Seconds for which a kubelet that still has what it had from us is taken to have read no newer list: its disk may be slow."""

Ids = Mapping[str, frozenset[str]]
"""Device ids by resource name."""

NOBODY = "the kubelet has none of its devices, as after another plugin registered the resource and ended"
KEPT = (
    "the kubelet sends its requests to this plugin, and has other healthy devices than this plugin listed, as after another "
    "plugin registered the resource and ended"
)
OTHERS = "another plugin has registered this resource since: the kubelet has devices of it that are not this plugin's"


NONE: Ids = {}

Requests = Mapping[str, int]
"""The number of requests that the kubelet has sent, by resource name."""

NO_REQUESTS: Requests = {}


def lost(ours: Ids, allocatable: Ids, unfit: Ids = NONE) -> Mapping[str, str]:
    """Which of our resources the kubelet does not have from us any more, and why that follows. Pure.

    Args:
        ours: the healthy devices of each resource that is registered; one without any says nothing.
        allocatable: what the kubelet takes for healthy.
        unfit: the unhealthy devices of each resource. Other plugins may use the ids that we use, and know them for healthy.
    """
    found = {}
    for resource, ids in ours.items():
        known = allocatable.get(resource, frozenset())
        if not known.isdisjoint(unfit.get(resource, frozenset())):
            found[resource] = OTHERS
        elif ids and not known:
            found[resource] = NOBODY
        elif ids and ids.isdisjoint(known):
            found[resource] = OTHERS
    return found


def steady(before: Mapping[str, ResourceView], after: Mapping[str, ResourceView]) -> tuple[Ids, Ids]:
    """The healthy and the unhealthy devices of each resource, as far as they were so before a question and after it. Pure.

    Each question comes long after a list was sent, or the next one does.
    """
    names = before.keys() & after.keys()
    return (
        {name: _ids(before[name], fit=True) & _ids(after[name], fit=True) for name in names},
        {name: _ids(before[name], fit=False) & _ids(after[name], fit=False) for name in names},
    )


def _ids(view: ResourceView, *, fit: bool) -> frozenset[str]:
    return frozenset([device.id for device in view.resource.devices if (not device.reason) is fit])


def differing(ours: Ids, allocatable: Ids, unfit: Ids = NONE) -> frozenset[str]:
    """Resources of which the kubelet lacks a healthy device or counts an unhealthy one as healthy; arguments of `lost`. Pure."""
    known = {name: allocatable.get(name, frozenset()) for name in ours}
    return frozenset(
        name for name, ids in ours.items() if ids - known[name] or not known[name].isdisjoint(unfit.get(name, ()))
    )


class Outcome(msgspec.Struct, frozen=True):
    """What follows from an answer: resources to register again, those that another plugin has now, those that are back.

    `resend` are resources whose list the kubelet must get again: it sends this plugin requests and has another plugin's list.
    """

    again: Mapping[str, str] = msgspec.field(default_factory=dict)
    taken: Mapping[str, str] = msgspec.field(default_factory=dict)
    back: frozenset[str] = frozenset()
    resend: frozenset[str] = frozenset()


class Takeovers:
    """What the latest answers said, and what follows. Pure: takes the clock as an argument.

    A resource that another plugin serves is left to it: to take it back would be a fight without an end. One that nobody has
    is registered again, ever more rarely where that does not help.
    """

    def __init__(self) -> None:
        self.taken: frozenset[str] = frozenset()
        """Resources that another plugin serves."""
        self.suspects: Mapping[str, str] = {}
        """Resources that the last answer alone speaks against, with the reason."""
        self._had: dict[str, tuple[frozenset[str], float]] = {}
        self._differing: frozenset[str] = frozenset()
        self._requests: Requests = NO_REQUESTS
        self._backoffs: dict[str, Backoff] = {}

    def judge(
        self, ours: Ids, allocatable: Ids, now: float, unfit: Ids = NONE, requests: Requests = NO_REQUESTS
    ) -> Outcome:
        """Takes in one answer; only what two in a row say has consequences. `now` is in seconds of a steady clock.

        What another plugin has stays so while we have no healthy device of it: then the answer says nothing. What is not among
        `ours` is nobody's business any more. A kubelet that has what it had when it last had ours has read no list since.

        A request between two answers that differ from our list shows that requests come to us: from 1.37 on the kubelet keeps
        the list of a plugin that has ended. Without such a request the other plugin may live, and would get our ids.
        """
        against = lost(ours, allocatable, unfit)
        found = {
            name: why
            for name, why in against.items()
            if why == NOBODY or name in self.taken or not self._unread(name, allocatable[name], now)
        }
        found |= {name: OTHERS for name in self.taken if name in ours and not ours[name] and name not in found}
        self._had = {name: had for name, had in self._had.items() if name in ours}
        for name in ours.keys() - against.keys() - found.keys():  # the kubelet has it from us
            self._backoffs.pop(name, None)
            self._had[name] = (allocatable.get(name, frozenset()), now)
        back = (self.taken & ours.keys()) - found.keys()
        confirmed = {name: why for name, why in found.items() if self.suspects.get(name) == why}
        again = {name: why for name, why in confirmed.items() if why == NOBODY and self._backoff(name).due(now)}
        for name in again:
            self._backoff(name).failed(now)
        taken = {name: why for name, why in confirmed.items() if why == OTHERS and name not in self.taken}
        self.taken = (self.taken & found.keys() | taken.keys()) - again.keys()
        self.suspects = {name: why for name, why in found.items() if name not in again}
        differ = differing(ours, allocatable, unfit) - again.keys()
        asked = {name for name, number in requests.items() if number > self._requests.get(name, 0)}
        resend = differ & self._differing & asked
        self._differing, self._requests = differ, requests
        return Outcome(again, taken, back, resend)

    def registered(self, names: AbstractSet[str]) -> None:
        """These are registered again, or not at all: what another plugin had of them says nothing any more."""
        self.taken -= names

    def _backoff(self, name: str) -> Backoff:
        return self._backoffs.setdefault(name, Backoff(FIRST_PAUSE, LONGEST_PAUSE))

    def _unread(self, name: str, known: frozenset[str], now: float) -> bool:
        had, at = self._had.get(name, (frozenset(), -math.inf))
        return now - at < UNREAD and known <= had


class TakeoverWatch:
    """Asks the kubelet now and then what it has, and sees to what follows."""

    def __init__(
        self,
        store: SnapshotStore,
        registrations: Registrations,
        socket: Callable[[], Path],
        look: Callable[[], object],
        counts: KubeletCounts,
    ) -> None:
        """Takes where PodResources answers, what to call so that endpoints look at how they stand, and the kubelet's requests."""
        self._store = store
        self._registrations = registrations
        self._socket = socket
        self._look = look
        self._counts = counts
        self._takeovers = Takeovers()

    async def run(self) -> None:
        """Never returns."""
        while True:
            amiss = self._takeovers.suspects.keys() - self._takeovers.taken
            await anyio.sleep(CONFIRM if amiss else INTERVAL)
            await self.ask()

    async def ask(self) -> None:
        """Asks the kubelet once what it has of ours, and acts on the answer."""
        before = self._served()
        if not before:
            return
        try:
            allocatable = await pod_resources.allocatable(self._socket(), PATIENCE)
        except CallError as error:
            log.debug("whether the kubelet still has our devices is not known: %s", error)
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
            self._look()
        for name in sorted(outcome.resend):
            log.warning("%s: %s; sending this plugin's list again", name, KEPT, extra={"resource": name})
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
        """The resources whose streams the kubelet has open."""
        return {
            name: view
            for name, view in self._store.current.resources.items()
            if self._registrations.heard(name) or self._registrations.overtaken(name)
        }
