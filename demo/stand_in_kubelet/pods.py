"""Pods, the devices of their containers, and the plugins' answers for them, as plain data."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gpu_plugin.containers.edits import ContainerEdits, DeviceSpec, Mount
from gpu_plugin.kubelet import messages
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest

ContainerKind = Literal["init", "sidecar", "app"]


class Container(msgspec.Struct, frozen=True):
    """A container's name and its limits by resource name. `sidecar` is a restartable init container."""

    name: str
    limits: Mapping[str, int]
    kind: ContainerKind = "app"


class Allocation(msgspec.Struct, frozen=True):
    """Devices of one resource given to one container.

    `numa_nodes` is the NUMA hint (None: no preference). `ask` is the GetPreferredAllocation request, None if there was no
    request, and `preferred` its answer as sent. `response` is the plugin's answer and `encoded` its bytes. `numa` has the NUMA
    nodes of each id as listed at the time.
    """

    container: str
    resource: str
    ids: tuple[str, ...]
    numa_nodes: frozenset[int] | None
    ask: ContainerPreferredAllocationRequest | None
    preferred: tuple[str, ...]
    response: ContainerEdits
    encoded: bytes = b""
    numa: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)

    @property
    def by_numa(self) -> Mapping[int, Sequence[str]]:
        """The ids by each of their NUMA nodes, -1 for no node, as in a kubelet (checkpoint.go: DevicesPerNUMA)."""
        found: dict[int, list[str]] = {}
        for identifier in self.ids:
            for node in self.numa.get(identifier) or (-1,):
                found.setdefault(node, []).append(identifier)
        return found


class Admission(msgspec.Struct, frozen=True):
    """An admitted pod: one allocation for each container and resource, in order; `seconds` is the whole duration."""

    pod: str
    allocations: tuple[Allocation, ...]
    seconds: float

    @property
    def ids(self) -> tuple[str, ...]:
        """All device ids that the pod holds, without duplicates."""
        return tuple(dict.fromkeys(identifier for each in self.allocations for identifier in each.ids))

    @property
    def only(self) -> Allocation:
        """The only allocation of a pod with one container and one resource. Raises ValueError for other pods."""
        (allocation,) = self.allocations
        return allocation


class Pod(msgspec.Struct):
    """A pod of the kubelet. `allocated` is by container name, then resource name; `running` is whether its containers run.

    A `uid` is never reused, whatever the pod's name.
    """

    name: str
    containers: tuple[Container, ...]
    allocated: dict[str, dict[str, Allocation]] = msgspec.field(default_factory=dict)
    running: bool = False
    uid: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))

    def ids(self, resource: str) -> set[str]:
        """Return the device ids of a resource that the pod's containers hold."""
        return {i for allocated in self.allocated.values() if resource in allocated for i in allocated[resource].ids}


class Entry(msgspec.Struct, frozen=True):
    """The devices of one resource of a pod's container: ids by NUMA node (-1: not known), and the plugin's encoded answer."""

    uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: Mapping[int, Sequence[str]] = msgspec.field(name="DeviceIDs")
    answer: bytes = msgspec.field(name="AllocResp")


def edits(response: messages.ContainerAllocateResponse) -> ContainerEdits:
    """Convert a container response to plain data."""
    return ContainerEdits(
        dict(response.envs),
        tuple(Mount(m.container_path, m.host_path, m.read_only) for m in response.mounts),
        tuple(DeviceSpec(d.container_path, d.host_path, d.permissions) for d in response.devices),
        dict(response.annotations),
        tuple(device.name for device in response.cdi_devices),
    )


def response_breaches(answer: ContainerEdits) -> list[str]:
    """Return the parts of a container's answer that would fail in a runtime or in the kubelet's merge."""
    found = []
    paths = [spec.container_path for spec in answer.devices]
    mounts = [mount.container_path for mount in answer.mounts]
    for what, names in (("device", paths), ("mount", mounts), ("CDI device", list(answer.cdi_devices))):
        if double := sorted({name for name in names if names.count(name) > 1}):
            found.append(f"Allocate answers with {what} {', '.join(double)} twice")
    hosts = [spec.host_path for spec in answer.devices] + [mount.host_path for mount in answer.mounts]
    found += [
        f"Allocate answers with path {path!r}, which is not absolute"
        for path in (*paths, *mounts, *hosts)
        if not path.startswith("/")
    ]
    found += [
        f"Allocate gives {spec.container_path} permissions {spec.permissions!r}: letters of rwm expected"
        for spec in answer.devices
        if not spec.permissions or set(spec.permissions) - set("rwm")
    ]
    for name in answer.cdi_devices:
        kind, _, device = name.partition("=")
        if "/" not in kind or not device:
            found.append(f"Allocate answers with CDI device {name!r}: vendor.com/class=name expected")
    return found


def conflicts(answers: Sequence[ContainerEdits]) -> list[str]:
    """Return environment variables that two resources of one container set differently: the kubelet keeps a random value."""
    first: dict[str, str] = {}
    found = []
    for answer in answers:
        for name, value in answer.envs.items():
            if first.setdefault(name, value) != value:
                found.append(f"two resources of one container set {name}, to {first[name]!r} and {value!r}")
    return found
