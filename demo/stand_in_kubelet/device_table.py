"""The kubelet's table of one resource's devices from the newest list, and the lists that make the kubelet panic. No I/O.

Sources: pkg/kubelet/cm/devicemanager/manager.go (genericDeviceUpdateCallback, markResourceUnhealthy, GetCapacity,
allocateContainerResources) and topology_hints.go (generateDeviceTopologyHints). The last two search for devices in the newest
list without checking that they exist: kubelets from 1.34 to 1.36 dereference nil. A strict stand-in panics earlier, since it is
not known when such a pod is admitted again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from demo.stand_in_kubelet.topology import NumaPolicy
from gpu_plugin.kubelet import messages, wire

# Seconds for which a resource keeps its capacity after its stream ended (types.go: endpointStopGracePeriod)
GRACE_SECONDS = 300.0

MAX_ID_LENGTH = 63


class ListedDevice(msgspec.Struct, frozen=True):
    """One device of a list: `health` as sent, and in `numa` the NUMA node ids as sent (empty: no topology)."""

    id: str
    health: str
    numa: tuple[int, ...] = ()


class ResourceState(msgspec.Struct):
    """The kubelet's state of one resource.

    `healthy` and `unhealthy` are sets of device ids. `devices` is the newest list by id, kept after the plugin disconnects.
    `allocated` are the ids that count as allocated. `endpoint` is the socket path for requests; "" if it has been stopped since
    the kubelet's start. `stopped_at` is the time of the stream's end on the injected clock; None while the stream is open.
    `streams` is the number of ListAndWatch streams for this table now, `lists` the number of lists since the kubelet's start.
    `requested` are the ids in the latest request, if no list has arrived since. `listed_by` are the socket paths of the plugins
    that sent the last two lists, the newest last: a plugin whose list replaced the list of another plugin may send it again.
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
    listed_by: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Number of devices that the node reports, healthy or not."""
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        """Number of devices that pods may get."""
        return len(self.healthy)

    @property
    def free(self) -> set[str]:
        """Healthy devices that no pod holds."""
        return self.healthy - self.allocated

    @property
    def numa(self) -> dict[str, tuple[int, ...]]:
        """NUMA node ids by device id, as sent."""
        return {device.id: device.numa for device in self.devices.values()}

    def grace_over(self, now: float) -> bool:
        """Return whether the kubelet removes the resource, since the plugin has been disconnected for GRACE_SECONDS."""
        return self.stopped_at is not None and now - self.stopped_at > GRACE_SECONDS

    def replace(self, devices: Sequence[ListedDevice]) -> dict[str, str]:
        """Replace the table by a list. Return the ids that are new or have other health, with their health."""
        before = self.devices
        self.devices = {device.id: device for device in devices}
        # Computed from the list: an id that was sent twice with different health is in both sets, as in the kubelet.
        self.healthy = {device.id for device in devices if device.health == wire.HEALTHY}
        self.unhealthy = {device.id for device in devices if device.health != wire.HEALTHY}
        self.lists += 1
        return {
            device.id: device.health
            for device in self.devices.values()
            if device.id not in before or before[device.id].health != device.health
        }

    def mark_unhealthy(self, now: float) -> None:
        """Mark all devices unhealthy after the plugin disconnected. The capacity stays for the grace period."""
        self.unhealthy |= self.healthy
        self.healthy = set()
        self.stopped_at = now

    def health_of(self, identifier: str) -> str:
        """Return the health that a pod with the device shows: Healthy also for an id that no list has."""
        device = self.devices.get(identifier)
        return wire.UNHEALTHY if device is not None and device.health != wire.HEALTHY else wire.HEALTHY


def parse(data: bytes) -> list[ListedDevice]:
    """Return the devices of a ListAndWatchResponse, in the order sent. Raises ValueError for invalid bytes."""
    sent = messages.decode(messages.ListAndWatchResponse, data).devices
    return [ListedDevice(d.id, d.health, tuple(node.id for node in d.topology.nodes)) for d in sent]


def list_breaches(
    devices: Sequence[ListedDevice],
    before: Sequence[ListedDevice] | None,
    table: Mapping[str, ListedDevice],
    again: Callable[[], bool],
) -> list[str]:
    """Return the breaches of a list. `before` is the list before it on the same stream, `table` the newest of all streams.

    A repeated list has a purpose if another plugin's list came in between, or if `again` returns True: the kubelet writes its
    checkpoint when it receives a list.
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
    """The stand-in kubelet panicked because of a plugin; the text is the cause. It must be started again."""


def list_panic(
    state: ResourceState, gone: set[str], allocated: set[str], in_flight: set[str], policy: NumaPolicy, *, strict: bool
) -> str:
    """Return why the newest list, which is in `state` already, makes the kubelet panic; empty if it does not.

    `gone` are the ids of the last list that this list lacks, `allocated` are ids held by pods, and `in_flight` are ids with an
    Allocate under way. With `strict`, each list that lacks an id held by a pod is a panic.
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
    """Return why admitting a pod with `ids` again, by a policy with hints, makes the kubelet panic; empty if it does not."""
    lost = set(ids) - state.devices.keys()
    if not lost or not any(state.numa.values()):
        return ""
    return f"{state.resource}: a pod is admitted again with {sorted(lost)}, which the list lacks"
