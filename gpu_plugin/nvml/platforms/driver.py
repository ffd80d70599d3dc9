"""Detects this node's platform from its files, and forwards calls to the driver of that platform. Blocks."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_plugin.containers.cdi.host_files import DXCORE, DXCORE_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.platforms.choice import AUTO, Choice, Platform, Traces, choose
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Handle, NvmlError

_ONLY = Handle(1)

_WINDOWS_DRIVER = (
    f"On WSL that is the driver of the Windows host: install it there, and mount /{WSL_LIBRARIES.rpartition('/')[0]} "
    "at the same path"
)


class OneDeviceDriver(Driver):
    """`port.Driver` of a node with one device, at index 0. Calls that are not implemented here raise NOT_SUPPORTED.

    These platforms do not report the health, memory, place or events of GPUs, neither here nor to NVIDIA's plugin.
    """

    why_unanswered = "not known on this platform"
    only = ""  # The device's uuid

    def open(self) -> None:
        """Nothing needs to be opened."""

    def close(self) -> None:
        """Nothing needs to be closed."""

    def driver_version(self) -> str:
        """Return an empty text: the version is not known here."""
        return ""

    def device_count(self) -> int:
        """Return one."""
        return 1

    def handle_by_index(self, index: int) -> Handle:
        """Return the device's handle. INVALID_ARGUMENT for any index but 0."""
        if index:
            raise NvmlError(Return.INVALID_ARGUMENT, "handle_by_index")
        return _ONLY

    def handle_by_uuid(self, uuid: str) -> Handle:
        """Return the device's handle. NOT_FOUND for any other uuid."""
        if uuid != self.only:
            raise NvmlError(Return.NOT_FOUND, "handle_by_uuid")
        return _ONLY

    def uuid(self, handle: Handle) -> str:
        """Return the device's uuid for any handle, since there is only one device."""
        del handle
        return self.only


class WslDriver(OneDeviceDriver):
    """All NVIDIA GPUs of the Windows host as one device, since they cannot be distinguished behind /dev/dxg.

    NVML shows whether there is an NVIDIA GPU: a Windows host has /dev/dxg and libdxcore.so for GPUs of all vendors.
    """

    only = WSL_GPUS

    def __init__(self, nvml: Driver) -> None:
        self._nvml = nvml
        self._count = 0

    def open(self) -> None:
        """Read the number of GPUs from NVML, and close NVML again.

        Raises NvmlError if there is no NVML library, or it does not work.
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
        """Return 1, or 0 if NVML counted no GPU when this was opened."""
        return min(self._count, 1)


class TegraDriver(OneDeviceDriver):
    """The GPU of a Tegra chip."""

    only = TEGRA_GPU


_DXCORE = tuple(f"{directory}/{DXCORE}" for directory in DXCORE_DIRECTORIES)
_DXG = ("dev/dxg",)
_TEGRA_RELEASE = "etc/nv_tegra_release"
_TEGRA_FAMILY = "sys/devices/soc0/family"


def look(roots: Sequence[str]) -> Traces:
    """Find the platform's files below these directories, each treated as the root of a file system. The first match counts."""
    return Traces(_first(roots, _DXCORE), _first(roots, _DXG), _first(roots, (_TEGRA_RELEASE,)) or _family(roots))


def _first(roots: Iterable[str], paths: Iterable[str]) -> str:
    """Return the first of these files that exists. A link counts even if it is broken: it may be relative to its root."""
    files = (os.path.join(root, path) for root in roots for path in paths)  # noqa: PTH118
    return next((f for f in files if os.path.lexists(f) and not os.path.isdir(f)), "")  # noqa: PTH112


def _family(roots: Iterable[str]) -> str:
    """Return the file in which the kernel names the chip's family, if that is Tegra; else an empty text."""
    for root in roots:
        file = Path(root, _TEGRA_FAMILY)
        try:
            family = file.read_bytes()
        except OSError:
            continue
        if family.lower().startswith(b"tegra"):
            return str(file)
    return ""


log = logging.getLogger(__name__)

_NO_TEGRA = (
    "this machine is not a Tegra system: its processor is not ARM, and neither /etc/nv_tegra_release nor "
    "/sys/devices/soc0/family shows one"
)
_MOUNT_WSL = "if the node is WSL, mount its directory /usr/lib/wsl into the container at the same path"

ARM = frozenset({"aarch64", "arm64"})  # the kernel's names of machines whose processor may have an integrated GPU

# Seconds all GPUs together may take to report their names. The first call wakes a sleeping GPU; a faulty GPU may hang.
NAMES_PATIENCE = 5.0


class PlatformDriver(Driver):
    """`port.Driver` of this node's platform. Each `open` detects the platform again: a driver may be installed later."""

    def __init__(
        self, nvml: Driver, roots: Sequence[str], strategy: str = AUTO, machine: str = os.uname().machine
    ) -> None:
        """Store NVML's driver, the root directories below which to look for files, and the operator's strategy.

        `machine` is the kernel's name for the kind of processor.
        """
        self.chosen = nvml
        self._nvml = nvml
        self._drivers: dict[Platform, Driver] = {
            Platform.NVML: nvml,
            Platform.WSL: WslDriver(nvml),
            Platform.TEGRA: TegraDriver(),
        }
        self._roots = tuple(dict.fromkeys(roots))
        self._strategy = strategy
        self._may_integrate = machine in ARM
        self._nvml_open = False
        self._logged: Choice | None = None

    def open(self) -> None:
        """Detect this node's platform and open its driver.

        Raises NvmlError if the platform is NVML or WSL and there is no working NVML, and if the operator chose Tegra on a
        machine that cannot be a Tegra system.
        """
        self._nvml_open = False
        traces = look(self._roots)
        choice = choose(self._strategy, traces, self._models)
        if choice.platform is Platform.TEGRA and not traces.tegra and not self._may_integrate:
            raise NvmlError(Return.NOT_SUPPORTED, "--device-discovery-strategy=tegra", _NO_TEGRA)
        if choice.platform is Platform.NVML and not self._nvml_open:
            self._open_nvml(traces)
        elif choice.platform is not Platform.NVML and self._nvml_open:
            self._nvml.close()
        self.chosen = self._drivers[choice.platform]
        if choice != self._logged:
            level = logging.DEBUG if choice.platform is Platform.NVML else logging.INFO  # most nodes have NVML
            log.log(level, "this node's platform is %s: %s", choice.platform, choice.reason)
        self._logged = choice
        if self.chosen is not self._nvml:
            self.chosen.open()

    def _open_nvml(self, traces: Traces) -> None:
        try:
            self._nvml.open()
        except NvmlError as error:
            if error.code == Return.LIBRARY_NOT_FOUND and traces.dxg and not traces.dxcore:
                raise NvmlError(error.code, error.call, f"{error.text}. {traces.dxg} exists: {_MOUNT_WSL}") from None
            raise

    def _models(self) -> tuple[str, ...] | None:
        """Open NVML, and return the GPUs' names if a GPU may be integrated into the processor. None: there is no library."""
        try:
            self._nvml.open()
        except NvmlError as error:
            if error.code == Return.LIBRARY_NOT_FOUND:
                return None
            raise
        self._nvml_open = True
        return self._names() if self._may_integrate else ()

    def _names(self) -> tuple[str, ...]:
        """Return the names of the GPUs that report theirs in time. A GPU that hangs is left out."""
        names: dict[int, str] = {}

        def ask(index: int) -> None:
            try:
                names[index] = self._nvml.name(self._nvml.handle_by_index(index))
            except NvmlError as error:
                log.debug("GPU %d does not report its name: %s", index, error)

        try:
            count = self._nvml.device_count()
        except NvmlError:
            return ()  # the next call reads the count again, and gets the error
        asking = [threading.Thread(target=ask, args=(i,), name=f"nvml-name-{i}", daemon=True) for i in range(count)]
        until = time.monotonic() + NAMES_PATIENCE
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(name for _, name in sorted(names.copy().items()))


def _forwarding(name: str) -> Callable[..., Any]:

    def forward(self: PlatformDriver, /, *arguments: Any, **named: Any) -> Any:
        return getattr(self.chosen, name)(*arguments, **named)

    return forward


for _call in NVML_FUNCTIONS.keys() - {PlatformDriver.open.__name__}:
    setattr(PlatformDriver, _call, _forwarding(_call))
