"""Opens the driver and finds the GPUs; closes it, or opens it again, where that is asked for or may help.

NVML finds GPUs when it is opened, and a handle stays open for as long as it does: so whatever is new, or is to be let go of,
needs that. Time is counted in rounds.
"""

import logging
import time
from collections.abc import Sequence

import anyio
import msgspec

from gpu_plugin.config.times import utc
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.finding import PROBE_PATIENCE, Finder, in_order, merged, released_gpus, with_remembered
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Released, Roster
from gpu_plugin.nvml.session import AS_BEFORE, NOT_CLOSING, RETRY_PAUSES, DriverCalls, DriverSession, Opened
from gpu_plugin.nvml.subscription import EventSubscription

log = logging.getLogger(__name__)

# Rounds in a row without an answer from any GPU after which the driver is reopened; if in vain, more rarely.
REOPEN_AFTER = 6


RESTART_AFTER = 180.0
"""Seconds for which a call about a GPU may keep the driver from being reopened before only a restart of the process helps."""


class Reason(msgspec.Struct, frozen=True):
    """Why, in words. `alarming` where nobody asked for it. `late`: it has opened by itself, and is taken as it is."""

    words: str
    alarming: bool = False
    late: bool = False


class Blocked(msgspec.Struct, frozen=True):
    """A call about a GPU that has kept the driver from being reopened since a time, in Unix seconds and event loop time."""

    gpu: Gpu
    wanted: str
    since: float
    at: float
    logged: bool = False

    def __str__(self) -> str:
        return (
            f"a restart of the plugin is needed (delete its pod, or restart its service): a call about GPU {self.gpu.index} "
            f"({self.gpu.uuid}) has not come back, and has kept the driver from being reopened since {utc(self.since)}, which is "
            f"wanted because {self.wanted}"
        )


class Reopening:
    """Opens and closes the driver for the parts of the monitor, and has them forget what does not outlive it.

    Attributes:
        rebooted: whether the node was booted since the driver was opened, as simulated ones are.
        blocked_by: what kept the driver from being closed or reopened, for people; empty where nothing does.
    """

    def __init__(
        self,
        driver: Driver,
        host: HostView,
        calls: DriverCalls,
        roster: Roster,
        session: DriverSession,
        events: EventSubscription,
        reports: Reports,
    ) -> None:
        self._finder = Finder(driver, host, calls)
        self._calls = calls
        self._roster = roster
        self._session = session
        self._events = events
        self._reports = reports
        self._rounds_without_answer = 0
        self.rebooted = False
        self.blocked_by = ""
        self._blocked: Blocked | None = None

    @property
    def released(self) -> bool:
        """Whether the driver has no handle of what is released."""
        roster = self._roster
        return not self._session.holds or (roster.in_use and roster.untouched.covers(roster.wanted))

    @property
    def holder(self) -> str:
        """The call to the driver that has not come back, under which it must not be closed; empty where there is none."""
        if not self._calls.under_way:
            return ""
        about = f", about GPU {gpu.uuid}" if (gpu := self._hung) is not None else ""
        return self._session.hanging or f"a call to it has not come back{about}"

    @property
    def _hung(self) -> Gpu | None:
        """The first GPU with a call that has not come back."""
        return next((each.gpu for each in self._roster.gpus if each.pending and not each.pending.done.done()), None)

    @property
    def restart_needed(self) -> str:
        """The reason, for people, if the driver can be reopened for other GPUs only by a restart of the process; else empty."""
        blocked = self._blocked
        if blocked is None or self._hung is None or anyio.current_time() - blocked.at < RESTART_AFTER:
            return ""
        return str(blocked)

    def answered(self, *, anyone: bool) -> None:
        """A round is over, in which a GPU answered, or none of those that were asked."""
        self._rounds_without_answer = 0 if anyone else self._rounds_without_answer + 1

    async def first(self, remembered: Sequence[Gpu], rounds: int, timeout: float) -> Opened | None:
        """Opens the driver for the first time, and finds every GPU that may be touched beside those remembered.

        None: all GPUs remembered are released, and the driver is left alone. Raises NvmlError where there is no driver, or it
        does not work, and TimeoutError where it does not answer.
        """
        roster, patience = self._roster, min(timeout, PROBE_PATIENCE)
        # Of GPUs that nobody remembers it is not known where they are: they are found first, and released then.
        untouched = roster.untouched = roster.wanted if remembered else Released()
        self.rebooted = False  # whatever is found now is of this boot
        opened = await self._session.open(timeout) if untouched.leaves(remembered) else None
        if opened is None:
            roster.gpus = in_order(released_gpus(remembered, untouched))
        elif untouched:
            reached = [gpu for gpu in remembered if gpu.uuid not in untouched]
            roster.gpus = in_order(
                [*released_gpus(remembered, untouched), *await self._finder.by_bus_id(reached, patience)]
            )
        else:
            found = await self._finder.by_index(opened.gpus, patience)
            roster.gpus = with_remembered(found, remembered, roster.bus.bindings)
        if opened is not None:
            roster.bus.opened(roster.gpus, rounds)
        roster.note_handles()
        return opened

    async def again(self, rounds: int, timeout: float) -> Opened | None:
        """Closes the driver, or reopens it, where that is asked for or may help, unless a call to it is under way.

        Returns what the driver says of itself, or AS_BEFORE where it was only closed; None where nothing came of it.
        """
        roster, session = self._roster, self._session
        why = self._reason(roster.bus.news(roster.gpus, rounds))
        if why is None:
            self._blocked = self._blocked if self._hung is not None else None
            return None
        in_use, was_open = roster.in_use, session.holds
        blocked_by = self.holder
        # One that answers at last is taken as it is, unless it was opened for others than are to be touched now.
        if not blocked_by and not why.late:
            blocked_by = await self.shut(min(timeout, PROBE_PATIENCE))
        if blocked_by and blocked_by != self.blocked_by:
            able = "reopened" if in_use else "closed"
            wanted = f"will be tried again; wanted because {why.words}"
            log.warning("the driver cannot be %s now: %s; %s", able, blocked_by, wanted)
        self.blocked_by = blocked_by
        self._note_blocked(why)
        if blocked_by:
            return None
        if in_use or was_open:
            doing = "reopening the driver" if in_use else "closing the driver"
            log.log(logging.WARNING if why.alarming else logging.INFO, "%s: %s", doing, why.words)
        self.rebooted = False
        roster.forget()
        self._reports.forget()
        self._finder.forget()
        if not roster.untouched.leaves(watched.gpu for watched in roster.gpus):
            return AS_BEFORE
        try:
            opened = await session.open(timeout, RETRY_PAUSES)
        except (NvmlError, TimeoutError) as error:
            log.warning("the driver cannot be opened: %s", error)
            return None
        await self._find_again(opened, rounds, timeout)
        return opened

    def _note_blocked(self, why: Reason) -> None:
        """Record since when the driver cannot be reopened because of a call about a GPU, and log once that it takes a restart."""
        gpu = self._hung if self.blocked_by and not self._session.hanging else None
        if gpu is None:
            self._blocked = None
        elif self._blocked is None:
            self._blocked = Blocked(gpu, why.words, time.time(), anyio.current_time())
        elif not self._blocked.logged and (words := self.restart_needed):
            log.error("%s", words)
            self._blocked = msgspec.structs.replace(self._blocked, logged=True)

    async def shut(self, patience: float) -> str:
        """Leaves the events and closes the driver. Returns what holds it; empty once it is closed."""
        if not await self._events.leave(patience):
            return "it holds the wait for its events"
        return "" if await self._session.close_at_last(patience) else NOT_CLOSING

    async def _find_again(self, opened: Opened, rounds: int, timeout: float) -> None:
        """Finds the GPUs: the driver counts them when it is opened, and a reloaded one knows no handle of before."""
        roster, patience = self._roster, min(timeout, PROBE_PATIENCE)
        if roster.untouched:
            gpus = [watched.gpu for watched in roster.gpus]
            reachable = [gpu for gpu in gpus if gpu.pci_bus_id and gpu.uuid not in roster.untouched]
            probed = await self._finder.by_bus_id(reachable, patience)
        else:
            there = [watched.gpu for watched in roster.gpus if watched.vanished_since is None]
            probed = await self._finder.by_index(opened.gpus, patience, there)
        roster.gpus = merged(roster.gpus, probed, every=not roster.untouched)
        roster.bus.opened(roster.gpus, rounds)
        roster.note_handles()
        await self._events.tend(roster.watched(), timeout)

    def _reason(self, news: Sequence[str]) -> Reason | None:
        """Why it is to be done now; None: it is not. `news` are PCI bus ids that the driver was bound to."""
        roster, session = self._roster, self._session
        changed = roster.untouched != roster.wanted
        if self.rebooted:
            return Reason("the node was booted")
        if not roster.in_use and (session.holds or changed):
            every = all(watched.gpu.uuid in roster.wanted for watched in roster.gpus)
            return Reason(f"all GPUs{'' if every else ' that can be reached alone'} are released")
        if changed:
            return Reason("GPUs were released or resumed")
        if session.answered_late:
            return Reason("it answers now", late=roster.in_use)
        if news and session.is_open:
            return Reason(f"it was bound to {', '.join(news)}")
        if self._unanswering:
            return Reason(f"no GPU has answered for {self._rounds_without_answer} rounds", alarming=True)
        return None

    @property
    def _unanswering(self) -> bool:
        times, between = divmod(self._rounds_without_answer, REOPEN_AFTER)
        return bool(times) and not between and (not self._session.is_open or times in (1, 2, 4) or times % 8 == 0)
