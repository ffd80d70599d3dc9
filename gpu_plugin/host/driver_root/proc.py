"""What the driver's files under /proc say of its GPUs, for a root without a running driver, such as a copy of a node's."""

import re
from pathlib import Path

from gpu_plugin.devices.node import Gpu
from gpu_plugin.host.view import nvml_bus_id
from gpu_plugin.runtime.regular_file import open_file

_LONGEST = 4096  # bytes of a file that are read; the driver's have some 500

_UUID = re.compile(r"GPU-[0-9A-Za-z-]*[0-9A-Za-z]")
_MINOR = re.compile(r"[0-9]{1,7}")
_VERSION = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)*)\s")
_INSTANCES = "driver/nvidia/capabilities/gpu[0-9]*/mig/gi[0-9]*"


def gpus(proc: Path) -> list[Gpu]:
    """The GPUs in driver/nvidia/gpus/*/information, in the order of their bus ids, which is NVML's; MIG devices are not there.

    A directory whose information file gives no uuid or no minor number, or cannot be read, counts for none. Raises OSError
    where there is no such directory.
    """
    found: list[Gpu] = []
    for directory in sorted((proc / "driver/nvidia/gpus").iterdir()):
        said = _information(directory / "information")
        uuid, minor = said.get("GPU UUID", ""), said.get("Device Minor", "")
        if _UUID.fullmatch(uuid) and _MINOR.fullmatch(minor):
            bus_id = nvml_bus_id(said.get("Bus Location", directory.name))
            found.append(
                Gpu(uuid=uuid, index=len(found), minor=int(minor), pci_bus_id=bus_id, model=said.get("Model", ""))
            )
    return found


def partitioned(proc: Path) -> bool:
    """Whether any GPU has GPU instances, in driver/nvidia/capabilities/gpuN/mig/giM.

    driver/nvidia-caps/mig-minors says nothing of that: it lists every instance that there could be.
    """
    return any(proc.glob(_INSTANCES))


def driver_version(proc: Path) -> str:
    """The version of the kernel's half in driver/nvidia/version, empty where it does not say."""
    match = _VERSION.search(_text(proc / "driver/nvidia/version"))
    return match[1] if match else ""


def _information(file: Path) -> dict[str, str]:
    parts = (line.partition(":") for line in _text(file).split("\n"))
    return {key.strip(): value.strip() for key, colon, value in parts if colon}


def _text(file: Path) -> str:
    """How a file begins; empty where it cannot be read."""
    try:
        with open_file(file) as stream:
            return stream.read(_LONGEST).decode(errors="replace")
    except OSError:
        return ""
