"""Which devices pods hold, by the word of two witnesses: PodResources, and the kubelet's checkpoint."""

import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar

from gpu_plugin.devices.retirement import Held
from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet.socket import Identity, identity
from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that each witness may take."""

Pods = Mapping[tuple[str, str], frozenset[str]]
"""Pods, as namespace/name, by the (resource, device id) that they hold."""

T = TypeVar("T")


class Holders:
    """Asks both witnesses, and weighs what they say.

    PodResources is believed where it says that a device is held, and where it has said so and says so no more. What it
    never told of, the checkpoint is believed in: what plain init containers have, and all pods while a kubelet that has
    just started knows none of them yet.
    """

    def __init__(self, directory: Path) -> None:
        """Takes the device plugin directory, where kubelet.sock and the checkpoint lie."""
        self._directory = directory
        self._told: set[tuple[str, str]] = set()
        self._kubelet: Identity | None = None
        self._no_answer = ""

    async def ask(self, socket: Path) -> Held | None:
        """(resource, device id) of what pods hold; None where neither witness speaks. `socket` is that of PodResources."""
        kubelet = identity(self._directory / "kubelet.sock")
        if kubelet != self._kubelet:
            self._kubelet = kubelet
            self._told.clear()
        listed = await self._listed(socket)
        written = await self._written()
        if listed is None:
            return written
        self._told |= listed
        return listed if written is None else listed | (written - self._told)

    async def pods(self, socket: Path) -> Pods | None:
        """The pods, as namespace/name, that hold each (resource, device id) now; None where PodResources does not say.

        The checkpoint is no witness here: it knows pods by their uids alone, and may hold on to pods that have ended.
        """
        return await self._answer(pod_resources.pods(socket, PATIENCE))

    async def _listed(self, socket: Path) -> Held | None:
        return await self._answer(pod_resources.held(socket, PATIENCE))

    async def _answer(self, question: Awaitable[T]) -> T | None:
        try:
            listed = await question
        except pod_resources.PodResourcesError as error:
            if str(error) != self._no_answer:
                log.warning("PodResources does not say which devices pods hold: %s", error)
            self._no_answer = str(error)
            return None
        self._no_answer = ""
        return listed

    async def _written(self) -> Held | None:
        threads = DaemonThreads("checkpoint")
        try:
            return await threads.run(lambda: checkpoint.held(self._directory), PATIENCE)
        except TimeoutError:
            return None
        finally:
            threads.close()
