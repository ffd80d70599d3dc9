"""The kubelet's table of one resource's devices, filled from the newest list, and the lists that make a kubelet panic. No I/O.

Sources: pkg/kubelet/cm/devicemanager/manager.go (genericDeviceUpdateCallback, markResourceUnhealthy, GetCapacity,
allocateContainerResources) and topology_hints.go (generateDeviceTopologyHints). The last two functions read devices of the
newest list without a check that the list has them: kubelets from 1.34 to 1.36 dereference nil. A strict stand-in already panics
when such a list arrives, because the moment of the pod's next admission is unknown.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from demo.stand_in_kubelet.topology import NumaPolicy
from gpu_plugin.kubelet import messages, wire

GRACE_SECONDS = 300.0
"""A resource keeps its capacity for this many seconds after its stream ended (types.go: endpointStopGracePeriod)."""

MAX_ID_LENGTH = 63


class ListedDevice(msgspec.Struct, frozen=True):
    """One device of a list: its `health` as sent, and `numa`, the NUMA node ids as sent (empty: no topology)."""

    id: str
    health: str
    numa: tuple[int, ...] = ()


class ResourceState(msgspec.Struct):
    """The kubelet's record of one resource.

    Attributes:
        healthy, unhealthy: sets of device ids.
        devices: the devices of the newest list by id; kept after the plugin's end.
        allocated: the ids that the kubelet counts as allocated.
        endpoint: the socket path for requests; "" if no plugin has connected since the kubelet's start.
        stopped_at: when the stream ended, on the injected clock; None while a plugin is connected.
        streams: number of ListAndWatch streams that fill this table now.
        lists: number of lists since the kubelet's start.
        requested: the ids of the latest request to the plugin; empty after the next list.
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
        """Number of devices that the node reports, healthy or not."""
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        """Number of devices that pods may get."""
        return len(self.healthy)

    @property
    def free(self) -> set[str]:
        """Ids of healthy devices that no pod holds."""
        return self.healthy - self.allocated

    @property
    def numa(self) -> dict[str, tuple[int, ...]]:
        """NUMA node ids by device id, as sent."""
        return {device.id: device.numa for device in self.devices.values()}

    def grace_over(self, now: float) -> bool:
        """Return True if the plugin stopped more than GRACE_SECONDS ago, so that the kubelet removes the resource."""
        return self.stopped_at is not None and now - self.stopped_at > GRACE_SECONDS

    def replace(self, devices: Sequence[ListedDevice]) -> dict[str, str]:
        """Replace the table with a list. Return the health of each id that is new or whose health changed."""
        before = self.devices
        self.devices = {device.id: device for device in devices}
        # Read the list and not the table: an id that was sent twice, with different health, is in both sets, as in the kubelet.
        self.healthy = {device.id for device in devices if device.health == wire.HEALTHY}
        self.unhealthy = {device.id for device in devices if device.health != wire.HEALTHY}
        self.lists += 1
        return {
            device.id: device.health
            for device in self.devices.values()
            if device.id not in before or before[device.id].health != device.health
        }

    def mark_unhealthy(self, now: float) -> None:
        """Record that the plugin has stopped: no device is allocatable, and the capacity stays for the grace period."""
        self.unhealthy |= self.healthy
        self.healthy = set()
        self.stopped_at = now

    def health_of(self, identifier: str) -> str:
        """Return the device's health as the status of its pod shows it. An id that is not listed counts as Healthy."""
        device = self.devices.get(identifier)
        return wire.UNHEALTHY if device is not None and device.health != wire.HEALTHY else wire.HEALTHY


def parse(data: bytes) -> list[ListedDevice]:
    """Return the devices of an encoded ListAndWatchResponse, in its order. Raises ValueError if the bytes are invalid."""
    sent = messages.decode(messages.ListAndWatchResponse, data).devices
    return [ListedDevice(d.id, d.health, tuple(node.id for node in d.topology.nodes)) for d in sent]


def list_breaches(
    devices: Sequence[ListedDevice],
    before: Sequence[ListedDevice] | None,
    table: Mapping[str, ListedDevice],
    again: Callable[[], bool],
) -> list[str]:
    """Return the rules that a list breaks. `before` is the previous list of the same stream, `table` the newest of any stream.

    An unchanged list is allowed if a list of another plugin arrived in between, or if `again` returns True: the kubelet writes
    its checkpoint at each list.
    """
    found: list[str] = []
    seen: dict[str, ListedDevice] = {}
    for device in devices:
        found.extend(_device_breaches(device))
        if device.id in seen:
            found.append(f"device id {device.id!r} is twice in one list")
        seen[device.id] = device
    unchanged = before is not None and seen == {device.id: device for device in before} and len(before) == len(devices)
    if unchanged and seen == table and not again():
        found.append(f"an unchanged list of {len(devices)} devices was sent again")
    return found


def _device_breaches(device: ListedDevice) -> Iterable[str]:
    if not device.id:
        yield "a device has no id"
    if len(device.id) > MAX_ID_LENGTH:
        yield f"device id {device.id!r} has {len(device.id)} characters, more than {MAX_ID_LENGTH}"
    if device.health not in (wire.HEALTHY, wire.UNHEALTHY):
        yield f"device {device.id!r} has health {device.health!r}: neither {wire.HEALTHY} nor {wire.UNHEALTHY}"
    if any(node < 0 for node in device.numa):
        yield f"device {device.id!r} has NUMA node {min(device.numa)}: a device without a known node must have no topology"


class KubeletPanicError(AssertionError):
    """A plugin made the stand-in kubelet panic. The text is the cause. Only a new start ends this state."""


def list_panic(
    state: ResourceState, gone: set[str], allocated: set[str], in_flight: set[str], policy: NumaPolicy, *, strict: bool
) -> str:
    """Return why the newest list, already stored in `state`, makes the kubelet panic; "" if it does not.

    `gone` has the ids that the list no longer contains, `allocated` the ids that pods hold, and `in_flight` the ids in a running
    Allocate. If `strict`, every list that lacks a device of a pod is a panic.
    """
    lost = allocated - state.devices.keys()
    if torn := in_flight & gone:
        return f"{state.resource}: {sorted(torn)} left the list during their Allocate"
    if lost and state.lists == 1 and policy != "none" and any(state.numa.values()):
        return f"{state.resource}: pods are admitted again with {sorted(lost)}, which the first list lacks"
    if lost and strict:
        return f"{state.resource}: {sorted(lost)} left the list while pods hold them"
    return ""


def admission_panic(state: ResourceState, ids: Collection[str]) -> str:
    """Return why a pod with the devices `ids` makes the kubelet panic at its next admission; "" if it does not.

    Only a kubelet whose policy uses NUMA hints panics here.
    """
    lost = set(ids) - state.devices.keys()
    if not lost or not any(state.numa.values()):
        return ""
    return f"{state.resource}: a pod is admitted again with {sorted(lost)}, which the list lacks"
