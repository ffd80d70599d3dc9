"""The life of the event set: which GPUs' events are asked for, whether they are heard, and when the set is made anew.

A set is freed before the driver is closed and before another takes its place, and never while a call is in it. Where one
GPU undid the set, or is lost to the wait for it, the next one is made without that GPU, which is asked again later.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import EventDelivery
from gpu_plugin.nvml.calls import DriverCalls
from gpu_plugin.nvml.events import WAIT_MS, EventWaiter, Setbacks
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError
from gpu_plugin.nvml.registration import Outcome, Registered, register, register_warily
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.threads import Job, settled

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that GPUs may take, all at once, to answer the request for their events; one that takes longer is asked no more
meanwhile, and its answer is taken when it comes."""

LONGEST_REBUILD_PAUSE = 60.0
"""Seconds at most between two event sets, where each of them is lost to the wait again."""


@dataclass(slots=True)
class _Member:
    """A GPU that was asked for its events, by which handle, and the answer; None: not yet."""

    handle: Handle
    answer: Registered | None = None

    @property
    def settled(self) -> bool:
        return self.answer is not None and self.answer.outcome in (Outcome.HEARD, Outcome.UNSUPPORTED)


class EventSubscription:
    """One event set for all GPUs, and the thread that waits for it. Everything here runs on the event loop."""

    def __init__(
        self,
        driver: Driver,
        calls: DriverCalls,
        deliver: Callable[[Event], None],
        upset: Callable[[], None],
        tell: Callable[[str, EventDelivery], None],
    ) -> None:
        """Takes the callbacks for an event, for a wait that failed, and for whether events of the GPU of that uuid are heard."""
        self._driver = driver
        self._calls = calls
        self._deliver = deliver
        self._upset = upset
        self._tell = tell
        self._events: EventSet | None = None
        self._making: Job[EventSet] | None = None
        self._freeing: Job[None] | None = None
        self._waiter: EventWaiter | None = None
        self._leaving: EventWaiter | None = None
        self._setbacks = Setbacks()
        self._members: dict[str, _Member] = {}
        self._suspects: set[str] = set()
        self._undone = False
        self._lost_waits = 0
        self._not_before = 0.0
        self._unsupported = False
        self._no_set = ""
        self._deaf = ""
        self._stuck = False
        self._told: dict[str, str] = {}
        self._said: dict[str, str] = {}

    def trouble(self, uuid: str) -> str:
        """Why no event of a GPU is heard; empty where they are, where there are none, and where it was not asked yet."""
        member = self._members.get(uuid)
        if self._unsupported:
            return ""
        if self._events is None:
            return self._no_set
        if member is None or member.answer is None or member.answer.outcome is Outcome.UNSUPPORTED:
            return ""
        if member.answer.outcome is not Outcome.HEARD:
            return member.answer.why
        return "the call that waits for them does not come back" if self._stuck else self._deaf

    def again(self, uuid: str) -> None:
        """The GPU is to be asked anew: a registration does not survive what the GPU has been through."""
        self._members.pop(uuid, None)

    async def tend(self, gpus: Sequence[Watched], patience: float, *, retry: bool = True) -> bool:
        """Has the events of these GPUs asked for, as far as they are not, and tells what changed for whom.

        Makes the event set where there is none, and makes it anew where it is good for nothing any more.

        Args:
            gpus: those that may be asked. One without a handle, or with a call under way, is left out this time.
            patience: seconds for each step, all GPUs at once.
            retry: whether to ask those again that refused.

        Returns:
            Whether the set was made anew: what happened meanwhile was not heard.
        """
        patience, anew = min(patience, PATIENCE), False
        self.collect(gpus)
        for _ in range(2):  # one GPU may undo the first set, and is known by then
            if self._undone and anyio.current_time() >= self._not_before:
                if not await self._drop(gpus, patience):
                    break
                anew = True
            if not await self._make(patience):
                break
            await self._ask(gpus, patience, retry=retry)
            if not self._undone:
                break
        self.tell(each.gpu.uuid for each in gpus)
        return anew and self._events is not None

    def collect(self, gpus: Iterable[Watched]) -> None:
        """Takes the answers that have come, late ones among them: those GPUs can be asked other things again."""
        for watched in gpus:
            job = watched.registering
            if job is None or not job.done.done():
                continue
            watched.registering = None
            member, uuid = self._members.get(watched.gpu.uuid), watched.gpu.uuid
            error = job.done.exception()
            answer = job.done.result() if error is None else Registered(Outcome.REFUSED, repr(error))
            if answer.event is not None:
                self._deliver(answer.event)
            if answer.outcome is Outcome.UNDEFINED:
                self._undone = True
                self._suspects.add(uuid)
            elif answer.outcome is not Outcome.REFUSED:
                self._suspects.discard(uuid)
            if member is not None:
                member.answer = answer
            if answer.why and answer.why != self._said.get(uuid):
                log.warning("GPU %s: no event of it is heard, health relies on polling: %s", uuid, answer.why)
            self._said[uuid] = answer.why

    def listen(self, patience: float) -> None:
        """Begins to wait as soon as there is something to wait on; where that is under way, sees whether it works.

        A wait that holds the thread for `patience` seconds more than it was asked to hears nothing.
        """
        held = self._leaving is not None and not self._leaving.ended  # another would be held as well
        if self._waiter is None and self._events is not None and not held:
            self._waiter = EventWaiter(
                self._driver, self._events, self._deliver, self._failed, self._heard, self._setbacks
            )
            self._waiter.start()
        waiter = self._waiter or self._leaving
        stuck = waiter is not None and waiter.stuck(patience)
        if stuck != self._stuck:
            self._stuck = stuck
            self.tell(tuple(self._members))

    def stop(self) -> None:
        """Lets the waiting thread end; what was asked for stays asked for."""
        if self._waiter is not None:
            self._waiter.stop()
            self._leaving = self._waiter
        self._waiter = None

    async def leave(self, gpus: Sequence[Watched], patience: float) -> bool:
        """Ends the wait and frees the event set, so that the driver can be closed. Returns whether that is done."""
        making = self._making
        if making is not None:
            if not making.done.done():
                return False
            self._making = None
            self._events = making.done.result() if making.done.exception() is None else None
        if not await self._drop(gpus, patience):
            return False
        self._suspects.clear()
        self._unsupported = False  # the next driver may know more
        return True

    def tell(self, uuids: Iterable[str]) -> None:
        """Tells of those of these GPUs for which it changed whether their events are heard."""
        for uuid in tuple(uuids):
            why = self.trouble(uuid)
            if why != self._told.get(uuid, ""):
                self._told[uuid] = why
                self._tell(uuid, EventDelivery(why))

    async def _make(self, patience: float) -> bool:
        """Whether there is an event set: one is made if it must. There is never a second request beside one that hangs."""
        if self._events is not None or self._unsupported:
            return self._events is not None
        if self._making is None:
            self._making = self._calls.begin(self._driver.event_set)
        job = self._making
        try:
            if not await settled(job, patience):
                raise TimeoutError(f"no answer for {patience:g} s")
            self._making = None
            self._events = job.done.result()
        except (NvmlError, TimeoutError) as error:
            self._unsupported = isinstance(error, NvmlError) and error.unsupported
            if str(error) != self._no_set:
                log.warning("the driver reports no events, health relies on polling: %s", error)
            self._no_set = str(error)
            return False
        self._no_set = ""
        return True

    async def _ask(self, gpus: Sequence[Watched], patience: float, *, retry: bool) -> None:
        events, asked = self._events, []
        assert events is not None
        for watched in gpus:
            handle, member = watched.handle, self._members.get(watched.gpu.uuid)
            if handle is None or watched.pending is not None:
                continue
            if member is not None and member.handle == handle and (member.settled or not retry):
                continue
            self._members[watched.gpu.uuid] = _Member(handle)
            watched.registering = self._registration(handle, events, wary=watched.gpu.uuid in self._suspects)
            asked.append(watched.registering)
        until = anyio.current_time() + patience
        for job in asked:
            await settled(job, max(0.0, until - anyio.current_time()))
        self.collect(gpus)

    def _registration(self, handle: Handle, events: EventSet, *, wary: bool) -> "Job[Registered]":
        way, driver = register_warily if wary else register, self._driver
        return self._calls.begin(lambda: way(driver, handle, events))

    async def _drop(self, gpus: Iterable[Watched], patience: float) -> bool:
        """Ends the wait and frees the set. Returns whether that is done: not while a call is in it."""
        self.stop()
        if self._leaving is not None:
            if not await self._leaving.left(2 * WAIT_MS / 1000):
                return False
            self._leaving = None
        if any(watched.registering is not None and not watched.registering.done.done() for watched in gpus):
            return False
        events = self._events
        if events is not None and self._freeing is None:
            self._freeing = self._calls.begin(lambda: self._driver.free_event_set(events))
        if self._freeing is not None:
            if not await settled(self._freeing, patience):
                return False
            error, self._freeing = self._freeing.done.exception(), None
            if error is not None:
                log.debug("an event set cannot be freed: %s", error)
        self._events, self._undone, self._stuck = None, False, False
        self._members.clear()
        return True

    def _failed(self, error: Exception) -> None:
        """A wait failed. A GPU of the set that is lost undoes the set for the others."""
        if isinstance(error, NvmlError) and error.code == Return.GPU_IS_LOST:
            self._undone = True
            self._lost_waits += 1
            if self._lost_waits > 1:  # without those that are lost to their looks it is lost all the same
                self._suspects |= self._members.keys()
            if self._lost_waits > 2:
                pause = min(2.0**self._lost_waits, LONGEST_REBUILD_PAUSE)
                self._not_before = anyio.current_time() + pause
        self._upset()

    def _heard(self, why: str) -> None:
        """Waits keep failing, and why; empty: one has worked."""
        if not why:
            self._lost_waits = 0
        self._deaf = why
        self.tell(tuple(self._members))
