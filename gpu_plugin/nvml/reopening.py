"""Opens the driver and finds the GPUs; closes it or opens it again if that is requested or may help.

NVML finds GPUs only when it is opened, and keeps GPUs open until it is closed. So finding a new GPU and releasing a GPU both
require closing the driver. Time is counted in rounds.
"""

import logging
import time
from collections.abc import Sequence

import anyio
import msgspec

from gpu_plugin.config.times import utc
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.finding import PROBE_PATIENCE, Finder, in_order, merged, released_gpus, with_remembered
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Released, Roster
from gpu_plugin.nvml.session import AS_BEFORE, NOT_CLOSING, RETRY_PAUSES, DriverSession, Opened
from gpu_plugin.nvml.subscription import EventSubscription

log = logging.getLogger(__name__)

# Rounds in a row without an answer from any GPU after which the driver is opened again; less often if that did not help.
REOPEN_AFTER = 6


# Seconds for which a call about a GPU may prevent opening the driver again before the process must be restarted
RESTART_AFTER = 180.0


class Reason(msgspec.Struct, frozen=True):
    """The reason, as text. `alarming`: it was not requested. `late`: a late attempt has opened the driver, which is used."""

    words: str
    alarming: bool = False
    late: bool = False


class Blocked(msgspec.Struct, frozen=True):
    """A call about a GPU that has kept the driver from being reopened since that time, in Unix seconds and loop time."""

    gpu: Gpu
    wanted: str
    since: float
    at: float
    logged: bool = False

    def __str__(self) -> str:
        return (
            f"a restart of the plugin is needed (delete its pod, or restart its service): a call about GPU {self.gpu.index} "
            f"({self.gpu.uuid}) has not returned, and has prevented reopening the driver since {utc(self.since)}. Reopening it "
            f"is needed because {self.wanted}"
        )


class Reopening:
    """Opens and closes the driver for the monitor, and resets the state of its parts that depends on an opening.

    Attributes:
        rebooted: whether the node was booted since the driver was opened, as simulated nodes are.
        blocked_by: why the driver could not be closed or reopened, for people; empty if it could.
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
        """True if the driver has no handles of the GPUs that should be released."""
        roster = self._roster
        return not self._session.holds or (roster.in_use and roster.untouched.covers(roster.wanted))

    @property
    def holder(self) -> str:
        """The call to the driver that has not returned, so that the driver must not be closed; empty if all have."""
        if not self._calls.under_way:
            return ""
        about = f", about GPU {gpu.uuid}" if (gpu := self._hung) is not None else ""
        return self._session.hanging or f"a call to it has not returned{about}"

    @property
    def _hung(self) -> Gpu | None:
        """The first GPU with a call that has not returned."""
        return next((each.gpu for each in self._roster.gpus if each.pending and not each.pending.returned), None)

    @property
    def restart_needed(self) -> str:
        """Why only a restart of the process lets the driver be reopened, for people; empty if it can be reopened."""
        blocked = self._blocked
        if blocked is None or self._hung is None or anyio.current_time() - blocked.at < RESTART_AFTER:
            return ""
        return str(blocked)

    def answered(self, *, anyone: bool) -> None:
        """Count a round in which at least one GPU answered, or no GPU did."""
        self._rounds_without_answer = 0 if anyone else self._rounds_without_answer + 1

    async def first(self, remembered: Sequence[Gpu], rounds: int, timeout: float) -> Opened | None:
        """Open the driver for the first time, and find all GPUs except released GPUs. Return None if all are released.

        Raises NvmlError if there is no working driver, and TimeoutError if the driver does not answer.
        """
        roster, patience = self._roster, min(timeout, PROBE_PATIENCE)
        # Without remembered GPUs, the places of released GPUs are unknown: find all GPUs first, and release some afterwards.
        untouched = roster.untouched = roster.wanted if remembered else Released()
        self.rebooted = False  # the GPUs are read after the boot
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
        """Close the driver, or reopen it, if that is requested or may help and no call to it is under way.

        Return the driver's version and its number of GPUs; AS_BEFORE if it was only closed; None if nothing was done.
        """
        roster, session = self._roster, self._session
        why = self._reason(roster.bus.due_bus_ids(roster.gpus, rounds))
        if why is None:
            self._blocked = self._blocked if self._hung is not None else None
            return None
        in_use, was_open = roster.in_use, session.holds
        blocked_by = self.holder
        # A late attempt that succeeded is used, unless the driver was opened for GPUs that must not be used now.
        if not blocked_by and not why.late:
            blocked_by = await self.shut(min(timeout, PROBE_PATIENCE))
        if blocked_by and blocked_by != self.blocked_by:
            able = "reopened" if in_use else "closed"
            wanted = f"will be tried again; needed because {why.words}"
            log.warning("the driver cannot be %s now: %s; %s", able, blocked_by, wanted)
        self.blocked_by = blocked_by
        self._note_blocked(why)
        if blocked_by:
            return None
        if in_use or was_open:
            doing = "reopening the driver" if in_use else "closing the driver"
            log.log(logging.WARNING if why.alarming else logging.INFO, "%s: %s", doing, why.words)
        self.rebooted = False
        roster.reset()
        self._reports.reset()
        self._finder.reset()
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
        """Record since when a call about a GPU prevents reopening, and log once that this needs a restart."""
        gpu = self._hung if self.blocked_by and not self._session.hanging else None
        if gpu is None:
            self._blocked = None
        elif self._blocked is None:
            self._blocked = Blocked(gpu, why.words, time.time(), anyio.current_time())
        elif not self._blocked.logged and (words := self.restart_needed):
            log.error("%s", words)
            self._blocked = msgspec.structs.replace(self._blocked, logged=True)

    async def shut(self, patience: float) -> str:
        """Free the event set and close the driver. Return the reason if that failed; empty if it is closed."""
        if not await self._events.leave(patience):
            return "the wait for its events has not returned"
        return "" if await self._session.close_at_last(patience) else NOT_CLOSING

    async def _find_again(self, opened: Opened, rounds: int, timeout: float) -> None:
        """Find the GPUs again after opening the driver; the former handles are invalid."""
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
        await self._events.update(roster.watched(), timeout)

    def _reason(self, bound: Sequence[str]) -> Reason | None:
        """Return the reason to close or reopen the driver now, or None. `bound` are PCI bus ids newly bound to the driver."""
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
        if bound and session.is_open:
            return Reason(f"it was bound to {', '.join(bound)}")
        times, between = divmod(self._rounds_without_answer, REOPEN_AFTER)
        if times and not between and (not session.is_open or times in (1, 2, 4) or times % 8 == 0):
            return Reason(f"no GPU has answered for {self._rounds_without_answer} rounds", alarming=True)
        return None
