"""The life of the event set: which GPUs' events are asked for, whether they are heard, and when the set is made again.

No set is freed while a call is in it, and none is entered once its end was handed over. One that cannot be freed in time is
left behind, and another one takes its place: it costs less than GPUs of which nothing is heard. Where one GPU undid the set, or
is lost to the wait for it, the next one is made without that GPU, which is asked again later.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import anyio
import msgspec

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import EventDelivery
from gpu_plugin.nvml.events import (
    FIRST_REBUILD_PAUSE,
    FREE_REBUILDS,
    LONGEST_REBUILD_PAUSE,
    STABLE_AFTER,
    WAIT_MS,
    EventWaiter,
    LiveSet,
    Member,
    Outcome,
    Registered,
    WaitFailures,
    register,
    register_warily,
)
from gpu_plugin.nvml.port import Driver, Event, EventSet, NvmlError
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Job, settled

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that GPUs may take, all at once, to answer the request for their events; one that takes longer is asked no more
meanwhile, and its answer is taken when it comes."""

MAX_ABANDONED_SETS = 3
"""Event sets at most that are still to be freed: with so many, no other is made. Each may hold threads that hang."""

_UNANSWERED = "the driver has not answered the request for them"


class _PendingRequest(msgspec.Struct):
    """The request for a GPU's events that is under way, the set that it is for, and whether it has taken too long."""

    watched: Watched
    into: LiveSet
    job: Job[Registered]
    overdue: bool = False


class EventSubscription:
    """One event set for all GPUs, and the thread that waits for it. Everything here runs on the event loop."""

    def __init__(
        self,
        driver: Driver,
        calls: DriverCalls,
        deliver: Callable[[Event], None],
        upset: Callable[[], None],
        report: Callable[[str, EventDelivery], object],
    ) -> None:
        """Takes the callbacks for an event, for a wait that failed, and for whether events of the GPU of that uuid are heard."""
        self._driver = driver
        self._calls = calls
        self._deliver = deliver
        self._upset = upset
        self._report = report
        self._set: LiveSet | None = None
        self._left_behind: list[LiveSet] = []
        self._making: SlowCall[EventSet] = SlowCall(calls.begin)
        self._asked: list[_PendingRequest] = []
        self._listening = False
        self._wait_failures = WaitFailures()
        self._rebuilds = Backoff(FIRST_REBUILD_PAUSE, LONGEST_REBUILD_PAUSE, free=FREE_REBUILDS, stable=STABLE_AFTER)
        self._suspects: set[str] = set()
        self._unsupported = False
        self._no_set = ""
        self._stuck = False
        self._reported: dict[str, str] = {}
        self._logged: dict[str, str] = {}

    def trouble(self, uuid: str) -> str | None:
        """The reason why the events of a GPU do not arrive; empty if they do or there are none, None if not known yet."""
        if self._unsupported:
            return ""
        mine = self._set
        if mine is None:
            return self._no_set or None
        member = mine.members.get(uuid)
        if member is None or member.answer is None:
            return _UNANSWERED if any(each.overdue and each.watched.gpu.uuid == uuid for each in self._asked) else None
        if member.answer.outcome is Outcome.UNSUPPORTED:
            return ""
        if mine.undone or member.answer.outcome is not Outcome.HEARD:
            return mine.undone or member.answer.why
        if self._stuck:
            return "the call that waits for them does not come back"
        if self._rebuilds.failures > FREE_REBUILDS and anyio.current_time() - mine.born < STABLE_AFTER:
            return "the wait for them keeps failing"
        return ""

    def register_again(self, uuid: str) -> None:
        """The GPU is to be asked again: a registration does not survive what the GPU has been through."""
        if self._set is not None:
            self._set.members.pop(uuid, None)

    async def tend(self, gpus: Sequence[Watched], patience: float, *, retry: bool = True) -> bool:
        """Has the events of these GPUs asked for, as far as they are not.

        Makes the event set where there is none, and makes it again where it is good for nothing any more.

        Args:
            gpus: those that may be asked. One without a handle, or with a call under way, is left out this time.
            patience: seconds for each step, all GPUs at once.
            retry: whether to ask those again that refused.

        Returns:
            Whether the set was made again: what happened meanwhile was not heard.
        """
        patience, rebuilt = min(patience, PATIENCE), False
        self.collect()
        for _ in range(2):  # one GPU may undo the first set, and is known by then
            rebuilt |= await self._replace(patience)
            if not await self._make(patience):
                break
            await self._ask(gpus, patience, retry=retry)
            if self._set is None or not self._set.undone:
                break
        return rebuilt and self._set is not None

    def collect(self) -> None:
        """Takes the answers that have come, late ones among them: those GPUs can be asked other things again."""
        for asked in tuple(self._asked):
            if asked.job.done.done():
                self._asked.remove(asked)
                self._answered(asked)
        self._free_left_behind()

    def listen(self, patience: float) -> None:
        """Waits from now on for as long as there is something to wait on; where that is under way, sees whether it works.

        A wait that holds the thread for `patience` seconds more than it was asked to hears nothing.
        """
        self._listening = True
        self._wait()
        waiter = None if self._set is None else self._set.waiter
        stuck = waiter is not None and waiter.stuck(patience)
        if stuck != self._stuck:
            self._stuck = stuck
            self._report_members()

    def stop(self) -> None:
        """Lets the waiting thread end; what was asked for stays asked for."""
        self._listening = False
        if self._set is not None and self._set.waiter is not None:
            self._set.waiter.stop()

    async def leave(self, patience: float) -> bool:
        """Ends the wait and frees every event set, so that the driver can be closed. Returns whether that is done."""
        self._listening = False
        if self._making.begun:
            if not await self._making.wait(patience):
                return False
            self._made()
        self._retire("the driver is closed")
        if not await self._freed(self._left_behind, patience):
            return False
        self._suspects.clear()
        self._rebuilds.succeeded()
        self._no_set, self._unsupported = "", False  # the next driver may know more
        return True

    def report(self, uuids: Iterable[str]) -> None:
        """Report the delivery of events of these GPUs where it is not the one reported last.

        The first report says also that nothing is wrong: an earlier process may have had trouble. It is for GPUs whose health
        is kept already.
        """
        for uuid in tuple(uuids):
            why = self.trouble(uuid)
            if why is not None and why != self._reported.get(uuid):
                self._reported[uuid] = why
                self._report(uuid, EventDelivery(why))

    def _report_members(self) -> None:
        if self._set is not None:
            self.report(uuid for uuid in self._set.members if uuid in self._reported)

    # The set

    async def _make(self, patience: float) -> bool:
        """Whether there is an event set: one is made if it must. There is never a second request beside one that hangs."""
        if self._set is not None or self._unsupported:
            return self._set is not None
        if len(self._left_behind) >= MAX_ABANDONED_SETS:
            return False  # what undid the last one is said already
        self._making.begin(self._driver.event_set)
        in_time = await self._making.wait(patience)
        error = self._made() if in_time else TimeoutError(f"no answer for {patience:g} s")
        if error is None:
            return True
        self._unsupported = isinstance(error, NvmlError) and error.unsupported
        why = str(error) if isinstance(error, (NvmlError, TimeoutError)) else repr(error)
        if why != self._no_set:
            log.warning("the driver reports no events, health relies on polling: %s", why)
        self._no_set = why
        return False

    def _made(self) -> BaseException | None:
        """Takes the set that was asked for, which has come. Returns why there is none."""
        job = self._making.take()
        error = job.done.exception()
        if error is None:
            self._set, self._no_set = LiveSet(job.done.result(), anyio.current_time()), ""
        return error

    async def _replace(self, patience: float) -> bool:
        """Leaves a set that is good for nothing, and frees it if that can be done in time. Returns whether it was left."""
        old = self._set
        if old is None or not old.undone or not self._rebuilds.due(anyio.current_time()):
            return False
        if len(self._left_behind) >= MAX_ABANDONED_SETS:
            return False
        self._retire(old.undone)
        if not await self._freed([old], patience):
            log.warning("an event set is left behind, which a call to the driver holds: another one takes its place")
        return True

    def _retire(self, why: str) -> None:
        """From here on nothing enters the set; it is freed as soon as no call is in it."""
        if self._set is not None:
            if self._set.waiter is not None:
                self._set.waiter.stop()
            self._left_behind.append(self._set)
            self._set, self._stuck, self._no_set = None, False, why
        self._free_left_behind()

    def _free_left_behind(self) -> None:
        for each in self._left_behind:
            each.free(self._calls, self._driver.free_event_set)
        self._left_behind = [each for each in self._left_behind if not each.gone]

    async def _freed(self, sets: Sequence[LiveSet], patience: float) -> bool:
        """Gives sets that were left some time, for the wait to end and for their end. Returns whether they are freed."""
        sets, until = tuple(sets), anyio.current_time() + 2 * WAIT_MS / 1000
        for each in sets:
            await each.left(max(0.0, until - anyio.current_time()))
        self.collect()
        until = anyio.current_time() + patience
        for each in sets:
            await each.freed(max(0.0, until - anyio.current_time()))
        self._free_left_behind()
        return all(each.gone for each in sets)

    def _undo(self, undone: LiveSet, why: str) -> None:
        if undone is not self._set or undone.undone:
            return
        now = anyio.current_time()
        undone.undone = why
        self._rebuilds.failed(now, worked_for=now - undone.born)

    # Requests

    async def _ask(self, gpus: Sequence[Watched], patience: float, *, retry: bool) -> None:
        into, asked = self._set, []
        assert into is not None
        if into.undone:
            return
        for watched in gpus:
            handle, uuid = watched.handle, watched.gpu.uuid
            member = into.members.get(uuid)
            if handle is None or watched.pending is not None:
                continue
            if member is not None and member.handle == handle and (member.settled or not retry):
                continue
            into.members[uuid] = Member(handle)
            way = register_warily if uuid in self._suspects else register
            job = self._calls.begin(partial(way, self._driver, handle, into.events))
            into.registrations.add(job)
            watched.registering = job
            asked.append(_PendingRequest(watched, into, job))
        self._asked += asked
        until = anyio.current_time() + patience
        for each in asked:
            each.overdue = not await settled(each.job, max(0.0, until - anyio.current_time()))
        self.collect()

    def _answered(self, asked: _PendingRequest) -> None:
        watched, uuid = asked.watched, asked.watched.gpu.uuid
        asked.into.registrations.discard(asked.job)
        if watched.registering is asked.job:
            watched.registering = None
        error = asked.job.done.exception()
        answer = asked.job.done.result() if error is None else Registered(Outcome.REFUSED, repr(error))
        if answer.event is not None:
            self._deliver(answer.event)
        if answer.outcome is Outcome.UNDEFINED:
            self._undo(asked.into, answer.why)
            self._suspects.add(uuid)
        elif answer.outcome is not Outcome.REFUSED:
            self._suspects.discard(uuid)
        member = asked.into.members.get(uuid)
        if member is not None:
            member.answer = answer
        if answer.why and answer.why != self._logged.get(uuid):
            log.warning("GPU %s: its events are not received, health relies on polling: %s", uuid, answer.why)
        self._logged[uuid] = answer.why

    # The wait

    def _wait(self) -> None:
        """Begins to wait, if anyone listens, unless a wait is under way: another beside one that hangs would hang too."""
        mine = self._set
        if not self._listening or mine is None or (mine.waiter is not None and not mine.waiter.ended):
            return
        mine.waiter = EventWaiter(
            self._driver,
            mine.events,
            self._deliver,
            partial(self._failed, mine),
            partial(self._heard, mine),
            self._wait_failures,
            self._wait,
        )
        mine.waiter.start()

    def _failed(self, waited: LiveSet, error: Exception) -> None:
        """A wait failed. A GPU of the set that is lost undoes the set for the others."""
        if waited is not self._set:
            return
        if isinstance(error, NvmlError) and error.code == Return.GPU_IS_LOST:
            self._undo(waited, str(error))
            if self._rebuilds.failures > 1:  # without those that are lost to their looks it is lost all the same
                self._suspects |= waited.members.keys()
        self._upset()

    def _heard(self, waited: LiveSet, why: str) -> None:
        """Waits keep failing, and why; empty: one has worked."""
        if waited is not self._set:
            return
        if why:
            self._undo(waited, why)
        self._report_members()
