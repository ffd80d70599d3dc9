"""Passes on observations and events of GPUs, each with the GPU's uuid. An event counts only for the GPU it names."""

import collections
import logging
from collections.abc import Callable, Iterator

import anyio

from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType
from gpu_plugin.health.observation import DriverEvent, Observation, XidEvent
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.look_requests import LookRequests
from gpu_plugin.nvml.port import Driver, Event, Handle, NvmlError
from gpu_plugin.nvml.roster import Roster
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)

# Largest number of events of unknown handles that are kept until the driver reports the GPU; the oldest are dropped first.
MAX_UNKNOWN_EVENTS = 256
# Largest number of unknown handles to query at once: a query that hangs blocks a thread.
MAX_HANDLE_LOOKUPS = 4


class Reports:
    """Passes on observations, except of released GPUs. All methods run on the event loop."""

    def __init__(
        self,
        driver: Driver,
        calls: DriverCalls,
        roster: Roster,
        observe: Callable[[str, Observation], bool],
        looks: LookRequests,
    ) -> None:
        """Store the driver, which resolves unknown handles, the GPUs, and the requests for looks, which each event makes.

        `observe` processes an observation of a GPU and returns whether another look soon would settle a question.
        """
        self._driver = driver
        self._calls = calls
        self._roster = roster
        self._observe = observe
        self._looks = looks
        self._unknown_events: collections.deque[Event] = collections.deque(maxlen=MAX_UNKNOWN_EVENTS)
        self._queries: dict[Handle, Job[str]] = {}
        self._foreign_handles: set[Handle] = set()
        self._failed: set[str] = set()

    def observe(self, uuid: str, seen: Observation) -> bool:
        """Pass on an observation. Return whether another look soon would settle a question.

        An error in processing is logged once for each GPU and does not affect other GPUs.
        """
        if self._roster.is_released(uuid):
            return False
        try:
            return bool(self._observe(uuid, seen))
        except Exception:
            if uuid not in self._failed:
                self._failed.add(uuid)
                log.exception("GPU %s: an observation of it could not be processed; logged once", uuid)
            return False

    def receive(self, event: Event) -> None:
        """Pass on an event to the GPU of its handle. If the handle is unknown, keep it for `resolve_unknown_events`."""
        uuid = self._roster.by_handle.get(event.handle, "")
        if uuid:
            self._pass_on(uuid, event)
        else:
            self._unknown_events.append(event)
        self._looks.event_arrived(uuid)

    def reset(self) -> None:
        """Drop the unknown handles after the driver was closed: a handle may refer to another GPU in the next opening."""
        if self._unknown_events:
            log.info(
                "the driver was closed before it reported the GPUs of some events, dropped: %d",
                len(self._unknown_events),
            )
        self._unknown_events.clear()
        self._queries.clear()
        self._foreign_handles.clear()

    async def resolve_unknown_events(self, patience: float) -> None:
        """Query the driver for the GPUs of unknown handles, for up to `patience` seconds. Drop events of unknown GPUs.

        If a query takes longer, its events are kept until the driver answers, and that handle is not queried again.
        """
        events, until = list(self._unknown_events), anyio.current_time() + patience
        self._unknown_events.clear()
        for handle in dict.fromkeys([*self._queries, *(event.handle for event in events)]):
            mine = [event for event in events if event.handle == handle]
            uuid = self._roster.by_handle.get(handle) or await self._name(handle, until - anyio.current_time())
            if uuid is None:
                self._unknown_events.extend(mine)
                continue
            for event in mine if uuid else ():
                self._pass_on(uuid, event)
                self._looks.event_arrived(uuid)
            if mine and not uuid and handle not in self._foreign_handles:
                self._foreign_handles.add(handle)  # logged once
                kind, data = mine[0].kind, mine[0].data
                log.warning(
                    "an event (type %#x, data %d) came from an unknown GPU, and counts against no GPU", kind, data
                )

    async def _name(self, handle: Handle, patience: float) -> str | None:
        """Return the uuid of the GPU with this handle, or with a MIG device of this handle; empty if it is unknown.

        None: the driver has not answered yet, or too many queries are under way.
        """
        job = self._queries.get(handle)
        if job is None:
            if len(self._queries) >= MAX_HANDLE_LOOKUPS or patience <= 0:
                return None
            job = self._queries[handle] = self._calls.begin(lambda: self._driver.uuid(handle))
            if not await job.wait(patience):
                log.warning("an event came from an unknown GPU, and is kept until the driver reports which GPU it is")
        if not job.returned:
            return None
        self._queries.pop(handle, None)
        error = job.done.exception()
        if error is not None:
            if not isinstance(error, NvmlError):
                log.error("querying the GPU of an event failed: %r", error)
            return ""
        uuid = self._roster.owner(job.done.result())
        if uuid and uuid == job.done.result():  # not for a MIG device: its handle may refer to another device later
            self._roster.by_handle[handle] = uuid
        return uuid

    def _pass_on(self, uuid: str, event: Event) -> None:
        for kind in _bits(event.kind):
            if kind == EventType.XID_CRITICAL:
                instances = _instance(event.gpu_instance), _instance(event.compute_instance)
                self.observe(uuid, XidEvent(event.data, *instances))
            else:
                log.debug("GPU %s: driver event of type %#x, data %d", uuid, kind, event.data)
                self.observe(uuid, DriverEvent(kind))


def _bits(kind: int) -> Iterator[int]:
    while kind:
        lowest = kind & -kind
        yield lowest
        kind -= lowest


def _instance(number: int) -> int | None:
    return None if number == ALL_INSTANCES else number
