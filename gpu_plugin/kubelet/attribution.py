"""Which pod's container holds which device: asked of the kubelet when somebody wants to know, and kept for a while.

    page, events ─────────current()──▶ the last answer, 10 s at most ──else──▶ PodResources List, one question at a time
    metrics ──────────────shortly()──▶ the same, but no more than a moment is waited for it
    status, faulting pods ──newest()───▶ an answer to a question asked after the call

Nobody asks: nothing is asked. Where the kubelet does not answer, that is said once, and asked again ever more rarely.
"""

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.pod_listing import HoldersByDevice, Pods, pods
from gpu_plugin.kubelet.socket import Identity, identity
from gpu_plugin.runtime.backoff import ON_NODE, Backoff
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

AGE = 10.0
"""Seconds that an answer is good for, to those who need not know at once."""

STALE = 60.0
"""Seconds after which an answer is no longer shown, where none came after it: one refusal does not end all series."""

PATIENCE = 2.0
"""Seconds that an answer may take."""

SHORTLY = 0.25
"""Seconds that whoever cannot wait for an answer waits for it: kubelets take some milliseconds, and 0.2 s for 60,000 devices."""

GAP = 0.05
"""Seconds between two questions at least: the kubelet answers 100 calls a second, all its clients' together, and 10 at once."""

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 60.0
"""Seconds until the kubelet is asked again after it did not answer: the first time, and at most."""


class PodAttribution:
    """Knows which containers hold which devices, by the word of PodResources.

    It says what the kubelet says: devices of all resources, those of other plugins and those that this plugin has retired or
    never listed too. Not among them are devices of plain init containers and of an Allocate that is under way. Kubelets before
    1.34 tell of pods that have ended, until another pod is admitted with devices.

    Attributes:
        trouble: why the newest question was not answered; empty where it was, and before the first.
        questions: how many were asked.
        failures: how many of them were not answered.
    """

    def __init__(
        self,
        settings: SettingsStore,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Takes the settings, which name the PodResources socket, a steady clock in seconds, and a throw of dice in [0, 1)."""
        self.trouble = ""
        self.questions = 0
        self.failures = 0
        self._settings = settings
        self._clock = clock
        self._dice = dice
        self._holders: HoldersByDevice | None = None
        self._asked_at = float("-inf")
        self._settled = 0
        self._answer_of = float("-inf")
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, ON_NODE)
        self._silent: Identity | None = None
        """The socket on which the kubelet did not answer the last time."""
        self._one_at_a_time = anyio.Lock()
        self._wanted = Pulse()
        self._answered = Pulse()

    async def run(self) -> None:
        """Asks for those who cannot wait. Never returns."""
        while True:
            await self._wanted.wait()
            await self.current()
            self._answered.ring()

    async def current(self) -> HoldersByDevice | None:
        """The containers that hold each (resource, device id), as they were some `AGE` seconds ago at most.

        It is the same object for as long as nothing has changed. While the kubelet does not answer, it is what it said last,
        for `STALE` seconds. None: not known, `trouble` says why. Waits for `PATIENCE` seconds at most, and mostly not at all;
        whoever asks may be cancelled at any time.
        """
        if not self._good():
            async with self._one_at_a_time:
                if self._due():
                    await self._ask()
        return self._known()

    async def shortly(self) -> HoldersByDevice | None:
        """Answers as `current` does, after `SHORTLY` seconds at most; the question goes on, for the next who asks.

        Needs `run`. Until there is an answer, it is the one before, for `STALE` seconds.
        """
        if self._due():
            with anyio.move_on_after(SHORTLY):
                self._wanted.ring()
                await self._answered.wait()
        return self._known()

    def _due(self) -> bool:
        if self._good():
            return False
        socket = identity(self._socket())  # another kubelet listens on a new socket
        return self._backoff.due(self._clock()) or (socket is not None and socket != self._silent)

    def _known(self) -> HoldersByDevice | None:
        if self._holders is not None and self._clock() - self._answer_of >= STALE:
            self._holders = None
        return self._holders

    async def newest(self) -> HoldersByDevice | None:
        """The containers that hold each (resource, device id), by a question asked after this call; None: not answered."""
        begun = self.questions
        async with self._one_at_a_time:
            if self._settled <= begun:
                await self._ask()
        return None if self.trouble else self._holders

    async def newest_pods(self) -> Pods | None:
        """The pods that hold each (resource, device id), asked as `newest` does."""
        held = await self.newest()
        return None if held is None else pods(held)

    def _socket(self) -> Path:
        return Path(self._settings.current.effective_pod_resources_socket)

    def _good(self) -> bool:
        return self._holders is not None and not self.trouble and self._clock() - self._answer_of < AGE

    async def _ask(self) -> None:
        """One question, and what follows from it. Only for who has the lock; may be cancelled."""
        if (early := GAP - (self._clock() - self._asked_at)) > 0:
            await anyio.sleep(early)
        began = self._asked_at = self._clock()
        number = self.questions = self.questions + 1
        socket = self._socket()
        try:
            self._holders = await pod_resources.holders(socket, PATIENCE, self._holders)
        except CallError as error:
            self.failures += 1
            if str(error) != self.trouble:
                log.warning("which pods hold which devices is not known: %s; asking again now and then", error)
            self.trouble = str(error)
            self._backoff.failed(self._clock(), self._dice())
            self._silent = identity(socket)
            self._settled = number
            return
        if self.trouble:
            log.info("PodResources says again which pods hold which devices")
        self.trouble = ""
        self._backoff.succeeded()
        self._answer_of, self._settled = began, number
