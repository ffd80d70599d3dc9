"""The event sets of a simulated driver: registrations, and events that have not been read yet."""

import collections
import threading

import msgspec

from gpu_plugin.nvml.port import Event, EventSet, Handle


class GpuIsLostError(LookupError):
    """A GPU of the event set is lost, so waits return no events of its other GPUs either."""


class _Listener(msgspec.Struct):
    """An event set: handle and mask of each GPU, and its events.

    `undefined`: a registration failed. `gone`: a GPU of the set has vanished, and stays lost for this set even after its
    return. `ready` is the number of events that were in the set before a GPU of it was lost.
    """

    gpus: dict[int, tuple[Handle, int]] = msgspec.field(default_factory=dict)
    undefined: bool = False
    gone: bool = False
    ready: int = 0
    # The oldest of over 1024 unread events are dropped. NVML documents no limit.
    events: collections.deque[Event] = msgspec.field(default_factory=lambda: collections.deque(maxlen=1024))

    def has_lost(self, lost: frozenset[int]) -> bool:
        """Return whether waits fail, given the lost GPUs."""
        return not self.undefined and (self.gone or not lost.isdisjoint(self.gpus))


class EventSets:
    """All event sets of a node's driver, safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._listeners: dict[EventSet, _Listener] = {}
        self._lost: frozenset[int] = frozenset()
        self._last = 0

    def create(self) -> EventSet:
        """Make an event set without GPUs."""
        with self._changed:
            self._last += 1
            events = EventSet(self._last)
            self._listeners[events] = _Listener()
        return events

    def free(self, events: EventSet) -> bool:
        """Remove an event set and end its waits. Return False if the set does not exist."""
        with self._changed:
            known = self._listeners.pop(events, None) is not None
            self._changed.notify_all()
        return known

    def free_all(self) -> None:
        """Remove all event sets."""
        with self._changed:
            self._listeners.clear()
            self._changed.notify_all()

    def register(self, gpu: int, handle: Handle, mask: int, events: EventSet) -> bool:
        """Register a GPU in an event set for these kinds of events from now on. Return False if the set does not exist."""
        with self._changed:
            if not (listener := self._listeners.get(events)):
                return False
            _, known = listener.gpus.get(gpu, (handle, 0))
            listener.gpus[gpu] = handle, known | mask
        return True

    def undefine(self, events: EventSet) -> None:
        """Make a set return no more events, after a registration that ended with UNKNOWN; it should be freed (nvml.h)."""
        with self._changed:
            if listener := self._listeners.get(events):
                listener.undefined = True
                listener.events.clear()

    def lose(self, lost: frozenset[int]) -> None:
        """Set the lost GPUs: waits for a set with such a GPU fail, including waits that are under way.

        Events that are in the set already are returned first.
        """
        with self._changed:
            for listener in self._listeners.values():
                if not listener.has_lost(self._lost):
                    listener.ready = len(listener.events)
            self._lost = lost
            self._changed.notify_all()

    def vanish(self, gpu: int) -> None:
        """Remove a GPU from the bus: waits for its sets fail from now on (nvml.h). The events it has sent are kept."""
        with self._changed:
            for listener in self._listeners.values():
                listener.gone |= listener.gpus.pop(gpu, None) is not None
            self._changed.notify_all()

    def post(self, gpu: int, kind: int, data: int, *instances: int) -> int:
        """Add an event to each set in which the GPU is registered for this kind. Return the number of these sets."""
        receivers = 0
        with self._changed:
            for listener in self._listeners.values():
                handle, mask = listener.gpus.get(gpu, (None, 0))
                if handle is not None and mask & kind and not listener.undefined:
                    listener.events.append(Event(handle, kind, data, *instances))
                    receivers += 1
            self._changed.notify_all()
        return receivers

    def next_event(self, events: EventSet, seconds: float) -> Event | None:
        """Return and remove the oldest event. Wait for an event if there is none; return None if none arrives in time.

        Raises:
            GpuIsLostError: a GPU in the set is lost.
            LookupError: the event set does not exist, or was freed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready(events), seconds)
            if not (listener := self._listeners.get(events)):
                raise LookupError(events)
            lost = listener.has_lost(self._lost)
            if listener.events and (listener.gone or listener.ready or not lost):  # nvml.h: in this order
                listener.ready = max(0, listener.ready - 1)
                return listener.events.popleft()
            if lost:
                raise GpuIsLostError(events)
            return None

    def _ready(self, events: EventSet) -> bool:
        listener = self._listeners.get(events)
        return not listener or bool(listener.events) or listener.has_lost(self._lost)
