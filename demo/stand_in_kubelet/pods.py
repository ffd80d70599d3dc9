"""Plain data: pods, the devices of their containers, and a plugin's answers to Allocate."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gpu_plugin.access.container import ContainerEdits, DeviceSpec, Mount
from gpu_plugin.kubelet import messages
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest

ContainerKind = Literal["init", "sidecar", "app"]


class Container(msgspec.Struct, frozen=True):
    """A container's name, and its limits by resource name. The kind "sidecar" is a restartable init container."""

    name: str
    limits: Mapping[str, int]
    kind: ContainerKind = "app"


class Allocation(msgspec.Struct, frozen=True):
    """The devices of one resource in one container.

    Attributes:
        numa_nodes: the NUMA hint; None: no preference.
        ask: the GetPreferredAllocation request; None if the kubelet sent no request.
        preferred: the answer to `ask`, as sent.
        response: the plugin's answer to Allocate.
        encoded: the bytes of `response`.
        numa: the NUMA nodes of each id, as listed at the time of the allocation.
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
        """The ids by NUMA node, -1 for ids without a node, as in a kubelet's checkpoint (checkpoint.go: DevicesPerNUMA)."""
        found: dict[int, list[str]] = {}
        for identifier in self.ids:
            for node in self.numa.get(identifier) or (-1,):
                found.setdefault(node, []).append(identifier)
        return found


class Admission(msgspec.Struct, frozen=True):
    """An admitted pod: one allocation for each container and resource, in order, and the admission's duration in seconds."""

    pod: str
    allocations: tuple[Allocation, ...]
    seconds: float

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the pod's devices, without duplicates."""
        return tuple(dict.fromkeys(identifier for each in self.allocations for identifier in each.ids))

    @property
    def only(self) -> Allocation:
        """The allocation of a pod with one container and one resource. Raises ValueError for any other pod."""
        (allocation,) = self.allocations
        return allocation


class Pod(msgspec.Struct):
    """A pod of the kubelet. `allocated` is by container name and resource name. `running` is True if its containers run.

    Every pod has its own `uid`, even if it has the name of an earlier pod.
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
    """One container's devices of one resource: ids by NUMA node (-1: unknown), and the plugin's answer, encoded."""

    uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: Mapping[int, Sequence[str]] = msgspec.field(name="DeviceIDs")
    answer: bytes = msgspec.field(name="AllocResp")


def edits(response: messages.ContainerAllocateResponse) -> ContainerEdits:
    """Return a container's response as plain data."""
    return ContainerEdits(
        dict(response.envs),
        tuple(Mount(m.container_path, m.host_path, m.read_only) for m in response.mounts),
        tuple(DeviceSpec(d.container_path, d.host_path, d.permissions) for d in response.devices),
        dict(response.annotations),
        tuple(device.name for device in response.cdi_devices),
    )


def response_breaches(answer: ContainerEdits) -> list[str]:
    """Return the errors in one container's response that would break a runtime or the kubelet's merge of responses."""
    found = []
    paths = [spec.container_path for spec in answer.devices]
    mounts = [mount.container_path for mount in answer.mounts]
    for what, names in (("device", paths), ("mount", mounts), ("CDI device", list(answer.cdi_devices))):
        if double := sorted({name for name in names if names.count(name) > 1}):
            found.append(f"Allocate returns {what} {', '.join(double)} twice")
    hosts = [spec.host_path for spec in answer.devices] + [mount.host_path for mount in answer.mounts]
    found += [
        f"Allocate returns path {path!r}, which is not absolute"
        for path in (*paths, *mounts, *hosts)
        if not path.startswith("/")
    ]
    found += [
        f"Allocate returns {spec.container_path} with permissions {spec.permissions!r}: letters of rwm expected"
        for spec in answer.devices
        if not spec.permissions or set(spec.permissions) - set("rwm")
    ]
    for name in answer.cdi_devices:
        kind, _, device = name.partition("=")
        if "/" not in kind or not device:
            found.append(f"Allocate returns CDI device {name!r}: vendor.com/class=name expected")
    return found


def conflicts(answers: Sequence[ContainerEdits]) -> list[str]:
    """Return messages for environment variables that two resources of one container set to different values.

    The kubelet uses a random one of these values.
    """
    first: dict[str, str] = {}
    found = []
    for answer in answers:
        for name, value in answer.envs.items():
            if first.setdefault(name, value) != value:
                found.append(f"two resources of one container set {name}, to {first[name]!r} and {value!r}")
    return found
