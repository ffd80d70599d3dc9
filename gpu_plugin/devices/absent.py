"""Find missing GPUs: compare the PCI bus, the stored GPUs of the node and the driver's list. Pure."""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.gpu_names import bus_id_numbers, selected, short_bus_id
from gpu_plugin.devices.node import Gpu

_GIVEN_AWAY = ("vfio", "pci-stub")
"""Parts of the names of kernel drivers that hold a GPU for a virtual machine: vfio-pci, nvidia-vgpu-vfio and others."""


def absent_gpus(bus: Mapping[str, str] | None, before: Collection[Gpu], listed: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return GPUs that the bus or `before` has and the driver's list lacks; `unreadable` of each is the reason, for people.

    Args:
        bus: NVIDIA's GPUs on the PCI bus, each with the kernel driver bound to it (empty: no driver); None: not known.
        before: GPUs that the node is known to have had.
        listed: GPUs that the driver lists, or that are listed for the operator with the reason why they cannot be used.

    Returns:
        Known GPUs with their uuid. A GPU of which only the bus id is known has an empty uuid and the index -1. A GPU is not
        missing if a new GPU is in its slot, or a virtual machine holds it.
    """
    uuids, places = {gpu.uuid for gpu in listed}, {bus_id_numbers(gpu.pci_bus_id) for gpu in listed}
    former = {gpu.uuid: bus_id_numbers(gpu.pci_bus_id) for gpu in before}
    # The bus may be numbered again without the missing GPU, so that another known GPU has its bus id now
    moved = {at for gpu in listed if (at := bus_id_numbers(gpu.pci_bus_id)) != former.get(gpu.uuid, at)}
    known = [
        replace(gpu, pci_bus_id="") if former[gpu.uuid] in moved else gpu for gpu in before if gpu.uuid not in uuids
    ]
    on_bus = {bus_id_numbers(bus_id): (bus_id, driver) for bus_id, driver in (bus or {}).items()}
    strangers = [at for at, (_, driver) in on_bus.items() if at not in places and not held_for_guest(driver)]
    if len(strangers) <= sum(not gpu.pci_bus_id for gpu in listed):
        strangers = []  # they may be the listed GPUs that do not report their bus ids
    found = []
    for at in strangers:
        bus_id, driver = on_bus[at]
        gpu = next((gpu for gpu in known if bus_id_numbers(gpu.pci_bus_id) == at), Gpu("", -1, pci_bus_id=bus_id))
        bound = f"bound to {driver}" if driver else "without a driver"
        found.append(replace(gpu, unreadable=f"it is on the PCI bus, {bound}, and the NVIDIA driver does not list it"))
    where = "the NVIDIA driver does not list it" if bus is None else "it is not on the PCI bus"
    found += [
        replace(gpu, unreadable=f"the node had it before, and {where}")
        for gpu in known
        if (at := bus_id_numbers(gpu.pci_bus_id)) is None or (at not in places and at not in on_bus)
    ]
    return tuple(sorted(found, key=attrgetter("pci_bus_id", "uuid")))


def no_gpu(bus: Mapping[str, str] | None, before: Collection[Gpu], device_nodes: Collection[str]) -> str:
    """Return the reason why this node need not have a GPU, for people; empty if there may be a GPU.

    Args:
        bus: NVIDIA's GPUs on the PCI bus, as for `absent_gpus`.
        before: GPUs that the node is known to have had.
        device_nodes: paths of the node's device nodes. With /dev/dxg, WSL has GPUs without a PCI bus.
    """
    if bus is None or before or "/dev/dxg" in device_nodes:
        return ""
    if not bus:
        return "this node has no NVIDIA GPU on its PCI bus"
    if not all(map(held_for_guest, bus.values())):
        return ""
    holders = ", ".join(sorted(set(bus.values())))
    return f"this node has no NVIDIA GPU for containers: {holders} holds all {len(bus)} for virtual machines"


def missing_gpus(absent: Sequence[Gpu], settings: Settings) -> tuple[Gpu, ...]:
    """Return the absent GPUs that the settings do not exclude."""
    return tuple(selected(absent, settings.include_gpus, settings.exclude_gpus))


def named(gpu: Gpu) -> str:
    """Return a missing GPU's name for people: `GPU 0000:1b:00.0 (GPU-6f1c..., NVIDIA H100)`."""
    more = ", ".join(filter(None, (gpu.uuid, gpu.model)))
    return f"GPU {short_bus_id(gpu.pci_bus_id) or gpu.uuid}" + (f" ({more})" if more and gpu.pci_bus_id else "")


def remedy(uuid: str) -> str:
    """Return the action for a missing GPU, for people; `uuid` is empty if only its bus id is known."""
    found = "look for its bus id in the kernel's log; reset the GPU, reboot the node or have the GPU serviced"
    return f"{found}; if it was removed for good: gpu-plugin uncordon {uuid} --override" if uuid else found


def held_for_guest(driver: str) -> bool:
    """Return True if a kernel driver of this name holds a GPU for a virtual machine."""
    return any(part in driver for part in _GIVEN_AWAY)
