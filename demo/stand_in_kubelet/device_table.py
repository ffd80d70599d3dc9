"""The kubelet's table of one resource's devices, as the newest list fills it, and when a list ends the kubelet. No I/O.

Sources: pkg/kubelet/cm/devicemanager/manager.go (genericDeviceUpdateCallback, markResourceUnhealthy, GetCapacity,
allocateContainerResources) and topology_hints.go (generateDeviceTopologyHints). The last two look devices up in the newest list
and do not ask whether they are there: kubelets from 1.34 to 1.36 dereference nil. A strict stand-in goes further, since nobody
knows when such a pod is admitted again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from demo.stand_in_kubelet.topology import NumaPolicy
from gpu_plugin.kubelet import messages, wire

GRACE_SECONDS = 300.0
"""How long after its stream ended a resource keeps its capacity (types.go: endpointStopGracePeriod)."""

MAX_ID_LENGTH = 63


class ListedDevice(msgspec.Struct, frozen=True):
    """One device of a list: `health` as sent, `numa` the NUMA node ids sent (empty: no topology)."""

    id: str
    health: str
    numa: tuple[int, ...] = ()


class ResourceState(msgspec.Struct):
    """What the kubelet knows of one resource.

    `healthy` and `unhealthy` are sets of device ids; `devices` the newest list by id, kept when the plugin goes;
    `allocated` the ids it counts as taken; `endpoint` the socket path requests go to, "" for one that is stopped since
    the kubelet's start; `stopped_at` the injected clock's time of the stream's end, None while it lives; `streams` how
    many ListAndWatch streams feed this table now; `lists` how many lists came since the kubelet started; `requested` the ids
    that the latest request named, if no list came since.
    """

    resource: str
    healthy: set[str] = msgspec.field(default_factory=set)
    unhealthy: set[str] = msgspec.field(default_factory=set)
    devices: dict[str, ListedDevice] = msgspec.field(default_factory=dict)
    allocated: set[str] = msgspec.field(default_factory=set)
    endpoint: str = ""
    stopped_at: float | None = None
    streams: int = 0
    lists: int = 0
    requested: set[str] = msgspec.field(default_factory=set)

    @property
    def capacity(self) -> int:
        """Devices the node reports, healthy or not."""
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        """Devices pods may be given."""
        return len(self.healthy)

    @property
    def free(self) -> set[str]:
        """Healthy devices no pod holds."""
        return self.healthy - self.allocated

    @property
    def numa(self) -> dict[str, tuple[int, ...]]:
        """NUMA node ids by device id, as sent."""
        return {device.id: device.numa for device in self.devices.values()}

    def grace_over(self, now: float) -> bool:
        """Whether the plugin has been gone for so long that the kubelet forgets the resource."""
        return self.stopped_at is not None and now - self.stopped_at > GRACE_SECONDS

    def replace(self, devices: Sequence[ListedDevice]) -> dict[str, str]:
        """Takes a list in place of the table. Gives the ids that are new or changed health, with their health."""
        before = self.devices
        self.devices = {device.id: device for device in devices}
        # From the list and not from the table: an id sent twice with two healths sits in both sets, as in the kubelet.
        self.healthy = {device.id for device in devices if device.health == wire.HEALTHY}
        self.unhealthy = {device.id for device in devices if device.health != wire.HEALTHY}
        self.lists += 1
        return {
            device.id: device.health
            for device in self.devices.values()
            if device.id not in before or before[device.id].health != device.health
        }

    def mark_unhealthy(self, now: float) -> None:
        """The plugin is gone: nothing may be allocated, capacity stays for the grace period."""
        self.unhealthy |= self.healthy
        self.healthy = set()
        self.stopped_at = now

    def health_of(self, identifier: str) -> str:
        """What a pod that holds the device shows: Healthy also for an id that no list carries."""
        device = self.devices.get(identifier)
        return wire.UNHEALTHY if device is not None and device.health != wire.HEALTHY else wire.HEALTHY


def parse(data: bytes) -> list[ListedDevice]:
    """The devices of a ListAndWatchResponse, in the order sent. Raises ValueError on bytes that are none."""
    sent = messages.decode(messages.ListAndWatchResponse, data).devices
    return [ListedDevice(d.id, d.health, tuple(node.id for node in d.topology.nodes)) for d in sent]


def list_breaches(
    devices: Sequence[ListedDevice],
    before: Sequence[ListedDevice] | None,
    table: Mapping[str, ListedDevice],
    again: Callable[[], bool],
) -> list[str]:
    """What is wrong with a list; `before` is the one that came before it on the same stream, `table` the newest of any stream.

    The same list once more has a purpose if another plugin's list came between, or if `again` returns true: the kubelet writes
    its checkpoint when a list comes.
    """
    found: list[str] = []
    seen: dict[str, ListedDevice] = {}
    for device in devices:
        found.extend(_device_breaches(device))
        if device.id in seen:
            found.append(f"device id {device.id!r} is in one list twice")
        seen[device.id] = device
    unchanged = before is not None and seen == {device.id: device for device in before} and len(before) == len(devices)
    if unchanged and seen == table and not again():
        found.append(f"an unchanged list of {len(devices)} devices was sent again")
    return found


def _device_breaches(device: ListedDevice) -> Iterable[str]:
    if not device.id:
        yield "a device without an id"
    if len(device.id) > MAX_ID_LENGTH:
        yield f"device id {device.id!r} has {len(device.id)} characters, more than {MAX_ID_LENGTH}"
    if device.health not in (wire.HEALTHY, wire.UNHEALTHY):
        yield f"device {device.id!r} has health {device.health!r}: neither {wire.HEALTHY} nor {wire.UNHEALTHY}"
    if any(node < 0 for node in device.numa):
        yield f"device {device.id!r} has NUMA node {min(device.numa)}: an unknown node is sent as no topology at all"


class KubeletPanicError(AssertionError):
    """The stand-in kubelet panicked over what a plugin did; the text is the cause. Only a new start helps."""


def list_panic(
    state: ResourceState, gone: set[str], allocated: set[str], in_flight: set[str], policy: NumaPolicy, *, strict: bool
) -> str:
    """What the newest list, which is in `state` already, makes of the kubelet: the cause of a panic, or nothing.

    `gone` are the ids that the list before had, `allocated` those that pods hold, `in_flight` those with an Allocate under way;
    `strict` makes every list a fatal one that lacks what a pod holds.
    """
    lost = allocated - state.devices.keys()
    if torn := in_flight & gone:
        return f"{state.resource}: {sorted(torn)} left the list during their Allocate"
    if lost and state.lists == 1 and policy != "none" and any(state.numa.values()):
        return f"{state.resource}: pods are admitted again with {sorted(lost)}, which no list has"
    if lost and strict:
        return f"{state.resource}: {sorted(lost)} left the list while pods hold them"
    return ""


def admission_panic(state: ResourceState, ids: Collection[str]) -> str:
    """What admitting a pod again makes of the kubelet, by a policy that asks for hints; `ids` are those the pod has."""
    lost = set(ids) - state.devices.keys()
    if not lost or not any(state.numa.values()):
        return ""
    return f"{state.resource}: a pod is admitted again with {sorted(lost)}, which the list lacks"
