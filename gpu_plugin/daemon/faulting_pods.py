"""Find the pods that held a GPU when the driver reported an application's error on it, with few queries to the kubelet."""

import logging

import anyio

from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.reported_errors import Error, ReportedErrors
from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.pod_listing import Pods
from gpu_plugin.kubelet.snapshot import SnapshotStore

log = logging.getLogger(__name__)

QUERY_INTERVAL = 0.25
"""Seconds between two queries: the kubelet's limit is 100 calls a second for all clients together."""


class FaultingPods:
    """Queries which pods hold devices, one query at a time, and passes each error on with the pods that may have caused it.

    Errors that are reported during a query wait for the next query. Everything runs on the event loop.
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
            await anyio.sleep(QUERY_INTERVAL)

    def _pods(self, error: Error, holders: Pods) -> frozenset[str]:
        """Return the pods that hold the GPU, or the MIG devices, on which the error was reported."""
        found = (
            pods
            for _, device, pods in self._store.current.allocated(holders)
            if device.gpu == error.uuid and (not error.devices or device.visible_id in error.devices)
        )
        return frozenset().union(*found)
