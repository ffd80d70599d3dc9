"""The registration state of each resource: its socket, the time since which it is registered or lost, and the reason."""

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.runtime.pulse import Pulse

UNREGISTERED = "it has not been registered yet"

# The reason while the kubelet has accepted a registration and opened no stream: without the list it has no devices.
UNHEARD = "registered, but the kubelet has not opened its stream yet"


class ResourceRegistration(msgspec.Struct, frozen=True):  # made while pods wait for the start: a dataclass takes 1 ms
    """The state of one resource. Times are in seconds of one steady clock.

    Attributes:
        socket: the socket on which it is served; None while it is not served.
        registered: the time since which the kubelet has our stream, and so gets the list; None while it is not registered.
        lost: the time since which it is no longer registered; None before the first registration and while it is registered.
        why: the reason why it is not registered; empty while it is registered.
    """

    socket: Path | None = None
    registered: float | None = None
    lost: float | None = None
    why: str = UNREGISTERED


# Receives the name of a resource, and its state before and after a change.
Subscriber = Callable[[str, ResourceRegistration, ResourceRegistration], None]


class Registrations:
    """The state of every resource with an endpoint, by name."""

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
        """Return the state of a resource. A resource without an endpoint has not been registered."""
        return self.current.get(resource, ResourceRegistration())

    def heard(self, resource: str) -> bool:
        """Whether the kubelet has our stream of the resource open, and so gets its lists."""
        return self.of(resource).registered is not None

    def register_again(self, resource: str, why: str) -> None:
        """Request that the resource is registered again for this reason, although its stream is open."""
        self._again[resource] = why

    def reregistration_reason(self, resource: str) -> str:
        """Return and clear the reason of the last `register_again`; empty without such a request."""
        return self._again.pop(resource, "")

    def served(self, resource: str, socket: Path) -> None:
        """Record that the resource is served on this socket."""
        self.current[resource] = replace(self.of(resource), socket=socket)

    def ended(self, resource: str, socket: Path) -> None:
        """Record that the resource is not served on this socket any more. If it has another socket by now, nothing changes."""
        state = self.of(resource)
        if state.socket == socket:
            self.current[resource] = replace(state, socket=None)

    def taken(self, resource: str) -> None:
        """Record that the kubelet has opened its stream for the resource after a registration."""
        self._update(resource, ResourceRegistration(self.of(resource).socket, self._clock(), None, ""))

    def away(self, resource: str, why: str) -> None:
        """Record the reason why the kubelet does not have the resource, or has lost it."""
        state, now = self.of(resource), self._clock()
        lost = now if state.registered is not None else state.lost
        self._update(resource, ResourceRegistration(state.socket, None, lost, why))

    def overtake(self, resource: str, why: str) -> bool:
        """Record that another plugin serves the resource while our stream is open. Return False if our stream has ended."""
        if not self.heard(resource):
            return False
        self.away(resource, why)
        self._overtaken[resource] = self.current[resource]
        return True

    def overtaken(self, resource: str) -> bool:
        """Whether another plugin serves the resource, and our state of it has not changed since."""
        state = self._overtaken.get(resource)
        return state is not None and self.current.get(resource) is state

    def returned(self, resource: str) -> bool:
        """Record that the kubelet uses our stream of an overtaken resource again. Return False if the state has changed."""
        back = self.overtaken(resource)
        if back:
            self.taken(resource)
        return back

    def withdrawn(self, resource: str) -> None:
        """Drop the state of a withdrawn resource."""
        self._overtaken.pop(resource, None)
        self.current.pop(resource, None)
        self._again.pop(resource, None)
        self.changes.ring()

    def _update(self, resource: str, after: ResourceRegistration) -> None:
        before = self.of(resource)
        self.current[resource] = after
        self.changes.ring()
        for subscriber in self._subscribers:
            subscriber(resource, before, after)
