"""The event sets of a simulated driver: what each asked for, and the events that nobody has fetched yet."""

import collections
import threading

import msgspec

from gpu_plugin.nvml.port import Event, EventSet, Handle

_QUEUE_LENGTH = 1024
"""Events an event set holds while nobody waits; the oldest go first. A bound of our own: NVML documents none."""


class GpuIsLostError(LookupError):
    """A GPU that is registered in the event set is lost: nothing is heard of the others either."""


class _Listener(msgspec.Struct):
    """An event set: handle and mask of each GPU in it, its events, and whether a failed registration left it undefined.

    `gone`: a GPU of it has vanished, and stays lost to it even when it is back. `ready` is how many of the events were there
    before a GPU of it was lost.
    """

    gpus: dict[int, tuple[Handle, int]] = msgspec.field(default_factory=dict)
    undefined: bool = False
    gone: bool = False
    ready: int = 0
    events: collections.deque[Event] = msgspec.field(default_factory=lambda: collections.deque(maxlen=_QUEUE_LENGTH))


class EventSets:
    """All event sets of a node's driver, safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._listeners: dict[EventSet, _Listener] = {}
        self._lost: frozenset[int] = frozenset()
        self._last = 0

    def create(self) -> EventSet:
        """A new event set, in which no GPU is registered."""
        with self._changed:
            self._last += 1
            events = EventSet(self._last)
            self._listeners[events] = _Listener()
        return events

    def free(self, events: EventSet) -> bool:
        """Forgets an event set and ends the waits for it; False where there is none."""
        with self._changed:
            known = self._listeners.pop(events, None) is not None
            self._changed.notify_all()
        return known

    def free_all(self) -> None:
        """Forgets every event set."""
        with self._changed:
            self._listeners.clear()
            self._changed.notify_all()

    def register(self, gpu: int, handle: Handle, mask: int, events: EventSet) -> bool:
        """Adds these kinds of a GPU's events to an event set, from now on, with this handle; False where there is no such set."""
        with self._changed:
            if not (listener := self._listeners.get(events)):
                return False
            _, known = listener.gpus.get(gpu, (handle, 0))
            listener.gpus[gpu] = handle, known | mask
        return True

    def undefine(self, events: EventSet) -> None:
        """A registration ended with UNKNOWN: nothing is heard through the set any more, which is to be freed (nvml.h)."""
        with self._changed:
            if listener := self._listeners.get(events):
                listener.undefined = True
                listener.events.clear()

    def lose(self, lost: frozenset[int]) -> None:
        """These are the GPUs that are lost now: a wait for a set with one of them in it fails, be it under way or begun later.

        What is in the set by then is delivered first.
        """
        with self._changed:
            for listener in self._listeners.values():
                if not self._report_trouble(listener):
                    listener.ready = len(listener.events)
            self._lost = lost
            self._changed.notify_all()

    def vanish(self, gpu: int) -> None:
        """The GPU has left the bus: a wait for a set that it is in fails from now on (nvml.h); what it has sent is not lost."""
        with self._changed:
            for listener in self._listeners.values():
                listener.gone |= listener.gpus.pop(gpu, None) is not None
            self._changed.notify_all()

    def post(self, gpu: int, kind: int, data: int, *instances: int) -> int:
        """Queues an event in every event set that asked for that kind from that GPU; gives how many did."""
        heard = 0
        with self._changed:
            for listener in self._listeners.values():
                handle, mask = listener.gpus.get(gpu, (None, 0))
                if handle is not None and mask & kind and not listener.undefined:
                    listener.events.append(Event(handle, kind, data, *instances))
                    heard += 1
            self._changed.notify_all()
        return heard

    def next_event(self, events: EventSet, seconds: float) -> Event | None:
        """The oldest event not fetched yet, waiting for one; None when none came in time.

        Raises:
            GpuIsLostError: a GPU in the set is lost.
            LookupError: there is no such event set, or no longer.
        """

        def ready() -> bool:
            listener = self._listeners.get(events)
            return not listener or bool(listener.events) or self._report_trouble(listener)

        with self._changed:
            self._changed.wait_for(ready, seconds)
            if not (listener := self._listeners.get(events)):
                raise LookupError(events)
            trouble = self._report_trouble(listener)
            if listener.events and (listener.gone or listener.ready or not trouble):  # nvml.h: in this order
                listener.ready = max(0, listener.ready - 1)
                return listener.events.popleft()
            if trouble:
                raise GpuIsLostError(events)
            return None

    def _report_trouble(self, listener: _Listener) -> bool:
        return not listener.undefined and (listener.gone or not self._lost.isdisjoint(listener.gpus))
