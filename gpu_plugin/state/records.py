"""The records in the state log and in files of the state directory, and their conversion. No I/O."""

from collections.abc import Iterable, Mapping

import msgspec

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu

OWN_MARKS_FILE = "cluster.json"
HANDOVER_FILE = "handover.json"


class HealthRecord(msgspec.Struct, frozen=True):
    """The record of health, and the content of `HANDOVER_FILE`: evidence that a former daemon found after its handover.

    `boot_id` is the boot in which the record was written. The boot id of an entry is the boot in which the entry was true. Each
    entry is decoded separately: an entry that this version cannot use does not affect the others.
    """

    boot_id: str
    evidence: tuple[msgspec.Raw, ...] = ()


KNOWN = ("uuid", "index", "minor", "pci_bus_id", "model", "numa_node", "mig_enabled", "mig_devices")
"""The fields of a `Gpu` in the record of GPUs: enough to list the GPU again when the driver cannot describe it."""


class GpuRecord(msgspec.Struct, frozen=True):
    """The record of GPUs: the GPUs of the boot `boot_id`, and in `absent` GPUs that only an earlier boot had."""

    boot_id: str
    gpus: tuple[Gpu, ...] = ()
    absent: tuple[Gpu, ...] = ()


class ListedDevice(msgspec.Struct, frozen=True):
    """A device in the record of devices: enough to list the device again as Unhealthy after it was removed."""

    id: str
    gpu: str
    visible_id: str
    index: str
    kind: str
    shared: str = ""
    numa: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


class DeviceRecord(msgspec.Struct, frozen=True):
    """The record of devices: devices by resource name. `foreign` has devices that pods hold under unlisted names."""

    boot_id: str
    resources: dict[str, tuple[ListedDevice, ...]]
    foreign: dict[str, tuple[ListedDevice, ...]] = msgspec.field(default_factory=dict)


class OwnMarks(msgspec.Struct, frozen=True):
    """The content of `OWN_MARKS_FILE`: True if the Node may have this plugin's condition and taint."""

    condition: bool = False
    taint: bool = False


def by_name(listed: Iterable[Resource]) -> dict[str, tuple[ListedDevice, ...]]:
    """Return the records of the devices by resource name."""
    # Convert each device separately: a single conversion of tens of thousands would block all other threads until its end.
    return {
        resource.name: tuple(msgspec.convert(device, ListedDevice, from_attributes=True) for device in resource.devices)
        for resource in listed
    }


def resources(written: Mapping[str, Iterable[ListedDevice]]) -> tuple[Resource, ...]:
    """Return the devices of the records. Their number of replicas is not stored: code does not use that of a retired device."""
    return tuple(
        Resource(name, devices)
        for name, records in written.items()
        if (devices := tuple(_device(name, record) for record in records))
    )


def _device(resource: str, record: ListedDevice) -> Device:
    fields = msgspec.structs.asdict(record)
    shared = fields.pop("shared")
    return Device(**fields, sharing=SharedResource(resource, resource, 2, shared) if shared else None)
