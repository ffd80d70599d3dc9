"""The driver: its library, its kernel module, and each GPU. Blocks as long as the driver does, which can be for ever."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from gpu_plugin.containers.host_view import kernel_driver_version
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.devices.nvml_h import FabricState
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.mig import mig_mode
from gpu_plugin.nvml.platforms.choice import Platform
from gpu_plugin.nvml.platforms.driver import TegraDriver, WslDriver
from gpu_plugin.nvml.port import Driver as Port
from gpu_plugin.nvml.port import Handle, NvmlError

T = TypeVar("T")

_VERSIONED = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


class Gpu(msgspec.Struct, frozen=True):
    """The driver's values of one GPU, None for an unreported value. `trouble` is the driver's error, empty for none.

    `mig_pending` is the MIG mode after the next reset if it changes then, `vgpu_licensed` whether a vGPU has its license.
    `compute_mode` is nvmlComputeMode_t. `nvswitch` is True if an NVLink of the GPU leads to a switch. A GPU without NVLinks has
    no `fabric`, even if the driver reports one: a GPU that was passed through alone waits for no fabric.
    """

    index: int
    uuid: str = ""
    bus_id: str = ""
    minor: int | None = None
    model: str = ""
    mig: bool = False
    mig_pending: bool | None = None
    vgpu_licensed: bool | None = None
    persistence: bool | None = None
    fabric: Fabric | None = None
    nvswitch: bool = False
    compute_mode: int | None = None
    trouble: str = ""


class Driver(msgspec.Struct, frozen=True):
    """The result of opening the driver's library: `code` is the nvmlReturn_t, `trouble` its text, empty if it is open.

    `library` is the path of the loaded file, empty for none. `version` is the version that the driver reports, or else that in
    the file's name. `count` is the number of GPUs, -1 if the driver does not report it; `count_trouble` is the reason.
    """

    code: int = 0
    trouble: str = ""
    library: str = ""
    version: str = ""
    platform: Platform = Platform.NVML
    count: int = 0
    count_trouble: str = ""
    gpus: tuple[Gpu, ...] = ()


class KernelModule(msgspec.Struct, frozen=True):
    """The driver's kernel module: whether it is loaded, its version (empty if unknown), and whether nouveau is loaded."""

    loaded: bool
    version: str = ""
    nouveau: bool = False


def read_module(root: Path) -> KernelModule:
    """Return the state of the driver's kernel module."""
    modules = root / "sys/module"
    version = kernel_driver_version(root / "proc")
    if not version:
        try:
            version = (modules / "nvidia/version").read_text()[:64].strip()
        except OSError:
            version = ""
    return KernelModule(bool(version) or (modules / "nvidia").exists(), version, (modules / "nouveau").exists())


def open_driver(hardware: Hardware) -> Driver:
    """Open the driver and count its GPUs. The driver stays open."""
    driver = hardware.driver
    try:
        driver.open()
    except NvmlError as error:
        library = hardware.library()
        return Driver(code=error.code, trouble=str(error), library=library, version=_version_of(library))
    library = hardware.library()
    version = _or_none(driver.driver_version) or _version_of(library)
    platform = _platform(driver)
    try:
        return Driver(library=library, version=version, platform=platform, count=driver.device_count())
    except NvmlError as error:
        return Driver(library=library, version=version, platform=platform, count=-1, count_trouble=str(error))


def describe_gpu(driver: Port, index: int) -> Gpu:
    """Return the driver's values of the GPU with this index."""
    try:
        handle = driver.handle_by_index(index)
        uuid = driver.uuid(handle)
    except NvmlError as error:
        return Gpu(index, trouble=str(error))
    mig, pending = _or_none(mig_mode, driver, handle) or (False, None)
    links = _or_none(driver.nvlink_states, handle) or ()
    fabric = _or_none(driver.fabric, handle) if links else None
    return Gpu(
        index,
        uuid,
        bus_id=_or_none(driver.pci_bus_id, handle) or "",
        minor=_or_none(driver.minor_number, handle),
        model=_or_none(driver.name, handle) or "",
        mig=mig,
        mig_pending=pending,
        vgpu_licensed=_or_none(driver.vgpu_licensed, handle),
        persistence=_or_none(driver.persistence_mode, handle),
        fabric=fabric,
        nvswitch=_leads_to_switch(driver, handle, links, fabric),
        compute_mode=_or_none(driver.compute_mode, handle),
    )


def _platform(driver: Port) -> Platform:
    chosen = getattr(driver, "chosen", driver)
    if isinstance(chosen, WslDriver):
        return Platform.WSL
    return Platform.TEGRA if isinstance(chosen, TegraDriver) else Platform.NVML


def _leads_to_switch(driver: Port, handle: Handle, links: tuple[bool, ...], fabric: Fabric | None) -> bool:
    """Return True if the first active NVLink leads to a switch. If the driver does not say, a fabric to join proves it."""
    up = next((link for link, active in enumerate(links) if active), None)
    if up is not None and (to_switch := _or_none(driver.nvlink_to_switch, handle, up)) is not None:
        return to_switch
    return fabric is not None and fabric.state != FabricState.NOT_SUPPORTED


def _or_none(ask: Callable[..., T], *arguments: object) -> T | None:
    """Return the driver's answer, or None if it refuses."""
    try:
        return ask(*arguments)
    except NvmlError:
        return None


def _version_of(library: str) -> str:
    """Return the version in the name of the library's file, after following links; empty if the name has no version."""
    found = _VERSIONED.search(str(Path(library).resolve())) if library else None
    return found[1] if found else ""
