"""The one truth: an immutable snapshot of the hardware and its health, and of the resources made of it.

Whatever serves a request reads the newest snapshot. One writer publishes; who waits is woken.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.access.container import Access
from gpu_plugin.config.sharing import DISTRIBUTED, MPS
from gpu_plugin.devices.device import MAX_DEVICE_ID, Device, Resource, with_reason
from gpu_plugin.devices.recent_allocations import RecentAllocations
from gpu_plugin.health.latch import Health
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.readiness import CdiReadiness

T = TypeVar("T")


class ResourceView(msgspec.Struct, frozen=True):
    """A resource, ready to be asked about.

    `order` is the position of each device id in the list; `placement` knows how the node's GPUs are linked, `policy` says
    which GPUs shared devices are taken from; `mps_down` is why devices that are shared by MPS cannot be used now, empty where
    they can. `cdi` is which devices have a name that the container runtime knows, None where it is not told any.
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
        """The view of a resource.

        Raises ValueError where a device id occurs twice, which the kubelet would miscount, or is longer than its API allows.
        """
        order = {device.id: at for at, device in enumerate(resource.devices)}
        if len(order) != len(resource.devices):
            raise ValueError(f"{resource.name}: a device id occurs twice")
        longest = max(order, key=len, default="")
        if len(longest) > MAX_DEVICE_ID:
            raise ValueError(f"{resource.name}: the device id {longest} has more than {MAX_DEVICE_ID} characters")
        return cls(resource, order, access, placement)

    def device(self, identifier: str) -> Device | None:
        """The device of that id, if there is one."""
        at = self.order.get(identifier)
        return None if at is None else self.resource.devices[at]

    def with_reasons(self, reasons: Mapping[str, str]) -> "ResourceView":
        """The view after hardware got these reasons; the very same one where nothing changes.

        Hardware goes by what containers are told to see: the uuid of a GPU or of a MIG device. "" is healthy.

        A device that the plan holds back, whose MPS daemon is down, or that CDI does not know, is no healthier than that.
        """
        changed = False
        lacking = "" if self.cdi is None else self.cdi.lacking(self.access.cdi_others)
        devices = []
        for device in self.resource.devices:
            new = device
            if device.visible_id in reasons:
                fit = reasons[device.visible_id] or device.withheld or self._unreachable(device) or lacking
                new = with_reason(device, device.withheld if device.retired else fit)
            changed = changed or new is not device
            devices.append(new)
        return replace(self, resource=Resource(self.resource.name, tuple(devices))) if changed else self

    def unreachable(self, device: Device) -> str:
        """Why no container could use a device now though its hardware were healthy; empty where one could."""
        return self._unreachable(device) or ("" if self.cdi is None else self.cdi.lacking(self.access.cdi_others))

    def _unreachable(self, device: Device) -> str:
        """Why it cannot be used: its MPS daemon, a missing device node, or its CDI specification. Empty if it can."""
        down = (self.mps_down if device.shared == MPS else "") or self.access.missing_node
        if down or self.cdi is None:
            return down
        return self.cdi.reason(self.access.id_of(device), (*device.nodes, *self.access.required_nodes))


class Hardware(msgspec.Struct, frozen=True):
    """A GPU or a MIG device of the node, whether or not a resource is made of it, and its health.

    `gpu` is the GPU's uuid; `index` is such as 0, of a MIG device such as 0:1.
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
        """Resource, device and holders, of those `holders` by resource and device id whose device there is."""
        for (name, identifier), holding in holders.items():
            view = self.resources.get(name)
            device = None if view is None else view.device(identifier)
            if device is not None:
                yield name, device, holding


class SnapshotStore:
    """Holds the newest snapshot. One writer; any number of readers on the same event loop."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self.changed = Pulse()
        self.recent = RecentAllocations()
        """Devices that were given to containers a moment ago."""
        self._again: Counter[str] = Counter()

    def publish(
        self, resources: Mapping[str, ResourceView], hardware: Mapping[str, Hardware] | None = None
    ) -> Snapshot:
        """Makes these the truth and wakes who waits; without `hardware`, what is known of it stays.

        What does not change stays the very same mapping. Nothing happens where the resources are the same objects, and the
        hardware is equal.
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
        """Has the list of a resource sent once more as it is, and wakes who waits."""
        self._again[resource] += 1
        self.changed.ring()

    def resends(self, resource: str) -> int:
        """How often that was asked for."""
        return self._again[resource]
