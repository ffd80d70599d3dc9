"""What happened between the kubelet and its plugins, in order, and a way to wait for it without polling."""

import asyncio
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from demo.stand_in_kubelet.device_table import KubeletPanicError

T = TypeVar("T")


class EventKind(StrEnum):
    """What an `Event` records."""

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
    FORGOTTEN = "resource forgotten"
    ADMITTED = "pod admitted"
    REJECTED = "pod rejected"
    RELEASED = "pod released"
    VIOLATION = "contract violated"


class Event(msgspec.Struct, frozen=True):
    """One thing that happened.

    `at` is time.perf_counter() in seconds: for a list, taken when its last byte was read, before it was decoded.
    `endpoint` is the plugin's socket path, `pid` its process id as the socket tells (0 where there is none). `changed`
    maps the device ids of a list that are new or whose health differs from the list before to what they are now.
    """

    kind: EventKind
    resource: str = ""
    endpoint: str = ""
    pid: int = 0
    text: str = ""
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)
    at: float = msgspec.field(default_factory=time.perf_counter)


class Journal:
    """Events and violations of one kubelet, over all its restarts; `panicked` is the cause of a panic until the next start."""

    def __init__(self) -> None:
        self.panicked = ""
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._changed = asyncio.Event()

    def note(self, kind: EventKind, resource: str = "", **more: Any) -> None:
        """Records an event, with these more of its fields, and wakes everybody who waits."""
        self.events.append(Event(kind, resource, **more))
        self.wake()

    def breach(self, resource: str, text: str) -> None:
        """Records that a plugin broke the contract."""
        said = f"{resource}: {text}" if resource else text
        self.violations.append(said)
        self.note(EventKind.VIOLATION, resource, text=said)

    def wake(self) -> None:
        """Makes those in `wait_for` look again, also where what they wait for is not an event of the kubelet."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
        """The first true value of `predicate`, tried now and after every event, never by polling.

        Raises TimeoutError after `timeout` seconds, saying `what` was awaited and what happened last, and
        KubeletPanicError when the kubelet panicked and `predicate` still is not true.
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
