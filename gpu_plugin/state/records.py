"""The records in the files of the state directory: what each file holds, and what is made of it. No I/O."""

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from gpu_plugin.devices.device import Resource, device_id_fault
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.evidence import Evidence

HEALTH_FILE = "health.json"
JOURNAL_FILE = "health.journal"
GPUS_FILE = "gpus.json"
DEVICES_FILE = "devices.json"
OWN_MARKS_FILE = "cluster.json"
HANDOVER_FILE = "handover.json"


E = TypeVar("E")


class HealthMemory(msgspec.Struct, Generic[E], frozen=True):
    """The content of `HEALTH_FILE`, and of a line of `JOURNAL_FILE`: of the two, that of the greater `sequence` is in force.

    Of the same one the journal's: it was written later. `HANDOVER_FILE` has the evidence that a former daemon found after it
    had unlocked the state directory.

    `boot_id` is the boot in which it was written, each entry's the one in which it was true. Entries that are read are
    understood one by one, so that one of a wrong type costs no other.
    """

    boot_id: str
    evidence: tuple[E, ...] = ()
    sequence: int = 0


WrittenHealth = HealthMemory[msgspec.Raw]


KNOWN = ("uuid", "index", "minor", "pci_bus_id", "model", "numa_node", "mig_enabled", "mig_devices")
"""What `GPUS_FILE` remembers of a `Gpu`: enough to list it again when the driver cannot describe it."""


class GpuMemory(msgspec.Struct, frozen=True):
    """The content of `GPUS_FILE`: the GPUs of that boot, and those that the node had in an earlier boot and lacked then."""

    boot_id: str
    gpus: tuple[Gpu, ...] = ()
    absent: tuple[Gpu, ...] = ()


class WrittenGpus(msgspec.Struct, frozen=True):
    """`GpuMemory`, with entries that are understood one by one."""

    boot_id: str
    gpus: tuple[msgspec.Raw, ...] = ()
    absent: tuple[msgspec.Raw, ...] = ()


class ListedDevice(msgspec.Struct, frozen=True):
    """A device as `DEVICES_FILE` remembers it: enough to list it again, unhealthy, once it is gone."""

    id: str
    gpu: str
    visible_id: str
    index: str
    kind: str
    shared: str = ""
    numa: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


class DeviceMemory(msgspec.Struct, frozen=True):
    """The content of `DEVICES_FILE`, by resource name: what the kubelet was told of, and what pods hold under `foreign` names."""

    boot_id: str
    resources: dict[str, tuple[ListedDevice, ...]]
    foreign: dict[str, tuple[ListedDevice, ...]] = msgspec.field(default_factory=dict)


class WrittenDevices(msgspec.Struct, frozen=True):
    """`DeviceMemory`, with resources and devices that are understood one by one."""

    boot_id: str
    resources: dict[str, msgspec.Raw]
    foreign: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class OwnMarks(msgspec.Struct, frozen=True):
    """The content of `OWN_MARKS_FILE`: whether our condition and taint may be on the Node, to be taken back once not wanted."""

    condition: bool = False
    taint: bool = False


def gpu(raw: msgspec.Raw) -> Gpu:
    """A remembered GPU. Raises ValueError for an entry that cannot be, with what is wrong."""
    try:
        known = msgspec.json.decode(raw, type=Gpu)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if fault := device_id_fault(known.uuid):
        raise ValueError(f"its uuid would be its device's id, and {fault}")
    if known.index < 0:
        raise ValueError("its index is below 0")
    return known


def entry(raw: msgspec.Raw) -> Evidence:
    """An entry. Raises ValueError for one that cannot be, with what is wrong."""
    try:
        found = msgspec.json.decode(raw, type=Evidence)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not found.possible:
        raise ValueError("its times or numbers are out of range")
    return found


def by_name(listed: Iterable[Resource]) -> dict[str, tuple[ListedDevice, ...]]:
    """Devices as they are written, by the name of their resource."""
    # One by one: a single conversion of tens of thousands would hold up every other thread to its end.
    return {
        resource.name: tuple(msgspec.convert(device, ListedDevice, from_attributes=True) for device in resource.devices)
        for resource in listed
    }
