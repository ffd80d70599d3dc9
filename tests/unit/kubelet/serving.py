"""One resource served in this process to the stand-in kubelet, over a directory of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import ResourceEndpoint, Shared
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse

GPU = "nvidia.com/gpu"


def devices(count: int) -> tuple[Device, ...]:
    """`count` whole GPUs on two NUMA nodes."""
    return tuple(
        Device(
            id=f"GPU-{at:08d}-0000-0000-0000-000000000000",
            gpu=f"GPU-{at:08d}-0000-0000-0000-000000000000",
            visible_id=f"GPU-{at:08d}-0000-0000-0000-000000000000",
            index=str(at),
            nodes=(f"/dev/nvidia{at}",),
            numa=(0 if at < count / 2 else 1,),
        )
        for at in range(count)
    )


def view(listed: tuple[Device, ...], resource: str = GPU, access: Access | None = None) -> ResourceView:
    return ResourceView.of(Resource(resource, listed), access or Access(), Placement())


@dataclass
class Plugin:
    """A served resource, its store, and methods that change it."""

    directory: Path
    resource: str = GPU
    store: SnapshotStore = field(default_factory=SnapshotStore)
    look: Pulse = field(default_factory=Pulse)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    endpoint: ResourceEndpoint = None  # type: ignore[assignment]

    def publish(self, listed: tuple[Device, ...]) -> None:
        self.store.publish({self.resource: view(listed, self.resource)})

    def fail(self, at: int, reason: str = "Xid 79") -> None:
        """Makes one GPU unfit, or fit again with an empty reason."""
        current = self.store.current.resources[self.resource]
        uuid = current.resource.devices[at].gpu
        self.store.publish({self.resource: current.with_reasons({uuid: reason})})

    @property
    def sockets(self) -> list[Path]:
        return sorted(self.directory.glob("gpu-plugin-*.sock"))


@asynccontextmanager
async def serving(
    directory: Path, count: int = 8, resource: str = GPU, kubelet_socket: Path | None = None, *, register: bool = True
) -> AsyncIterator[Plugin]:
    """Serves `count` GPUs for as long as the context lasts, then ends as the daemon does."""
    plugin = Plugin(directory, resource)
    plugin.publish(devices(count))
    registration = (kubelet_socket or directory / "kubelet.sock") if register else None
    plugin.endpoint = ResourceEndpoint(resource, Shared(plugin.store, registration, directory, plugin.look))

    async def run() -> None:
        with plugin.scope:
            await plugin.endpoint.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, directory, plugin.look)
        tasks.start_soon(run)
        try:
            yield plugin
        finally:
            tasks.cancel_scope.cancel()


def registered(kubelet, times=1, resource=GPU):
    """Return a condition: the kubelet has a live stream after `times` accepted registrations."""

    def met():
        count = kubelet.registrations.get(resource)
        table = kubelet.resources.get(resource)
        return (
            count is not None
            and count.accepted >= times
            and table is not None
            and table.streams == 1
            and table.allocatable > 0
        )

    return met
