"""The content of /sys, /dev and /proc of a simulated node."""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from gpu_plugin.simulation import mig
from gpu_plugin.simulation.gpu import UNKNOWN
from gpu_plugin.simulation.hardware import SimulatedNode

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.host_files import HostDevices


class SimulatedHost:
    """Implements `HostView` for a `SimulatedNode`, from its profile. Bus ids are in a form of `Profile.at`."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def numa_node(self, pci_bus_id: str) -> int | None:
        index = self._node.profile.at(pci_bus_id)
        node = -1 if index is None else self._node.profile.gpus[index].numa_node
        return node if node >= 0 else None

    def pci_path(self, pci_bus_id: str) -> str:
        """Return the profile's path; empty if it is no GPU's, or the GPU's place is unknown."""
        index = self._node.profile.at(pci_bus_id)
        if index is None or self._node.gpus[index].state.topology == UNKNOWN:
            return ""
        return self._node.profile.pci_paths[index]

    def machine(self) -> str | None:
        return self._node.profile.machine

    def pci_class(self, pci_bus_id: str) -> int | None:
        index = self._node.profile.at(pci_bus_id)
        return None if index is None else self._node.profile.gpus[index].pci_class

    def pci_config(self, pci_bus_id: str) -> bytes:
        """Return nothing: no simulated GPU is a vGPU."""
        del pci_bus_id
        return b""

    def numa_distances(self) -> Mapping[tuple[int, int], int]:
        return self._node.profile.numa_distances

    def device_roots(self) -> Mapping[str, str]:
        """Return the device nodes of the profile and of MIG devices, all below /. udev keeps the nodes of lost GPUs too."""
        return dict.fromkeys(self._node.device_nodes(), "")

    def devices(self, pci_bus_ids: Iterable[str]) -> "HostDevices":
        """Return the nodes of `device_roots` with the numbers used to make them. No simulated GPU has a DRM node."""
        del pci_bus_ids
        from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices  # noqa: PLC0415 - only CDI specifications need it
        from gpu_plugin.simulation.device_nodes import MODE, device_numbers  # noqa: PLC0415

        numbers = device_numbers(self._node.device_nodes())
        nodes = {path: DeviceFile(os.major(number), os.minor(number), MODE) for path, number in numbers.items()}
        return HostDevices(nodes)

    def mig_minors(self) -> Mapping[str, int]:
        """Return the minors of all possible MIG instances of the GPUs, as a real driver does."""
        return self._mig_minors

    @cached_property
    def _mig_minors(self) -> Mapping[str, int]:
        gpus = [gpu for gpu in self._node.profile.gpus if gpu.mig_profiles]
        return {name: minor for gpu in gpus for name, minor in mig.minors(gpu.minor).items()}

    def bindings(self) -> Mapping[str, int]:
        """Return the bindings of GPUs that have not vanished. They change after a return, a repair, or a boot."""
        return self._node.bindings()

    def pci_gpus(self) -> Mapping[str, str]:
        """Return the GPUs that have not vanished as bound to the NVIDIA driver."""
        return dict.fromkeys(self._node.bindings(), "nvidia")

    def boot_id(self) -> str:
        """Return the boot id, which changes only when the node boots or its state file is lost."""
        return self._node.boot_id
