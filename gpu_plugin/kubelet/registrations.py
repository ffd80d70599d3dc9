"""How each resource stands with the kubelet: on which socket it is served, and since when it is registered, or lost and why."""

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.runtime.pulse import Pulse

UNREGISTERED = "it has not been registered yet"

UNHEARD = "registered, but the kubelet has not opened its stream yet"
"""Why a resource is not known to the kubelet although that took its registration: without the list it has no device of it."""


class ResourceRegistration(msgspec.Struct, frozen=True):  # made while pods wait for the start: a dataclass takes 1 ms
    """One resource. Times are in seconds of one steady clock.

    `socket` is where it is served now, None while it is not. `registered` is since when the kubelet is told of its devices, from
    the stream on that it opens after a registration; None while it is not. `lost` is since when it is not any more, None before
    the first time and while it is; `why` is empty while it is.
    """

    socket: Path | None = None
    registered: float | None = None
    lost: float | None = None
    why: str = UNREGISTERED


Subscriber = Callable[[str, ResourceRegistration, ResourceRegistration], None]
"""Receives the name of a resource, and its state before and after a change."""


class Registrations:
    """The standing of every resource that has an endpoint, by name."""

    def __init__(
        self,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        """`clock` is steady, in seconds."""
        self.current: dict[str, ResourceRegistration] = {}
        self.changes = Pulse()
        """Rings after each change."""
        self._again: dict[str, str] = {}
        self._overtaken: dict[str, ResourceRegistration] = {}
        self._clock = clock
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Have each change sent to this subscriber from now on."""
        self._subscribers.append(subscriber)

    def of(self, resource: str) -> ResourceRegistration:
        """How a resource stands; one that has no endpoint yet has not been registered."""
        return self.current.get(resource, ResourceRegistration())

    def heard(self, resource: str) -> bool:
        """Whether the kubelet has the resource's stream open, and its lists arrive."""
        return self.of(resource).registered is not None

    def register_again(self, resource: str, why: str) -> None:
        """Has the resource registered again, for this reason, although its stream is open."""
        self._again[resource] = why

    def reregistration_reason(self, resource: str) -> str:
        """Why the resource is to be registered again; empty where it is not. Told once."""
        return self._again.pop(resource, "")

    def served(self, resource: str, socket: Path) -> None:
        """The resource is served on this socket from now on."""
        self.current[resource] = replace(self.of(resource), socket=socket)

    def ended(self, resource: str, socket: Path) -> None:
        """The resource is not served on this socket any more; where it is on another by now, that stays so."""
        standing = self.of(resource)
        if standing.socket == socket:
            self.current[resource] = replace(standing, socket=None)

    def taken(self, resource: str) -> None:
        """The kubelet has opened its stream for the resource, after it took the registration."""
        self._stands(resource, ResourceRegistration(self.of(resource).socket, self._clock(), None, ""))

    def away(self, resource: str, why: str) -> None:
        """The kubelet does not know the resource, or does not know it any more, for this reason."""
        standing, now = self.of(resource), self._clock()
        lost = now if standing.registered is not None else standing.lost
        self._stands(resource, ResourceRegistration(standing.socket, None, lost, why))

    def overtake(self, resource: str, why: str) -> bool:
        """Notes that another plugin serves the resource although our stream is open; False where that has ended."""
        if not self.heard(resource):
            return False
        self.away(resource, why)
        self._overtaken[resource] = self.current[resource]
        return True

    def overtaken(self, resource: str) -> bool:
        """Whether another plugin serves the resource, and nothing has happened to our stream since."""
        standing = self._overtaken.get(resource)
        return standing is not None and self.current.get(resource) is standing

    def returned(self, resource: str) -> bool:
        """The kubelet has the resource from that stream again. Returns whether that is so: it may have ended."""
        back = self.overtaken(resource)
        if back:
            self.taken(resource)
        return back

    def withdrawn(self, resource: str) -> None:
        """The resource is not served any more."""
        self._overtaken.pop(resource, None)
        self.current.pop(resource, None)
        self._again.pop(resource, None)
        self.changes.ring()

    def _stands(self, resource: str, after: ResourceRegistration) -> None:
        before = self.of(resource)
        self.current[resource] = after
        self.changes.ring()
        for subscriber in self._subscribers:
            subscriber(resource, before, after)
