"""Platforms that show all their GPUs as one device and say nothing else of it."""

from gpu_plugin.access.cdi.directories import WSL_LIBRARIES
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import Driver, Handle, NvmlError

_ONLY = Handle(1)

_WINDOWS_DRIVER = (
    f"On WSL that is the driver of the Windows host: install it there, and mount /{WSL_LIBRARIES.rpartition('/')[0]} "
    "at the same path"
)


class OneDeviceDriver(Driver):
    """`port.Driver` of a node with one device of this uuid, at index 0; what else NVML can be asked is NOT_SUPPORTED.

    None of these platforms tells of its GPUs' health, memory, place or events, to NVIDIA's plugin either.
    """

    why_unanswered = "not known on this platform"

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
        """Always one: the device."""
        return 1

    def handle_by_index(self, index: int) -> Handle:
        """The device's handle. INVALID_ARGUMENT for any index but 0."""
        if index:
            raise NvmlError(Return.INVALID_ARGUMENT, "handle_by_index")
        return _ONLY

    def handle_by_uuid(self, uuid: str) -> Handle:
        """The device's handle. NOT_FOUND for any uuid but its own."""
        if uuid != self._uuid:
            raise NvmlError(Return.NOT_FOUND, "handle_by_uuid")
        return _ONLY

    def uuid(self, handle: Handle) -> str:
        """The device's uuid, whatever the handle: there is no other."""
        del handle
        return self._uuid


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

        Raises NvmlError where there is no NVML library, or it does not work.
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
        """One device, or none where NVML counted no GPU when this was opened."""
        return min(self._count, 1)


class TegraDriver(OneDeviceDriver):
    """The GPU that is part of a Tegra chip."""

    def __init__(self) -> None:
        super().__init__(TEGRA_GPU)
