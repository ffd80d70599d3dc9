"""The kubelet's PodResources service, v1: reports the devices of pods on a socket of its own.

Sources: pkg/kubelet/apis/podresources/server_v1.go (which pods and containers are reported), cm/container_manager.go
(containerDevicesFromResourceDeviceInstances: an entry for each device and NUMA node), apis/grpc/ratelimit.go.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from demo.stand_in_kubelet.device_table import ResourceState
from demo.stand_in_kubelet.pods import Pod
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.kubelet._api import v1
from gpu_plugin.runtime.rates import TokenBucket

PLUGIN_DIRECTORY = "device-plugins"
DIRECTORY = "pod-resources"
SOCKET = "kubelet.sock"
NAMESPACE = "default"  # The namespace of all pods of the stand-in

CALLS_A_SECOND = 100.0
BURST = 10


def default_socket(directory: Path) -> Path | None:
    """Return the socket of PodResources for a device plugin directory: in the kubelet's root directory.

    None if the directory is not called device-plugins: then its parent is not a kubelet's root directory.
    """
    return directory.parent / DIRECTORY / SOCKET if directory.name == PLUGIN_DIRECTORY else None


# A device of a container: its resource, its id, its NUMA node ids (empty: not known)
AllocatedDevice = tuple[str, str, tuple[int, ...]]


def encode_pods(pods: Mapping[str, Mapping[str, Sequence[AllocatedDevice]]]) -> bytes:
    """Return a ListPodResourcesResponse of the devices by pod name, then by container name."""
    found = []
    for pod, containers in pods.items():
        listed = [
            v1.ContainerResources(name, [entry for device in devices for entry in _entries(device)])
            for name, devices in containers.items()
        ]
        found.append(bytes(v1.ListPodResourcesResponse([v1.PodResources(pod, NAMESPACE, listed)])))
    return b"".join(found)


def encode_allocatable(devices: Iterable[AllocatedDevice]) -> bytes:
    """Return an AllocatableResourcesResponse."""
    parts = [entry for device in devices for entry in _entries(device)]
    return bytes(v1.AllocatableResourcesResponse(parts))


@lru_cache(4096)
def _entries(device: AllocatedDevice) -> tuple[v1.ContainerDevices, ...]:
    """Return an entry for each NUMA node of a device. A device without a NUMA node has one entry, without a topology.

    Our .proto has no topology. In the kubelet's .proto it is field 3, as in the device plugin API's Device.
    """
    resource, identifier, numa = device
    entry = bytes(v1.ContainerDevices(resource, [identifier]))
    topologies = [bytes(messages.Device(topology=messages.TopologyInfo([messages.NumaNode(node)]))) for node in numa]
    return tuple(v1.ContainerDevices().parse(entry + topology) for topology in topologies or [b""])


class PodResourcesService:
    """Serves /v1.PodResourcesLister of one kubelet, over all its restarts.

    `pods` returns the pods that the kubelet knows as active. Before they are listed, `collect` drops the devices of other
    pods. `clock`, in seconds, measures the rate of calls.

    Attributes:
        lists: the number of answered List calls.
    """

    def __init__(
        self,
        pods: Callable[[], Mapping[str, Pod]],
        tables: Callable[[], Mapping[str, ResourceState]],
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[], None] = lambda: None,
    ) -> None:
        self.lists = 0
        self._pods = pods
        self._collect = collect
        self._tables = tables
        self._clock = clock
        self._calls = TokenBucket(BURST, 1 / CALLS_A_SECOND)

    def __mapping__(self) -> dict[str, Handler]:
        """Return the methods that a plugin calls, for grpclib's server."""
        unary = Cardinality.UNARY_UNARY
        return {
            wire.POD_RESOURCES_LIST: Handler(self._list, unary, bytes, bytes),
            wire.POD_RESOURCES_ALLOCATABLE: Handler(self._allocatable, unary, bytes, bytes),
        }

    async def _list(self, stream: Stream[bytes, bytes]) -> None:
        await self._request(stream)
        self.lists += 1
        self._collect()
        await stream.send_message(encode_pods({name: listing(pod) for name, pod in self._pods().items()}))

    async def _allocatable(self, stream: Stream[bytes, bytes]) -> None:
        await self._request(stream)
        healthy = [
            (resource, identifier, state.devices[identifier].numa)
            for resource, state in self._tables().items()
            for identifier in sorted(state.healthy)
        ]
        await stream.send_message(encode_allocatable(healthy))

    async def _request(self, stream: Stream[bytes, bytes]) -> bytes:
        if not self._calls.take(self._clock()):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return await stream.recv_message() or b""


def listing(pod: Pod) -> dict[str, list[AllocatedDevice]]:
    """Return the devices that the service reports by container: of no init containers except sidecars."""
    order = [c for c in pod.containers if c.kind == "sidecar"] + [c for c in pod.containers if c.kind == "app"]
    return {
        container.name: [
            (resource, identifier, allocation.numa.get(identifier, ()))
            for resource, allocation in pod.allocated.get(container.name, {}).items()
            for identifier in allocation.ids
        ]
        for container in order
    }
