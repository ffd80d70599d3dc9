"""Request from the kubelet which container of which pod holds which device, and keep the answer for a few seconds.

    page, events ─────────current()──▶ the last answer if under 10 s old, else PodResources List, one request at a time
    metrics ──────────────shortly()──▶ the same, with a wait of 0.25 s at most
    status, faulting pods ──newest()───▶ the answer to a request sent after the call

Requests are sent only on demand. If the kubelet does not answer, this is logged once, and the pause before the next request
grows.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.pod_listing import HoldersByDevice, Pods, pods
from gpu_plugin.kubelet.socket import Identity, identity
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

AGE = 10.0  # seconds for which `current` and `shortly` return the same answer

# Seconds for which the last answer is returned if later requests fail: one refusal must not end all series of metrics.
STALE = 60.0

PATIENCE = 2.0  # seconds to wait for an answer

# Seconds that `shortly` waits for an answer. Kubelets take some milliseconds, and 0.2 s for 60,000 devices.
SHORTLY = 0.25

# Shortest time between two requests, in seconds. The kubelet answers 100 calls a second of all clients, 10 of them at once.
GAP = 0.05

# Seconds until the next request after a failure: the first and the longest pause.
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 60.0


class PodAttribution:
    """Returns the containers that hold each device, according to PodResources.

    The answer has the devices of all resources, including other plugins' devices and devices that this plugin has retired or
    never listed. It lacks the devices of plain init containers and of an unfinished Allocate. Kubelets before 1.34 also
    list pods that have ended, until another pod is admitted with devices.

    Attributes:
        questions: the number of requests.
        failures: the number of failed requests.
    """

    def __init__(self, settings: SettingsStore, clock: Callable[[], float] = time.monotonic) -> None:
        """`settings` name the PodResources socket, and `clock` is steady, in seconds."""
        self.questions = 0
        self.failures = 0
        self._settings = settings
        self._clock = clock
        self._holders: HoldersByDevice | None = None
        self._asked_at = float("-inf")
        self._settled = 0
        self._answer_of = float("-inf")
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._trouble = LogOnChange(
            log,
            "cannot read from the kubelet which pods hold which devices: %s; trying again now and then",
            over="PodResources reports again which pods hold which devices",
        )
        self._failed_socket: Identity | None = None
        """The socket of the last failed request."""
        self._one_at_a_time = anyio.Lock()
        self._wanted = Pulse()
        self._answered = Pulse()

    @property
    def trouble(self) -> str:
        """Why the newest request failed; empty if it succeeded, and before the first request."""
        return self._trouble.text

    async def run(self) -> None:
        """Send the requests for `shortly`. Never returns."""
        while True:
            await self._wanted.wait()
            await self.current()
            self._answered.ring()

    async def current(self) -> HoldersByDevice | None:
        """Return the containers that hold each (resource, device id), from an answer about `AGE` seconds old at most.

        The result is the same object while nothing changes. While the kubelet does not answer, the result is the last answer,
        for `STALE` seconds, and then None; `trouble` has the reason. Waits `PATIENCE` seconds at most, and usually not at all.
        The caller may be cancelled at any time.
        """
        if not self._is_fresh():
            async with self._one_at_a_time:
                if self._due():
                    await self._ask()
        return self._known()

    async def shortly(self) -> HoldersByDevice | None:
        """Return the result of `current`, or after `SHORTLY` seconds the former answer, for `STALE` seconds.

        The request continues in the task of `run`, so the next call returns its answer.
        """
        if self._due():
            with anyio.move_on_after(SHORTLY):
                self._wanted.ring()
                await self._answered.wait()
        return self._known()

    def _due(self) -> bool:
        if self._is_fresh():
            return False
        socket = identity(self._socket())  # another kubelet listens on a new socket
        return self._backoff.due(self._clock()) or (socket is not None and socket != self._failed_socket)

    def _known(self) -> HoldersByDevice | None:
        if self._holders is not None and self._clock() - self._answer_of >= STALE:
            self._holders = None
        return self._holders

    async def newest(self) -> HoldersByDevice | None:
        """Return the containers that hold each (resource, device id), from a request sent after this call; None if it fails."""
        begun = self.questions
        async with self._one_at_a_time:
            if self._settled <= begun:
                await self._ask()
        return None if self.trouble else self._holders

    async def newest_pods(self) -> Pods | None:
        """Return the pods that hold each (resource, device id), from a request as for `newest`."""
        held = await self.newest()
        return None if held is None else pods(held)

    def _socket(self) -> Path:
        return Path(self._settings.current.effective_pod_resources_socket)

    def _is_fresh(self) -> bool:
        return self._holders is not None and not self.trouble and self._clock() - self._answer_of < AGE

    async def _ask(self) -> None:
        """Send one request, and store the answer or the failure. The caller has the lock, and may be cancelled."""
        if (early := GAP - (self._clock() - self._asked_at)) > 0:
            await anyio.sleep(early)
        began = self._asked_at = self._clock()
        number = self.questions = self.questions + 1
        socket = self._socket()
        try:
            holders = await pod_resources.holders(socket, PATIENCE)
        except CallError as error:
            self.failures += 1
            self._trouble.update(str(error))
            self._backoff.failed(self._clock())
            self._failed_socket = identity(socket)
            self._settled = number
            return
        if holders != self._holders:
            self._holders = holders
        self._trouble.update("")
        self._backoff.succeeded()
        self._answer_of, self._settled = began, number
