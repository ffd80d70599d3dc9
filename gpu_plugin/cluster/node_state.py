"""Keeps the condition and the taint of our Node as they are wanted: looks at what is, not at what has changed."""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.gpu_fitness import GpuFitness
from gpu_plugin.cluster.left import Left
from gpu_plugin.cluster.node_api import NodeApi, NodeState
from gpu_plugin.cluster.node_condition import CONDITION, TAINT, ConditionClock, Wanted, tainted, wanted
from gpu_plugin.pulse import Pulse

log = logging.getLogger(__name__)

START_SPREAD = 10.0
"""Seconds over which nodes that begin together spread their first requests."""

LOOK = 15.0
"""Seconds between two looks at what is wanted where nobody says that it has changed; they ask nobody."""

RECHECK = 3600.0
"""Seconds after which the Node's taints are read again while there is a reason for ours: somebody may have removed it."""

FIRST_PAUSE = 5.0
LONGEST_PAUSE = 300.0
"""Seconds until an attempt that failed is made again: at first, and at most. What is wanted then may be something else."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the settings ask for: the condition, and the taint's effect (empty: no taint)."""

    condition: bool = False
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the node: its GPUs, and why none can be reached (empty where one can)."""

    gpus: Sequence[GpuFitness]
    trouble: str = ""


class NodeStateKeeper:
    """Writes where what the Node says is not what is wanted, and now and then that it still holds.

    Attributes:
        trouble: why the newest attempt failed; empty where it did not.
    """

    def __init__(
        self,
        api: NodeApi,
        asked: Callable[[], Asked],
        seen: Callable[[], Seen],
        left: Left,
        leaves: Callable[[Left], Awaitable[object]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Takes the API, what is asked for and seen now, and what an earlier process left; `leaves` takes down what we leave."""
        self.trouble = ""
        self._api = api
        self._asked = asked
        self._seen = seen
        self._left = left
        self._leaves = leaves
        self._clock = clock
        self._wall = wall
        self._dice = dice
        self._bell = Pulse()
        self._stirred = False
        self._times = ConditionClock()
        self._effect: str | None = None
        """Of the taint as it was read or written last; None: not known."""
        self._checked = self._began = 0.0
        self._read = False

    def changed(self) -> None:
        """Has a look taken soon. From the event loop's thread."""
        self._stirred = True
        self._bell.ring()

    async def run(self) -> None:
        """Never returns."""
        self._began = self._clock()
        await anyio.sleep(START_SPREAD * self._dice())
        failures = 0
        while True:
            self._stirred = False
            try:
                wait = await self._once()
                if self.trouble:
                    log.info("condition and taint of node %s are written again", self._api.node_name)
                self.trouble, failures = "", 0
            except UnreachableError as error:
                failures += 1
                self._say(error)
                pause = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE)
                self._read, self._effect = False, None  # whatever was written, or not, is read again
                await anyio.sleep(pause * (0.5 + self._dice()))
            else:
                if not self._stirred:  # while there was an answer to wait for
                    await self._bell.wait(wait)

    async def _once(self) -> float | None:
        """Does what is due. Returns the seconds until something may be, None where nothing will. Raises UnreachableError."""
        asked, left = self._asked(), self._left
        if not asked.condition and not asked.effect and left == Left():
            return None
        seen, now = self._seen(), self._clock()
        wants = wanted(seen.gpus, seen.trouble, now - self._began) if asked.condition else None
        effect = self._wanted_effect(asked, seen)
        if self._condition_due(wants, now) or (left.condition and not asked.condition) or self._taint_due(effect, now):
            async with self._api.session():
                state = None if self._read else await self._api.read()
                if state is not None:
                    self._take(state)
                failed: list[UnreachableError] = []
                try:
                    if await self._keep_condition(asked, wants, now):
                        state = None
                except UnreachableError as error:  # the taint may be within our rights all the same
                    failed.append(error)
                try:
                    if effect is not None and self._taint_due(effect, now):
                        await self._keep_taint(effect, now, state)
                except UnreachableError as error:
                    failed.append(error)
                if failed:
                    raise UnreachableError(failed[0].kind, "; ".join(dict.fromkeys(map(str, failed))))
        return LOOK if asked.condition or asked.effect else None

    def _wanted_effect(self, asked: Asked, seen: Seen) -> str | None:
        """The effect that the taint is to have, empty for no taint; None: it stays as it is."""
        if not asked.effect:
            return "" if self._left.taint else None
        taint = tainted(seen.gpus)
        return None if taint is None else asked.effect if taint else ""

    def _take(self, state: NodeState) -> None:
        self._times.remember(state.condition(CONDITION))
        self._effect = next((str(taint.get("effect")) for taint in state.taints if taint.get("key") == TAINT), "")
        self._read, self._checked = True, self._clock()

    def _condition_due(self, wants: Wanted | None, now: float) -> bool:
        return wants is not None and (not self._read or self._times.due(wants, now, self._wall()) <= 0)

    def _taint_due(self, effect: str | None, now: float) -> bool:
        if effect is None:
            return False
        return not self._read or self._effect != effect or (bool(effect) and now - self._checked >= RECHECK)

    async def _keep_condition(self, asked: Asked, wants: Wanted | None, now: float) -> bool:
        """Returns whether the Node was changed."""
        if wants is not None and self._condition_due(wants, now):
            await self._leave(Left(condition=True, taint=self._left.taint))
            condition = self._times.next(wants, self._wall(), self._dice())
            await self._api.apply_condition(condition)
            self._times.written(condition, wants, now)
            return True
        if not asked.condition and self._left.condition:
            await self._api.apply_condition(None)
            self._times = ConditionClock()
            await self._leave(Left(condition=False, taint=self._left.taint))
            return True
        return False

    async def _keep_taint(self, effect: str, now: float, state: NodeState | None) -> None:
        if effect:
            await self._leave(Left(condition=self._left.condition, taint=True))
        if await self._api.set_taint(TAINT, effect, state):
            said = f"has the taint {TAINT}:{effect}" if effect else f"has no taint {TAINT} any more"
            log.log(logging.WARNING if effect else logging.INFO, "node %s %s", self._api.node_name, said)
        self._effect, self._checked = effect, now
        if not effect:
            await self._leave(Left(condition=self._left.condition, taint=False))

    async def _leave(self, left: Left) -> None:
        if left != self._left:
            self._left = left
            await self._leaves(left)

    def _say(self, error: UnreachableError) -> None:
        asked, name = self._asked(), self._api.node_name
        if self._left.taint and not asked.effect:
            remedy = f"; the taint is not wanted any more: kubectl taint node {name} {TAINT}-"
        elif self._left.condition and not asked.condition:
            remedy = "; the condition is not wanted any more, and stays until this has the right to remove it"
        else:
            remedy = "; trying again, ever more rarely"
        text = f"{error}{remedy}"
        level = logging.DEBUG if text == self.trouble else logging.WARNING
        self.trouble = text
        log.log(level, "condition and taint of node %s cannot be written: %s", name, text)
