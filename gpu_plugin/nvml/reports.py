"""Passes on what is seen and heard of GPUs, each under its uuid. An event reaches its own GPU, or none."""

import collections
import logging
from collections.abc import Callable, Iterator

import anyio

from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType
from gpu_plugin.health.observation import DriverEvent, Observation, XidEvent
from gpu_plugin.nvml.port import Driver, Event, Handle, NvmlError
from gpu_plugin.nvml.roster import Roster
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.threads import Job, settled

log = logging.getLogger(__name__)

# Events of unknown handles that are kept until the driver has said whose they are; the oldest go first.
MAX_UNKNOWN_EVENTS = 256
# Unknown handles that the driver is asked about at once at most: a question that hangs holds a thread.
MAX_HANDLE_LOOKUPS = 4


class Reports:
    """Everything here runs on the event loop. Of GPUs that are released nothing is told."""

    def __init__(
        self,
        driver: Driver,
        calls: DriverCalls,
        roster: Roster,
        observe: Callable[[str, Observation], bool],
        look: Callable[[str], None],
    ) -> None:
        """Takes the driver, which says whose events of unknown handles are, the GPUs, and who wants to know.

        `observe` takes in an observation of a GPU and returns whether another soon would settle something. `look` gets the uuid
        of a GPU of which an event was heard; empty where it is not known whose it is.
        """
        self._driver = driver
        self._calls = calls
        self._roster = roster
        self._observe = observe
        self._look = look
        self._unknown_events: collections.deque[Event] = collections.deque(maxlen=MAX_UNKNOWN_EVENTS)
        self._asked: dict[Handle, Job[str]] = {}
        self._foreign_handles: set[Handle] = set()
        self._failed: set[str] = set()

    def saw(self, uuid: str, seen: Observation) -> bool:
        """Passes an observation on. Returns whether another soon would settle something.

        Whoever takes it in may fail over one GPU: that is said once, and costs no other GPU anything.
        """
        if self._roster.is_released(uuid):
            return False
        try:
            return bool(self._observe(uuid, seen))
        except Exception:
            if uuid not in self._failed:
                self._failed.add(uuid)
                log.exception("GPU %s: what was seen of it could not be processed; logged once", uuid)
            return False

    def heard(self, event: Event) -> None:
        """Passes an event on by the handle it names; one of an unknown handle waits for `resolve_unknown_events`."""
        uuid = self._roster.by_handle.get(event.handle, "")
        if uuid:
            self._pass_on(uuid, event)
        else:
            self._unknown_events.append(event)
        self._look(uuid)

    def forget(self) -> None:
        """The driver was closed: a handle from before may come to mean another GPU, so nothing is asked about it any more."""
        if self._unknown_events:
            log.info(
                "the driver was closed before it said whose these events were, dropped: %d", len(self._unknown_events)
            )
        self._unknown_events.clear()
        self._asked.clear()
        self._foreign_handles.clear()

    async def resolve_unknown_events(self, patience: float) -> None:
        """Asks the driver whose the events of unknown handles are, for `patience` seconds; else they are nobody's.

        Where it takes longer, they are kept until it answers, and it is not asked about that handle again meanwhile.
        """
        events, until = list(self._unknown_events), anyio.current_time() + patience
        self._unknown_events.clear()
        for handle in dict.fromkeys([*self._asked, *(event.handle for event in events)]):
            mine = [event for event in events if event.handle == handle]
            uuid = self._roster.by_handle.get(handle) or await self._name(handle, until - anyio.current_time())
            if uuid is None:
                self._unknown_events.extend(mine)
                continue
            for event in mine if uuid else ():
                self._pass_on(uuid, event)
                self._look(uuid)
            if mine and not uuid and handle not in self._foreign_handles:
                self._foreign_handles.add(handle)  # said once
                kind, data = mine[0].kind, mine[0].data
                log.warning(
                    "an event (type %#x, data %d) came from no GPU known here, and counts against no GPU", kind, data
                )

    async def _name(self, handle: Handle, patience: float) -> str | None:
        """The uuid of the GPU that a handle is of, or is of a MIG device of; empty where the driver does not tell.

        None: it has not answered yet, or is to be asked when it has answered others.
        """
        job = self._asked.get(handle)
        if job is None:
            if len(self._asked) >= MAX_HANDLE_LOOKUPS or patience <= 0:
                return None
            job = self._asked[handle] = self._calls.begin(lambda: self._driver.uuid(handle))
            if not await settled(job, patience):
                log.warning("an event came from no GPU known here, and is kept until the driver says whose it is")
        if not job.done.done():
            return None
        self._asked.pop(handle, None)
        error = job.done.exception()
        if error is not None:
            if not isinstance(error, NvmlError):
                log.error("asking whose event it is failed: %r", error)
            return ""
        uuid = self._roster.owner(job.done.result())
        if uuid and uuid == job.done.result():  # the handle of a MIG device may come to mean another one
            self._roster.by_handle[handle] = uuid
        return uuid

    def _pass_on(self, uuid: str, event: Event) -> None:
        for kind in _bits(event.kind):
            if kind == EventType.XID_CRITICAL:
                instances = _instance(event.gpu_instance), _instance(event.compute_instance)
                self.saw(uuid, XidEvent(event.data, *instances))
            else:
                log.debug("GPU %s: driver event of type %#x, data %d", uuid, kind, event.data)
                self.saw(uuid, DriverEvent(kind))


def _bits(kind: int) -> Iterator[int]:
    while kind:
        lowest = kind & -kind
        yield lowest
        kind -= lowest


def _instance(number: int) -> int | None:
    return None if number == ALL_INSTANCES else number
