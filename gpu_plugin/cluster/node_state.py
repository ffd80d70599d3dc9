"""Keeps the condition and the taint of our Node up to date by comparing the wanted state with the known state."""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.node_api import NodeApi, NodeState
from gpu_plugin.cluster.node_condition import (
    CONDITION,
    TAINT,
    ConditionClock,
    ConditionContent,
    GpuFitness,
    tainted,
    wanted,
)
from gpu_plugin.runtime.backoff import IN_CLUSTER, START_SPREAD, Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.records import OwnMarks

log = logging.getLogger(__name__)

# Seconds between two checks of the wanted state: at least, and if `changed` is not called. A check alone sends no request.
SOON = 0.1
LOOK = 15.0

# Seconds until the Node's taints are read again while our taint is wanted: another program may have removed it.
RECHECK = 3600.0

# Seconds until the next attempt after a failure: at first, and at most. It writes the state that is wanted then.
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 300.0


class EnabledReports(msgspec.Struct, frozen=True):
    """The reports that the settings enable.

    Attributes:
        condition: whether the Node gets the condition.
        effect: the effect of the taint; empty for no taint.
        look: whether any report to the cluster is enabled. Then the Node is read once, to find marks of an earlier process.
    """

    condition: bool = False
    effect: str = ""
    look: bool = False


class _Attempts(msgspec.Struct):
    """The attempts to write the condition or the taint: the newest failure, its time, and the time of the next attempt."""

    trouble: str = ""
    failed_at: float = 0.0
    backoff: Backoff = msgspec.field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER))

    def failed(self, why: str, now: float, dice: float) -> None:
        """Record a failed attempt at `now`, in seconds of a monotonic clock. `dice` in [0, 1) makes the pause random."""
        self.trouble, self.failed_at = why, now
        self.backoff.failed(now, dice)

    def succeeded(self) -> None:
        """Record a successful attempt."""
        self.trouble = ""
        self.backoff.succeeded()

    def hasten(self) -> None:
        """Shorten the pause to FIRST_PAUSE, since the wanted state has changed."""
        self.backoff.not_before = min(self.backoff.not_before, self.failed_at + FIRST_PAUSE)


class ReportedNode(Protocol):
    """The node whose condition and taint are reported."""

    def enabled_reports(self) -> EnabledReports:
        """The reports that the settings enable."""

    def fitness(self) -> tuple[Sequence[GpuFitness], str | None]:
        """The fitness of the node's GPUs, and why no GPU can be reached; see `wanted` for the latter."""

    async def write_marks(self, marks: OwnMarks) -> object:
        """Write our marks on the Node to the state directory."""


class NodeStateKeeper:
    """Writes the condition and the taint when they differ from the wanted state, and renews the condition's heartbeat."""

    def __init__(
        self,
        api: NodeApi,
        node: ReportedNode,
        marks: OwnMarks,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Keep the Node of `api` up to date. The state directory has `marks`, our marks on the Node.

        `clock` returns seconds of a monotonic clock, `wall` Unix time in seconds, and `dice` a random number in [0, 1).
        """
        what = f"condition and taint of node {api.node_name}"
        self._trouble = LogOnChange(log, f"{what} cannot be written: %s", over=f"{what} are written again")
        self._api = api
        self._node = node
        self._marks = marks
        self._clock = clock
        self._wall = wall
        self._dice = dice
        self._bell = Pulse()
        self._pending = False
        self._times = ConditionClock()
        # The effect of our taint, as it was last read or written; empty for no taint, None if it is not known.
        self._effect: str | None = None
        self._checked = self._began = 0.0
        self._read = self._looked = False
        self._uid = ""
        self._condition, self._taint = _Attempts(), _Attempts()

    @property
    def trouble(self) -> str:
        """Why the newest attempt failed; empty if it succeeded."""
        return self._trouble.text

    def changed(self) -> None:
        """Check the wanted state soon. Call it from the event loop's thread."""
        self._pending = True
        for each in (self._condition, self._taint):
            each.hasten()
        self._bell.ring()

    async def run(self) -> None:
        """Keep the condition and the taint up to date. Never returns."""
        self._began = self._clock()
        await anyio.sleep(START_SPREAD * self._dice())
        while True:
            self._pending = False
            wait = await self._once()
            self._log_troubles()
            if not self._pending:  # `changed` may have been called during a request
                await self._bell.wait(wait)

    async def _once(self) -> float | None:
        """Write the reports that are due. Returns the seconds until the next check; None if no report is enabled."""
        asked = self._node.enabled_reports()
        if not asked.condition and not asked.effect and self._marks == OwnMarks():
            if asked.look and not self._looked:
                self._looked = True
                try:
                    await self._read_node()
                except UnreachableError as error:  # without the right to read the Node, there are no marks to remove
                    log.debug("node %s cannot be read: %s", self._api.node_name, error)
            if self._marks == OwnMarks():
                self._condition, self._taint = _Attempts(), _Attempts()
                return None
        (gpus, trouble), now = self._node.fitness(), self._clock()
        wants = wanted(gpus, trouble, now - self._began) if asked.condition else None
        unwanted = self._marks.condition and not asked.condition
        condition_due = self._condition.backoff.due(now) and (unwanted or self._condition_due(wants, now))
        taint_due = self._taint_due(self._wanted_effect(asked, gpus), now)
        if condition_due or taint_due:
            try:
                async with self._api.session():
                    state = None if self._read else await self._read_node()
                    effect = self._wanted_effect(asked, gpus)  # the Node may have a taint that the marks lacked
                    if condition_due:
                        await self._try(self._condition, self._keep_condition(asked, wants, now), now)
                        state = None  # it has changed
                    if effect is not None and self._taint_due(effect, now):
                        kept = await self._try(self._taint, self._keep_taint(effect, now, state), now)
                        self._effect = effect if kept else None
            except UnreachableError as error:
                for each, due in ((self._condition, condition_due), (self._taint, taint_due)):
                    if due:
                        each.failed(str(error), now, self._dice())
        if self._marks.condition and not asked.condition and not self._condition.trouble:
            return SOON
        tried_again = [
            each.backoff.not_before - self._clock() for each in (self._condition, self._taint) if each.trouble
        ]
        return max(SOON, min([LOOK, *tried_again]))

    async def _read_node(self) -> NodeState:
        """Read the Node, and record our marks on it, so that unwanted marks are removed. Raises UnreachableError."""
        state = await self._api.read()
        self._times.update(state.condition(CONDITION))
        self._effect = next((str(taint.get("effect")) for taint in state.taints if taint.get("key") == TAINT), "")
        self._read = self._looked = True
        self._checked, self._uid = self._clock(), state.metadata.uid
        asked = self._node.enabled_reports()
        await self._update_marks(
            condition=self._marks.condition or (self._times.known and not asked.condition),
            taint=self._marks.taint or (bool(self._effect) and not asked.effect),
        )
        return state

    async def _try(self, attempts: _Attempts, attempt: Awaitable[None], now: float) -> bool:
        """Await `attempt` and return True if it succeeded."""
        try:
            await attempt
        except UnreachableError as error:  # do not raise: we may still have the right to write the other mark
            attempts.failed(str(error), now, self._dice())
            return False
        attempts.succeeded()
        return True

    def _wanted_effect(self, asked: EnabledReports, gpus: Sequence[GpuFitness]) -> str | None:
        """Return the wanted effect of the taint: empty for no taint, None if the taint should stay unchanged."""
        if not asked.effect:
            return "" if self._marks.taint else None
        taint = tainted(gpus)
        return None if taint is None else asked.effect if taint else ""

    def _condition_due(self, wants: ConditionContent | None, now: float) -> bool:
        return wants is not None and (not self._read or self._times.due(wants, now, self._wall()) <= 0)

    def _taint_due(self, effect: str | None, now: float) -> bool:
        if effect is None or not self._taint.backoff.due(now):
            return False
        return self._effect != effect or (bool(effect) and now - self._checked >= RECHECK)

    async def _keep_condition(self, asked: EnabledReports, wants: ConditionContent | None, now: float) -> None:
        if wants is not None and self._condition_due(wants, now):
            await self._update_marks(condition=True)
            condition = self._times.next(wants, self._wall(), self._dice())
            uid = await self._api.apply_condition(condition)
            self._times.written(condition, wants, now)
            if uid and self._uid and uid != self._uid:
                log.info("node %s was recreated", self._api.node_name)
                self._effect = None
            self._uid = uid or self._uid
        elif not asked.condition and self._marks.condition:
            await self._api.apply_condition(None)
            self._times = ConditionClock()
            await self._update_marks(condition=False)

    async def _keep_taint(self, effect: str, now: float, state: NodeState | None) -> None:
        if effect:
            await self._update_marks(taint=True)
        if await self._api.set_taint(TAINT, effect, state):
            change = f"has the taint {TAINT}:{effect}" if effect else f"has no taint {TAINT} any more"
            log.log(logging.WARNING if effect else logging.INFO, "node %s %s", self._api.node_name, change)
        self._checked = now
        if not effect:
            await self._update_marks(taint=False)

    async def _update_marks(self, **changes: bool) -> None:
        marks = replace(self._marks, **changes)
        if marks != self._marks:
            self._marks = marks
            await self._node.write_marks(marks)

    def _log_troubles(self) -> None:
        """Log the troubles when they change, and their end."""
        asked = self._node.enabled_reports()
        troubles = dict.fromkeys(filter(None, (self._condition.trouble, self._taint.trouble)))
        if self._marks.taint and not asked.effect:
            remedy = f"the taint is not wanted any more: kubectl taint node {self._api.node_name} {TAINT}-"
        elif self._marks.condition and not asked.condition:
            remedy = "the condition is not wanted any more, and stays until the plugin has the right to remove it"
        else:
            remedy = "trying again at growing intervals"
        self._trouble.update("; ".join([*troubles, remedy]) if troubles else "")
