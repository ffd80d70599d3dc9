"""A log of the events between the kubelet and its plugins. Callers can wait for an event without polling."""

import asyncio
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from demo.stand_in_kubelet.device_table import KubeletPanicError

T = TypeVar("T")


class EventKind(StrEnum):
    """The kind of an `Event`."""

    STARTED = "kubelet started"
    STOPPED = "kubelet stopped"
    PANICKED = "kubelet panicked"
    REGISTER = "Register received"
    REGISTERED = "registered"
    REFUSED = "Register refused"
    STREAM_OPENED = "ListAndWatch opened"
    LIST = "list received"
    STREAM_ENDED = "ListAndWatch ended"
    RETIRED = "free device ids left the list"
    REMOVED = "resource removed"
    ADMITTED = "pod admitted"
    REJECTED = "pod rejected"
    RELEASED = "pod released"
    VIOLATION = "contract violated"


class Event(msgspec.Struct, frozen=True):
    """One event.

    Attributes:
        endpoint: the plugin's socket path.
        pid: the plugin's process id, read from the socket; 0 if unknown or not applicable.
        changed: for a list, the present health of each device id that is new or whose health changed since the list before.
        at: time.perf_counter() in seconds; for a list, the time at which its last byte was read, before it was decoded.
    """

    kind: EventKind
    resource: str = ""
    endpoint: str = ""
    pid: int = 0
    text: str = ""
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)
    at: float = msgspec.field(default_factory=time.perf_counter)


class Journal:
    """Events and violations of one kubelet, over all its restarts. `panicked` is the cause of a panic until the next start."""

    def __init__(self) -> None:
        self.panicked = ""
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._changed = asyncio.Event()

    def note(self, kind: EventKind, resource: str = "", **more: Any) -> None:
        """Record an event with the fields `more`, and wake all calls of `wait_for`."""
        self.events.append(Event(kind, resource, **more))
        self.wake()

    def breach(self, resource: str, text: str) -> None:
        """Record that a plugin broke the contract."""
        violation = f"{resource}: {text}" if resource else text
        self.violations.append(violation)
        self.note(EventKind.VIOLATION, resource, text=violation)

    def wake(self) -> None:
        """Make all calls of `wait_for` check their predicates again, also for changes that are not events of the kubelet."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
        """Return the first true value of `predicate`, which is called now and after every event.

        Raises TimeoutError after `timeout` seconds, with `what` (the awaited state) and the last six events in its text, and
        KubeletPanicError if the kubelet panicked and `predicate` is still not true.
        """
        try:
            async with asyncio.timeout(timeout):
                while not (value := predicate()):
                    if self.panicked:
                        raise KubeletPanicError(self.panicked)
                    await self._changed.wait()
                return value
        except TimeoutError:
            last = "; ".join(f"{e.kind} {e.resource} {e.text}".strip() for e in self.events[-6:])
            raise TimeoutError(f"not within {timeout:g} s: {what or 'the awaited state'}. Last: {last}") from None
