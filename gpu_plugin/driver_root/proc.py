"""What the driver's files under /proc say of its GPUs, for a root without a running driver, such as a copy of a node's."""

import re
from pathlib import Path

from gpu_plugin.devices.node import Gpu

_LONGEST = 64 * 1024
_LINE = re.compile(r"^([A-Za-z ]+):\s+(.*?)\s*$", re.MULTILINE)
_BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")
_VERSION = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)*)\s")


def gpus(proc: Path) -> list[Gpu]:
    """The GPUs in driver/nvidia/gpus/*/information, in the order of their bus ids, which is NVML's; MIG devices are not there.

    Raises:
        OSError: there is no such directory.
    """
    found: list[Gpu] = []
    for directory in sorted((proc / "driver/nvidia/gpus").iterdir()):
        try:
            with (directory / "information").open(errors="replace") as file:
                said = dict(_LINE.findall(file.read(_LONGEST)))
        except OSError:
            continue
        uuid, minor = said.get("GPU UUID", ""), said.get("Device Minor", "")
        if uuid.startswith("GPU-") and minor.isdecimal():
            bus_id = _bus_id(said.get("Bus Location", directory.name))
            found.append(
                Gpu(uuid=uuid, index=len(found), minor=int(minor), pci_bus_id=bus_id, model=said.get("Model", ""))
            )
    return found


def _bus_id(said: str) -> str:
    """A bus id as NVML writes it, of one as the driver does (0000:1b:00.0); empty for anything else."""
    match = _BUS_ID.fullmatch(said)
    return f"{int(match[1], 16):08X}:{match[2].upper()}" if match else ""


def driver_version(proc: Path) -> str:
    """The version of the kernel's half in driver/nvidia/version, empty where it does not say."""
    try:
        with (proc / "driver/nvidia/version").open(errors="replace") as file:
            match = _VERSION.search(file.read(_LONGEST))
    except OSError:
        return ""
    return match[1] if match else ""
