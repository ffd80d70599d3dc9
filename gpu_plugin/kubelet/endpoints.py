"""One endpoint for each resource in the store: begun when a resource appears, ended when it is gone."""

import logging
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from gpu_plugin.access.conflicts import PairWatch
from gpu_plugin.inventory.snapshot import SnapshotStore
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.endpoint import ResourceEndpoint
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import forever

log = logging.getLogger(__name__)


class Endpoints:
    """Serves every resource of the store on a socket of its own. One resource's trouble never reaches another."""

    def __init__(
        self,
        store: SnapshotStore,
        kubelet_socket: Path | None,
        directory: Path,
        look: Pulse,
        registered: Callable[[], object] | None = None,
        registrations: Registrations | None = None,
        counts: KubeletCounts | None = None,
    ) -> None:
        """Takes what each `ResourceEndpoint` takes."""
        self._store = store
        self._registrations = registrations or Registrations()
        pairs = PairWatch()
        counted = counts or KubeletCounts()
        self._make: Callable[[str], ResourceEndpoint] = lambda name: ResourceEndpoint(
            name, store, kubelet_socket, directory, look, pairs, registered, self._registrations, counted
        )
        self._running: dict[str, anyio.CancelScope] = {}

    async def run(self) -> None:
        """Follows the store until cancelled, then ends every endpoint."""
        async with anyio.create_task_group() as tasks:
            while True:
                names = self._store.current.resources.keys()
                for name in [name for name in self._running if name not in names]:
                    log.info("%s: withdrawn", name)
                    self._running.pop(name).cancel()
                    self._registrations.withdrawn(name)
                for name in names - self._running.keys():
                    self._running[name] = anyio.CancelScope()
                    tasks.start_soon(self._serve, name, self._running[name])
                await self._store.changed.wait()

    async def _serve(self, name: str, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                endpoint = self._make(name)
            except ValueError as error:
                log.error("cannot be served: %s", error)  # noqa: TRY400 - the sentence is all there is to say
                self._registrations.away(name, f"it cannot be served: {error}")
            else:
                await forever(name, endpoint.run)
        if name not in self._running:  # it was withdrawn: what was noted of it while it ended is past, too
            self._registrations.withdrawn(name)
