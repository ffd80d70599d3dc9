"""The events between the kubelet and its plugins, in order, and a way to wait for events without polling."""

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

    `at` is time.perf_counter() in seconds: for a list, when its last byte was read, before it was decoded. `endpoint` is the
    plugin's socket path, and `pid` its process id from the socket (0 if unknown). `changed` has the device ids of a list that
    are new or whose health differs from the list before, each with its present health.
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
        """Record an event with these further fields, and wake all waiting tasks."""
        self.events.append(Event(kind, resource, **more))
        self.wake()

    def breach(self, resource: str, text: str) -> None:
        """Record that a plugin broke the contract."""
        sentence = f"{resource}: {text}" if resource else text
        self.violations.append(sentence)
        self.note(EventKind.VIOLATION, resource, text=sentence)

    def wake(self) -> None:
        """Make the tasks in `wait_for` check their predicates, also after changes that are no events of the kubelet."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
        """Return the first true value of `predicate`, which is called now and after each event, without polling.

        Raises TimeoutError after `timeout` seconds, with `what` and the last events, and KubeletPanicError if the kubelet
        panicked and `predicate` is still not true.
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
