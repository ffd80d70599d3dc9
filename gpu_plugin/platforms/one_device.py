"""Platforms that show all their GPUs as one device and say nothing else of it."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gpu_plugin.access.cdi.directories import WSL_LIBRARIES
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import Driver, Handle, NvmlError

P = ParamSpec("P")
T = TypeVar("T")

_ONLY = Handle(1)

_WINDOWS_DRIVER = (
    f"On WSL that is the driver of the Windows host: install it there, and mount /{WSL_LIBRARIES.rpartition('/')[0]} "
    "at the same path"
)


def _unanswered(call: Callable[P, T]) -> Callable[P, T]:
    """The call of a driver that never answers it."""

    def refused(*_arguments: P.args, **_named: P.kwargs) -> T:
        raise NvmlError(Return.NOT_SUPPORTED, call.__name__, "not known on this platform")

    return refused


class OneDeviceDriver:
    """`port.Driver` of a node with one device of this uuid, at index 0; what else NVML can be asked is NOT_SUPPORTED.

    None of these platforms tells of its GPUs' health, memory, place or events, to NVIDIA's plugin either.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def open(self) -> None:
        """Nothing needs to be opened."""

    def close(self) -> None:
        """Nothing needs to be closed."""

    def driver_version(self) -> str:
        """Empty: it is not known here."""
        return ""

    def device_count(self) -> int:
        """One."""
        return 1

    def handle_by_index(self, index: int) -> Handle:
        """That of the device. INVALID_ARGUMENT for any index but 0."""
        if index:
            raise NvmlError(Return.INVALID_ARGUMENT, "handle_by_index")
        return _ONLY

    def handle_by_uuid(self, uuid: str) -> Handle:
        """That of the device. NOT_FOUND for any uuid but its own."""
        if uuid != self._uuid:
            raise NvmlError(Return.NOT_FOUND, "handle_by_uuid")
        return _ONLY

    def uuid(self, handle: Handle) -> str:
        """Its name, whatever the handle: there is no other."""
        del handle
        return self._uuid

    cuda_version = _unanswered(Driver.cuda_version)
    handle_by_pci_bus_id = _unanswered(Driver.handle_by_pci_bus_id)
    minor_number = _unanswered(Driver.minor_number)
    pci_bus_id = _unanswered(Driver.pci_bus_id)
    name = _unanswered(Driver.name)
    architecture = _unanswered(Driver.architecture)
    compute_capability = _unanswered(Driver.compute_capability)
    memory_total = _unanswered(Driver.memory_total)
    memory_used = _unanswered(Driver.memory_used)
    utilization = _unanswered(Driver.utilization)
    power_usage = _unanswered(Driver.power_usage)
    power_limit = _unanswered(Driver.power_limit)
    mig_mode = _unanswered(Driver.mig_mode)
    max_mig_devices = _unanswered(Driver.max_mig_devices)
    mig_handle = _unanswered(Driver.mig_handle)
    gpu_instance_id = _unanswered(Driver.gpu_instance_id)
    compute_instance_id = _unanswered(Driver.compute_instance_id)
    mig_attributes = _unanswered(Driver.mig_attributes)
    numa_node = _unanswered(Driver.numa_node)
    compute_mode = _unanswered(Driver.compute_mode)
    set_compute_mode = _unanswered(Driver.set_compute_mode)
    persistence_mode = _unanswered(Driver.persistence_mode)
    temperature = _unanswered(Driver.temperature)
    temperature_threshold = _unanswered(Driver.temperature_threshold)
    margin_temperature = _unanswered(Driver.margin_temperature)
    uncorrected_ecc_errors = _unanswered(Driver.uncorrected_ecc_errors)
    sram_threshold_exceeded = _unanswered(Driver.sram_threshold_exceeded)
    remapped_rows = _unanswered(Driver.remapped_rows)
    retired_pages_pending = _unanswered(Driver.retired_pages_pending)
    unrepairable_memory = _unanswered(Driver.unrepairable_memory)
    clocks_event_reasons = _unanswered(Driver.clocks_event_reasons)
    nvlink_states = _unanswered(Driver.nvlink_states)
    nvlink_to_switch = _unanswered(Driver.nvlink_to_switch)
    fabric = _unanswered(Driver.fabric)
    pcie_link = _unanswered(Driver.pcie_link)
    pcie_replays = _unanswered(Driver.pcie_replays)
    total_energy = _unanswered(Driver.total_energy)
    supported_event_types = _unanswered(Driver.supported_event_types)
    field_values = _unanswered(Driver.field_values)
    nvlink_remote_bus_id = _unanswered(Driver.nvlink_remote_bus_id)
    common_ancestor = _unanswered(Driver.common_ancestor)
    event_set = _unanswered(Driver.event_set)
    free_event_set = _unanswered(Driver.free_event_set)
    register_events = _unanswered(Driver.register_events)
    wait = _unanswered(Driver.wait)


class WslDriver(OneDeviceDriver):
    """All NVIDIA GPUs of the Windows host as one device: behind /dev/dxg they cannot be told apart.

    Whether there is any, NVML knows: a Windows host has /dev/dxg and libdxcore.so for GPUs of every make.
    """

    def __init__(self, nvml: Driver) -> None:
        super().__init__(WSL_GPUS)
        self._nvml = nvml
        self._count = 0

    def open(self) -> None:
        """Asks NVML how many GPUs there are, and leaves it closed.

        Raises:
            NvmlError: there is no NVML library, or it does not work.
        """
        self._count = 0
        try:
            self._nvml.open()
        except NvmlError as error:
            if error.code == Return.LIBRARY_NOT_FOUND:
                raise NvmlError(error.code, error.call, f"{error.text}. {_WINDOWS_DRIVER}") from None
            raise
        try:
            self._count = self._nvml.device_count()
        finally:
            self._nvml.close()

    def device_count(self) -> int:
        """One, or none where NVML counted no GPU when this was opened."""
        return min(self._count, 1)


class TegraDriver(OneDeviceDriver):
    """The GPU that is part of a Tegra chip."""

    def __init__(self) -> None:
        super().__init__(TEGRA_GPU)
