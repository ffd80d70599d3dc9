"""Whether the kubelet still has this plugin's devices, which an open stream does not say.

A plugin that registers a resource takes it from the one before, whose stream may stay open (kubelets up to 1.36). Where it ends
then, the kubelet has no plugin for the resource and 0 devices, and nothing of that reaches the first one. What the kubelet
takes for healthy it tells whoever asks: GetAllocatableResources of its PodResources service.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.snapshot import SnapshotStore

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

Ids = Mapping[str, frozenset[str]]
"""Device ids by resource name."""

NOBODY = "the kubelet has none of its devices, as after another plugin registered the resource and ended"
OTHERS = "another plugin has registered this resource since: the kubelet has devices of it that are not this plugin's"


NONE: Ids = {}


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
        if unfit.get(resource, frozenset()) & known:
            found[resource] = OTHERS
        elif ids and not known:
            found[resource] = NOBODY
        elif ids and not ids & known:
            found[resource] = OTHERS
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from an answer: resources to register again, those that another plugin has now, those that are back."""

    again: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    back: frozenset[str] = frozenset()


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
        self._pauses: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def judge(self, ours: Ids, allocatable: Ids, now: float, unfit: Ids = NONE) -> Outcome:
        """Takes in one answer; only what two in a row say has consequences. `now` is in seconds of a steady clock.

        What another plugin has stays so while we have no healthy device of it: then the answer says nothing.
        """
        found = dict(lost(ours, allocatable, unfit))
        found |= {name: OTHERS for name in self.taken if name in ours and not ours[name] and name not in found}
        for name in ours.keys() - found.keys():  # the kubelet has it from us
            self._pauses.pop(name, None)
            self._not_before.pop(name, None)
        back = (self.taken & ours.keys()) - found.keys()
        confirmed = {name: why for name, why in found.items() if self.suspects.get(name) == why}
        again = {
            name: why for name, why in confirmed.items() if why == NOBODY and now >= self._not_before.get(name, now)
        }
        for name in again:
            pause = self._pauses[name] = min(2 * self._pauses.get(name, FIRST_PAUSE / 2), LONGEST_PAUSE)
            self._not_before[name] = now + pause
        taken = {name: why for name, why in confirmed.items() if why == OTHERS and name not in self.taken}
        self.taken = (self.taken & found.keys() | taken.keys()) - again.keys()
        self.suspects = {name: why for name, why in found.items() if name not in again}
        return Outcome(again, taken, back)


class TakeoverWatch:
    """Asks the kubelet now and then what it has, and sees to what follows."""

    def __init__(
        self,
        store: SnapshotStore,
        registrations: Registrations,
        socket: Callable[[], Path],
        look: Callable[[], object],
    ) -> None:
        """Takes where PodResources answers, and what to call so that endpoints look at how they stand."""
        self._store = store
        self._registrations = registrations
        self._socket = socket
        self._look = look
        self._takeovers = Takeovers()

    async def run(self) -> None:
        """Never returns."""
        while True:
            amiss = self._takeovers.suspects.keys() - self._takeovers.taken
            await anyio.sleep(CONFIRM if amiss else INTERVAL)
            await self.ask()

    async def ask(self) -> None:
        """One question, and what follows from its answer."""
        before, unfit_before = self._ours(), self._unfit()
        if not before:
            return
        try:
            allocatable = await pod_resources.allocatable(self._socket(), PATIENCE)
        except pod_resources.PodResourcesError as error:
            log.debug("whether the kubelet still has our devices is not known: %s", error)
            return
        ours = {name: ids & before[name] for name, ids in self._ours().items() if name in before}
        unfit = {name: ids & unfit_before.get(name, frozenset()) for name, ids in self._unfit().items()}
        outcome = self._takeovers.judge(ours, allocatable, anyio.current_time(), unfit)
        for name in sorted(outcome.back):
            log.info("%s: the kubelet has this plugin's devices again", name, extra={"resource": name})
            self._registrations.taken(name)
        for name, why in outcome.taken.items():
            log.warning("%s: %s", name, why, extra={"resource": name})
            self._registrations.away(name, why)
        for name, why in outcome.again.items():
            self._registrations.register_again(name, why)
        if outcome.again:
            self._look()

    def _ours(self) -> dict[str, frozenset[str]]:
        """The healthy devices of each resource that the kubelet should have from us."""
        return self._ids(healthy=True)

    def _unfit(self) -> dict[str, frozenset[str]]:
        """The unhealthy ones. Each question comes long after a list was sent, or the next one does."""
        return self._ids(healthy=False)

    def _ids(self, *, healthy: bool) -> dict[str, frozenset[str]]:
        return {
            name: frozenset(device.id for device in view.resource.devices if device.healthy is healthy)
            for name, view in self._store.current.resources.items()
            if self._registrations.of(name).registered is not None or name in self._takeovers.taken
        }
