"""What labels say of the machine itself, beside its GPUs. Immutable; `host_reading` fills it in."""

from collections.abc import Mapping

import msgspec


class VgpuHost(msgspec.Struct, frozen=True):
    """The driver of the hypervisor that gives this machine its vGPUs, as one of them says: its version and its branch."""

    version: str = ""
    branch: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """Attributes.

    machine: the product name that firmware tells; None where it cannot be read.
    pci_classes: class codes of PCI devices, by bus id as NVML writes it: 0x030000 is a VGA controller, 0x030200 a 3D one.
    vgpu: the hypervisor's driver where this machine has vGPUs, else None.
    """

    machine: str | None = None
    pci_classes: Mapping[str, int] = msgspec.field(default_factory=dict)
    vgpu: VgpuHost | None = None
