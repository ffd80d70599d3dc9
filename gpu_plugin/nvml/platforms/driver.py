"""The driver of whatever platform this node turns out to be, by the files that tell platforms apart. Blocks."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_plugin.containers.cdi.directories import DXCORE, DXCORE_DIRECTORIES, WSL_LIBRARIES
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
    """`port.Driver` of a node with one device, at index 0; what else NVML can be asked is NOT_SUPPORTED.

    None of these platforms tells of its GPUs' health, memory, place or events, to NVIDIA's plugin either.
    """

    why_unanswered = "not known on this platform"
    only = ""
    """Its uuid."""

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
        if uuid != self.only:
            raise NvmlError(Return.NOT_FOUND, "handle_by_uuid")
        return _ONLY

    def uuid(self, handle: Handle) -> str:
        """The device's uuid, whatever the handle: there is no other."""
        del handle
        return self.only


class WslDriver(OneDeviceDriver):
    """All NVIDIA GPUs of the Windows host as one device: behind /dev/dxg they cannot be told apart.

    Whether there is any, NVML knows: a Windows host has /dev/dxg and libdxcore.so for GPUs of every make.
    """

    only = WSL_GPUS

    def __init__(self, nvml: Driver) -> None:
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

    only = TEGRA_GPU


_DXCORE = tuple(f"{directory}/{DXCORE}" for directory in DXCORE_DIRECTORIES)
_DXG = ("dev/dxg",)
_TEGRA_RELEASE = "etc/nv_tegra_release"
_TEGRA_FAMILY = "sys/devices/soc0/family"


def look(roots: Sequence[str]) -> Traces:
    """What is found under these directories, which are seen as the root of a file system each; the first find counts."""
    return Traces(_first(roots, _DXCORE), _first(roots, _DXG), _first(roots, (_TEGRA_RELEASE,)) or _family(roots))


def _first(roots: Iterable[str], paths: Iterable[str]) -> str:
    """The first of these files that exists; a link counts wherever it leads, as it may be meant within its root."""
    files = (os.path.join(root, path) for root in roots for path in paths)  # noqa: PTH118
    return next((f for f in files if os.path.lexists(f) and not os.path.isdir(f)), "")  # noqa: PTH112


def _family(roots: Iterable[str]) -> str:
    """The file in which the kernel names the family of the chip, if it is one of the Tegras."""
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
    "this machine is no Tegra system: its processor is not ARM, and neither /etc/nv_tegra_release nor "
    "/sys/devices/soc0/family says so"
)
_MOUNT_WSL = "if the node is WSL, mount its directory /usr/lib/wsl into the container at the same path"

ARM = frozenset({"aarch64", "arm64"})  # machines that a GPU can be part of the processor of, as the kernel calls them

NAMES_PATIENCE = 5.0
"""Seconds GPUs may take to say their names, all together; the first contact wakes a sleeping one, and a sick one hangs."""


class PlatformDriver(Driver):
    """`port.Driver` of this node's platform, which is looked for again at each `open`: a driver may come, or come late."""

    def __init__(
        self, nvml: Driver, roots: Sequence[str], strategy: str = AUTO, machine: str = os.uname().machine
    ) -> None:
        """Takes the driver where it is NVML's, the roots under which to look for files, and what the operator asks for.

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
        self._said: Choice | None = None

    def open(self) -> None:
        """Finds out what this node is, and opens the driver for that.

        Raises NvmlError where it is NVML's, or needs NVML as WSL does, and there is none that works; and where a Tegra is asked
        for that this machine cannot be.
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
        if choice != self._said:
            level = logging.DEBUG if choice.platform is Platform.NVML else logging.INFO  # NVML is what everyone expects
            log.log(level, "this node's platform is %s: %s", choice.platform, choice.reason)
        self._said = choice
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
        """Opens NVML, and asks it for the GPUs' names where one may be part of the processor; None: there is no library."""
        try:
            self._nvml.open()
        except NvmlError as error:
            if error.code == Return.LIBRARY_NOT_FOUND:
                return None
            raise
        self._nvml_open = True
        return self._names() if self._may_integrate else ()

    def _names(self) -> tuple[str, ...]:
        """The names of the GPUs that say theirs in time: one that hangs is no reason to find none."""
        names: dict[int, str] = {}

        def ask(index: int) -> None:
            try:
                names[index] = self._nvml.name(self._nvml.handle_by_index(index))
            except NvmlError as error:
                log.debug("GPU %d does not say its name: %s", index, error)

        try:
            count = self._nvml.device_count()
        except NvmlError:
            return ()  # whoever opens the driver asks for the count next, and hears why there is none
        asking = [threading.Thread(target=ask, args=(i,), name=f"nvml-name-{i}", daemon=True) for i in range(count)]
        until = time.monotonic() + NAMES_PATIENCE
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(name for _, name in sorted(names.copy().items()))


def _passed_on(name: str) -> Callable[..., Any]:

    def passed_on(self: PlatformDriver, /, *arguments: Any, **named: Any) -> Any:
        return getattr(self.chosen, name)(*arguments, **named)

    return passed_on


for _call in NVML_FUNCTIONS.keys() - {PlatformDriver.open.__name__}:
    setattr(PlatformDriver, _call, _passed_on(_call))
