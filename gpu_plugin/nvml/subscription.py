"""Manages the NVML event set: registers GPUs, reports whether their events arrive, and replaces an unusable event set.

A set is not freed while a call uses it, and not used once freeing has begun. If a set cannot be freed in time, it is
abandoned and a new set is made: an unused set costs less than missing the events of GPUs. If one GPU made a set unusable, or
is lost so that waits fail, the next set is made without that GPU, which is registered again later.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import anyio
import msgspec

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import EventDelivery
from gpu_plugin.nvml.driver_calls import DriverCalls
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
from gpu_plugin.nvml.look_requests import LookRequests
from gpu_plugin.nvml.port import Driver, EventSet, NvmlError
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.threads import Job, SlowCall

log = logging.getLogger(__name__)

# Seconds that all GPUs together may take to answer the registration for events. The answer of a slower GPU is used when
# it arrives; until then the GPU gets no other call.
PATIENCE = 1.0

# Largest number of event sets that are not freed yet. With that many, no set is made, since each may keep threads
# blocked.
MAX_ABANDONED_SETS = 3

_UNANSWERED = "the driver has not answered the registration for them"


class _PendingRequest(msgspec.Struct):
    """A registration under way: the GPU, the event set, the call, and whether it has taken longer than its patience."""

    watched: Watched
    into: LiveSet
    job: Job[Registered]
    overdue: bool = False


class EventSubscription:
    """One event set for all GPUs, and the thread that waits for events. All methods run on the event loop."""

    def __init__(
        self,
        driver: Driver,
        calls: DriverCalls,
        reports: Reports,
        looks: LookRequests,
    ) -> None:
        """Events and their delivery go to `reports`. A wait that fails requests a look at all GPUs."""
        self._driver = driver
        self._calls = calls
        self._reports = reports
        self._looks = looks
        self._set: LiveSet | None = None
        self._abandoned: list[LiveSet] = []
        self._making: SlowCall[EventSet] = SlowCall(calls)
        self._pending: list[_PendingRequest] = []
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
        """Return why the events of a GPU do not arrive; empty if they do or are unsupported, None if not known yet."""
        if self._unsupported:
            return ""
        mine = self._set
        if mine is None:
            return self._no_set or None
        member = mine.members.get(uuid)
        if member is None or member.answer is None:
            return (
                _UNANSWERED if any(each.overdue and each.watched.gpu.uuid == uuid for each in self._pending) else None
            )
        if member.answer.outcome is Outcome.UNSUPPORTED:
            return ""
        if mine.unusable or member.answer.outcome is not Outcome.REGISTERED:
            return mine.unusable or member.answer.why
        if self._stuck:
            return "the call that waits for them has not returned"
        if self._rebuilds.failures > FREE_REBUILDS and anyio.current_time() - mine.born < STABLE_AFTER:
            return "the wait for them keeps failing"
        return ""

    def register_again(self, uuid: str) -> None:
        """Mark the GPU for a new registration, since a reset has dropped the last."""
        if self._set is not None:
            self._set.members.pop(uuid, None)

    async def update(self, gpus: Sequence[Watched], patience: float, *, retry: bool = True) -> bool:
        """Register these GPUs for events unless they are registered.

        Makes the event set if needed, and replaces an unusable set.

        Args:
            gpus: GPUs that may be registered. A GPU without a handle, or with a call under way, is skipped this time.
            patience: seconds for each step, for all GPUs together.
            retry: whether to repeat refused registrations.

        Returns:
            Whether the set was replaced: events in between were lost.
        """
        patience, rebuilt = min(patience, PATIENCE), False
        self.collect()
        for _ in range(2):  # if a GPU makes the first set unusable, the second set is made with that knowledge
            rebuilt |= await self._replace(patience)
            if not await self._make(patience):
                break
            await self._register(gpus, patience, retry=retry)
            if self._set is None or not self._set.unusable:
                break
        return rebuilt and self._set is not None

    def collect(self) -> None:
        """Process the answers that have arrived, including late answers. Other calls about those GPUs are possible again."""
        for asked in tuple(self._pending):
            if asked.job.returned:
                self._pending.remove(asked)
                self._process_answer(asked)
        self._free_abandoned()

    def listen(self, patience: float) -> None:
        """Wait for events from now on whenever there is an event set, and check whether the wait under way works.

        A wait that blocks for `patience` seconds longer than its timeout is reported as trouble.
        """
        self._listening = True
        self._wait()
        waiter = None if self._set is None else self._set.waiter
        stuck = waiter is not None and waiter.stuck(patience)
        if stuck != self._stuck:
            self._stuck = stuck
            self._report_members()

    def stop(self) -> None:
        """Let the waiting thread end. GPUs stay registered."""
        self._listening = False
        if self._set is not None and self._set.waiter is not None:
            self._set.waiter.stop()

    async def leave(self, patience: float) -> bool:
        """End the wait and free all event sets, so that the driver can be closed. Return whether this succeeded."""
        self._listening = False
        if self._making.begun:
            if not await self._making.wait(patience):
                return False
            self._finish_making()
        self._retire("the driver is closed")
        if not await self._freed(self._abandoned, patience):
            return False
        self._suspects.clear()
        self._rebuilds.succeeded()
        self._no_set, self._unsupported = "", False  # the next driver may be a version that supports events
        return True

    def report(self, uuids: Iterable[str]) -> None:
        """Report the event delivery of these GPUs if it differs from the last report.

        The first report is made even if events arrive, since an earlier process may have reported trouble. Call it only for
        GPUs that the health ledger has already.
        """
        for uuid in tuple(uuids):
            why = self.trouble(uuid)
            if why is not None and why != self._reported.get(uuid):
                self._reported[uuid] = why
                self._reports.observe(uuid, EventDelivery(why))

    def _report_members(self) -> None:
        if self._set is not None:
            self.report(uuid for uuid in self._set.members if uuid in self._reported)

    # The set

    async def _make(self, patience: float) -> bool:
        """Make an event set if needed. Return whether there is an event set. Only one such request is under way at a time."""
        if self._set is not None or self._unsupported:
            return self._set is not None
        if len(self._abandoned) >= MAX_ABANDONED_SETS:
            return False  # the log has the reason already
        self._making.begin(self._driver.event_set)
        in_time = await self._making.wait(patience)
        error = self._finish_making() if in_time else TimeoutError(f"no answer for {patience:g} s")
        if error is None:
            return True
        self._unsupported = isinstance(error, NvmlError) and error.unsupported
        why = str(error) if isinstance(error, (NvmlError, TimeoutError)) else repr(error)
        if why != self._no_set:
            log.warning("the driver reports no events, health relies on polling: %s", why)
        self._no_set = why
        return False

    def _finish_making(self) -> BaseException | None:
        """Process the finished request for an event set. Return the error if it failed."""
        job = self._making.take()
        error = job.done.exception()
        if error is None:
            self._set, self._no_set = LiveSet(job.done.result(), anyio.current_time()), ""
        return error

    async def _replace(self, patience: float) -> bool:
        """Abandon an unusable set, and free it if that can be done in time. Return whether it was abandoned."""
        old = self._set
        if old is None or not old.unusable or not self._rebuilds.due(anyio.current_time()):
            return False
        if len(self._abandoned) >= MAX_ABANDONED_SETS:
            return False
        self._retire(old.unusable)
        if not await self._freed([old], patience):
            log.warning("an event set is abandoned because a call to the driver still uses it: a new one is made")
        return True

    def _retire(self, why: str) -> None:
        """Stop using the set. It is freed as soon as no call uses it."""
        if self._set is not None:
            if self._set.waiter is not None:
                self._set.waiter.stop()
            self._abandoned.append(self._set)
            self._set, self._stuck, self._no_set = None, False, why
        self._free_abandoned()

    def _free_abandoned(self) -> None:
        for each in self._abandoned:
            each.free(self._calls, self._driver)
        self._abandoned = [each for each in self._abandoned if not each.gone]

    async def _freed(self, sets: Sequence[LiveSet], patience: float) -> bool:
        """Give abandoned sets some time for the wait to end and to be freed. Return whether all are freed."""
        sets, until = tuple(sets), anyio.current_time() + 2 * WAIT_MS / 1000
        for each in sets:
            await each.left(max(0.0, until - anyio.current_time()))
        self.collect()
        until = anyio.current_time() + patience
        for each in sets:
            await each.freed(max(0.0, until - anyio.current_time()))
        self._free_abandoned()
        return all(each.gone for each in sets)

    def _mark_unusable(self, event_set: LiveSet, why: str) -> None:
        if event_set is not self._set or event_set.unusable:
            return
        now = anyio.current_time()
        event_set.unusable = why
        self._rebuilds.failed(now, worked_for=now - event_set.born)

    # Requests

    async def _register(self, gpus: Sequence[Watched], patience: float, *, retry: bool) -> None:
        into, asked = self._set, []
        assert into is not None
        if into.unusable:
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
        self._pending += asked
        until = anyio.current_time() + patience
        for each in asked:
            each.overdue = not await each.job.wait(max(0.0, until - anyio.current_time()))
        self.collect()

    def _process_answer(self, asked: _PendingRequest) -> None:
        watched, uuid = asked.watched, asked.watched.gpu.uuid
        asked.into.registrations.discard(asked.job)
        if watched.registering is asked.job:
            watched.registering = None
        error = asked.job.done.exception()
        answer = asked.job.done.result() if error is None else Registered(Outcome.REFUSED, repr(error))
        if answer.event is not None:
            self._reports.receive(answer.event)
        if answer.outcome is Outcome.UNDEFINED:
            self._mark_unusable(asked.into, answer.why)
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
        """Start a waiter if listening, unless a waiter is running: a second waiter would block like the first."""
        mine = self._set
        if not self._listening or mine is None or (mine.waiter is not None and not mine.waiter.ended):
            return
        mine.waiter = EventWaiter(
            self._driver,
            mine.events,
            self._reports.receive,
            partial(self._failed, mine),
            partial(self._waiting_changed, mine),
            self._wait_failures,
            self._wait,
        )
        mine.waiter.start()

    def _failed(self, waited: LiveSet, error: Exception) -> None:
        """Handle a failed wait. If a GPU of the set is lost, the set is unusable for all of its GPUs."""
        if waited is not self._set:
            return
        if isinstance(error, NvmlError) and error.code == Return.GPU_IS_LOST:
            self._mark_unusable(waited, str(error))
            if self._rebuilds.failures > 1:  # GPUs that looks find lost are left out already; so another GPU is lost
                self._suspects |= waited.members.keys()
        self._looks.all_gpus()

    def _waiting_changed(self, waited: LiveSet, why: str) -> None:
        """Handle a change of whether waits work. `why` is the reason if they keep failing; empty if a wait has succeeded."""
        if waited is not self._set:
            return
        if why:
            self._mark_unusable(waited, why)
        self._report_members()
