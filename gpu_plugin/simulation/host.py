"""What /sys, /dev and /proc of a simulated node say."""

from gpu_plugin.simulation.hardware import SimulatedNode


class SimulatedHost:
    """The port's `HostView` on a `SimulatedNode`."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._numa = {gpu.pci_bus_id: gpu.numa_node for gpu in node.profile.gpus}

    def numa_node(self, pci_bus_id: str) -> int | None:
        """The profile's, for a bus id as NVML (00000000:1B:00.0) or sysfs (0000:1b:00.0) writes it; None: not known."""
        domain, _, rest = pci_bus_id.partition(":")
        node = self._numa.get(f"{domain:0>8}:{rest}".upper(), -1)
        return node if node >= 0 else None

    def device_nodes(self) -> frozenset[str]:
        """The profile's, those of lost GPUs included: udev removes none."""
        return self._node.profile.device_nodes

    def boot_id(self) -> str:
        """Changes when the node's state is gone, and at no other time."""
        return self._node.boot_id
