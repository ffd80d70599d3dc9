"""An immutable snapshot of the hardware, its health, and the resources.

Every request is answered from the newest snapshot. One writer publishes, and each waiter wakes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.sharing import DISTRIBUTED, MPS
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import MAX_DEVICE_ID, Device, Resource, with_reason
from gpu_plugin.devices.recent_allocations import RecentAllocations
from gpu_plugin.health.latch import Health
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.readiness import CdiReadiness

T = TypeVar("T")


class ResourceView(msgspec.Struct, frozen=True):
    """A resource with the data for requests.

    Attributes:
        resource: the devices.
        order: the position of each device id in the list.
        access: the settings that containers need.
        placement: the links between the node's GPUs.
        policy: the rule that chooses GPUs for shared devices.
        mps_down: the reason why devices that are shared by MPS cannot be used now; empty if they can.
        cdi: the devices with a CDI name that the container runtime can resolve; None if the runtime gets no CDI names.
    """

    resource: Resource
    order: Mapping[str, int]
    access: Access = msgspec.field(default_factory=Access)
    placement: Placement = msgspec.field(default_factory=Placement)
    policy: str = DISTRIBUTED
    mps_down: str = ""
    cdi: "CdiReadiness | None" = None

    @classmethod
    def of(cls, resource: Resource, access: Access, placement: Placement) -> "ResourceView":
        """Return the view of a resource.

        Raises ValueError if a device id occurs twice, which the kubelet would count wrong, or is longer than its API allows.
        """
        order = {device.id: at for at, device in enumerate(resource.devices)}
        if len(order) != len(resource.devices):
            raise ValueError(f"{resource.name}: a device id occurs twice")
        longest = max(order, key=len, default="")
        if len(longest) > MAX_DEVICE_ID:
            raise ValueError(f"{resource.name}: the device id {longest} has more than {MAX_DEVICE_ID} characters")
        return cls(resource, order, access, placement)

    def device(self, identifier: str) -> Device | None:
        """Return the device with this id; None without such a device."""
        at = self.order.get(identifier)
        return None if at is None else self.resource.devices[at]

    def with_reasons(self, reasons: Mapping[str, str]) -> "ResourceView":
        """Return the view with these health reasons by the uuid that containers see; "" is healthy. Without a change: itself.

        A device is unhealthy, too, if the plan withholds it, its MPS daemon is down, or CDI has no name for it.
        """
        changed = False
        lacking = "" if self.cdi is None else self.cdi.lacking(self.access.cdi_others)
        devices = []
        for device in self.resource.devices:
            new = device
            if device.visible_id in reasons:
                why = reasons[device.visible_id] or device.withheld or self._unreachable(device) or lacking
                new = with_reason(device, device.withheld if device.retired else why)
            changed = changed or new is not device
            devices.append(new)
        return replace(self, resource=Resource(self.resource.name, tuple(devices))) if changed else self

    def unreachable(self, device: Device) -> str:
        """Return the reason why no container can use a device even with healthy hardware; empty if a container can."""
        return self._unreachable(device) or ("" if self.cdi is None else self.cdi.lacking(self.access.cdi_others))

    def _unreachable(self, device: Device) -> str:
        """Return why a device cannot be used: its MPS daemon, a missing device node, or its CDI specification."""
        down = (self.mps_down if device.shared == MPS else "") or self.access.missing_node
        if down or self.cdi is None:
            return down
        return self.cdi.reason(self.access.id_of(device), (*device.nodes, *self.access.required_nodes))


class Hardware(msgspec.Struct, frozen=True):
    """A GPU or a MIG device of the node and its health, whether or not it is in a resource.

    `gpu` is the GPU's uuid. `index` is for example 0, and 0:1 for a MIG device.
    """

    gpu: str
    index: str
    health: Health = msgspec.field(default_factory=Health)


class Snapshot(msgspec.Struct, frozen=True):
    """Every resource by name, and all hardware by its own uuid, at one moment. A greater version is newer."""

    version: int = 0
    resources: Mapping[str, ResourceView] = msgspec.field(default_factory=dict)
    hardware: Mapping[str, Hardware] = msgspec.field(default_factory=dict)

    def allocated(self, holders: Mapping[tuple[str, str], T]) -> Iterator[tuple[str, Device, T]]:
        """Return resource, device and holders of each entry of `holders`, by resource and device id, if the device is listed."""
        for (name, identifier), holding in holders.items():
            view = self.resources.get(name)
            device = None if view is None else view.device(identifier)
            if device is not None:
                yield name, device, holding


class SnapshotStore:
    """Holds the newest snapshot. One writer, on the event loop; readers on any thread read `current` once for each request."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self.changed = Pulse()
        self.recent = RecentAllocations()
        """Devices that were given to containers a moment ago."""
        self.lists_stopped = False
        """True if no list may be sent any more, because the kubelet has the lists of a new daemon."""
        self._again: Counter[str] = Counter()

    def publish(
        self, resources: Mapping[str, ResourceView], hardware: Mapping[str, Hardware] | None = None
    ) -> Snapshot:
        """Publish resources and hardware, and wake each waiter. Without `hardware`, the former hardware stays.

        A mapping without a change stays the same object. Nothing happens if the resources are the same objects and the hardware
        is equal.
        """
        old = self.current
        same = old.resources.keys() == resources.keys()
        same = same and all(view is resources[name] for name, view in old.resources.items())
        known = old.hardware if hardware is None or hardware == old.hardware else hardware
        if old.version and same and known is old.hardware:
            return old
        self.current = Snapshot(old.version + 1, old.resources if same else dict(resources), known)
        self.changed.ring()
        return self.current

    def resend(self, resource: str) -> None:
        """Request that the same list of a resource is sent again, and wake each waiter."""
        self._again[resource] += 1
        self.changed.ring()

    def resends(self, resource: str) -> int:
        """Return the number of `resend` calls for a resource."""
        return self._again[resource]
