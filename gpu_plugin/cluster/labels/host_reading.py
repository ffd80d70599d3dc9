"""Asks the host what labels say of it. Blocks: files of /sys."""

from collections.abc import Iterable

from gpu_plugin.cluster.labels.host_facts import HostFacts
from gpu_plugin.cluster.labels.vgpu import vgpu_host
from gpu_plugin.nvml.port import HostView


def host_facts(host: HostView, pci_bus_ids: Iterable[str]) -> HostFacts:
    """What the host says of the machine and of these PCI devices now."""
    bus_ids = [bus_id for bus_id in pci_bus_ids if bus_id]
    classes = {bus_id: kind for bus_id in bus_ids if (kind := host.pci_class(bus_id)) is not None}
    hypervisors = (vgpu_host(host.pci_config(bus_id)) for bus_id in bus_ids)
    return HostFacts(host.machine(), classes, next(filter(None, hypervisors), None))
