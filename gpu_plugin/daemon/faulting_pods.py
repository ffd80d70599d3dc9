"""Finds the pods that held a GPU when an application's error was reported on it, with few questions to the kubelet."""

import logging

import anyio

from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.reported_errors import Error, ReportedErrors
from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.pod_listing import Pods
from gpu_plugin.kubelet.snapshot import SnapshotStore

log = logging.getLogger(__name__)

QUESTION_INTERVAL = 0.25
"""Seconds between two questions: the kubelet answers 100 calls a second, those of all clients together."""


class FaultingPods:
    """Asks which pods hold devices, one question at a time, and passes each error on with the pods that may have made it.

    Errors that come while a question is under way are answered by the next question. Everything runs on the event loop.
    """

    def __init__(
        self, errors: ReportedErrors, attribution: PodAttribution, store: SnapshotStore, health: HealthWatch
    ) -> None:
        self._errors = errors
        self._attribution = attribution
        self._store = store
        self._health = health

    async def run(self) -> None:
        """Pass errors on as they come. Never returns."""
        while True:
            errors = await self._errors.take()
            holders = await self._attribution.newest_pods()
            for error in errors:
                pods = None if holders is None else self._pods(error, holders)
                log.debug("GPU %s: Xid %d: held by %s", error.uuid, error.xid, "unknown pods" if pods is None else pods)
                self._health.observe(error.uuid, ApplicationError(error.xid, pods))
            await anyio.sleep(QUESTION_INTERVAL)

    def _pods(self, error: Error, holders: Pods) -> frozenset[str]:
        """The pods that hold the GPU or the MIG devices on which the error was reported."""
        found = (
            pods
            for _, device, pods in self._store.current.allocated(holders)
            if device.gpu == error.uuid and (not error.devices or device.visible_id in error.devices)
        )
        return frozenset().union(*found)
