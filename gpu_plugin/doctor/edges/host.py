"""NVIDIA's devices on the PCI bus and under /dev, and traces of its services: the fabric manager, and MPS daemons.

All functions block. Opening a GPU's device node wakes the GPU, which can take seconds.
"""

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpu_plugin.devices.mps_paths import CONTROL as MPS_CONTROL
from gpu_plugin.devices.mps_paths import PIPE
from gpu_plugin.doctor.edges.process import processes
from gpu_plugin.doctor.facts import DeviceNode, Mps, Pci
from gpu_plugin.runtime.peer import listening

# PCI code and ID assignment specification
_NVIDIA = 0x10DE  # vendor
_DISPLAY = 0x03  # base class of GPUs
_NVSWITCH = 0x0680  # class and subclass of NVSwitches

_MAJOR = re.compile(r"^\s*(\d+) (\S+)$", re.MULTILINE)

CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
"""Device nodes that CUDA opens in addition to a node for each GPU."""

_CHANNELS = "dev/nvidia-caps-imex-channels"

_FABRIC_MANAGER = "nv-fabricmanage"  # the first 15 characters of its name
_FABRIC_SOCKET = "run/nvidia-fabricmanager/socket"
_MPS = "nvidia-cuda-mps"

_MAX_DIRECTORIES = 64
"""The most directories of MPS daemons that are read."""


def pci(sys: Path = Path("/sys"), roots: Iterable[str] = ()) -> Pci:
    """Read the GPUs and NVSwitches of sysfs, and whether /dev/dxg exists under any root.

    Raises OSError if sysfs has no PCI bus.
    """
    gpus: dict[str, str] = {}
    switches: dict[str, str] = {}
    for device in sorted((sys / "bus/pci/devices").iterdir()):
        try:
            vendor = int((device / "vendor").read_text(), 16)
            kind = int((device / "class").read_text(), 16)
        except (OSError, ValueError):
            continue
        if vendor != _NVIDIA:
            continue
        bound = device / "driver"
        driver = bound.resolve().name if bound.exists() else ""
        if kind >> 16 == _DISPLAY:
            gpus[device.name] = driver
        elif kind >> 8 == _NVSWITCH:
            switches[device.name] = driver
    return Pci(gpus, switches, any(Path(root, "dev/dxg").exists() for root in roots))


def majors(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the majors of character devices by driver. Raises OSError."""
    characters = (proc / "devices").read_text().partition("Block devices:")[0]
    return {name: int(number) for number, name in _MAJOR.findall(characters)}


def imex_channels(roots: Iterable[str]) -> tuple[str, ...]:
    """Return the IMEX channels with a device node under any of these roots, as paths under /dev."""
    found: set[str] = set()
    for root in roots:
        found.update(f"/{_CHANNELS}/{path.name}" for path in Path(root, _CHANNELS).glob("channel*"))
    return tuple(sorted(found))


def device_node(path: str, root: str = "") -> DeviceNode:
    """Return a device node below `root`, with the result of opening it as CUDA does, to read and write."""
    file = f"{root.rstrip('/')}{path}"
    try:
        there = os.stat(file)  # noqa: PTH116 - only a character device is opened
    except (FileNotFoundError, NotADirectoryError):
        return DeviceNode(path)
    except OSError as error:
        return DeviceNode(path, error=error.errno or 0, reason=error.strerror or str(error))
    if not stat.S_ISCHR(there.st_mode):
        return DeviceNode(path, there=True)
    numbers = os.major(there.st_rdev), os.minor(there.st_rdev)
    mode = stat.S_IMODE(there.st_mode)
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return DeviceNode(path, True, *numbers, mode, error.errno or 0, error.strerror or str(error))
    return DeviceNode(path, True, *numbers, mode, 0)


def fabric_manager(roots: Iterable[str], proc: Path = Path("/proc")) -> str:
    """Return a trace of nvidia-fabricmanager: its first process, or else its socket under a root; empty for none."""
    for pid, _ in processes((_FABRIC_MANAGER,), proc):
        return f"process {pid}"
    for path in (Path(root, _FABRIC_SOCKET) for root in roots):
        with suppress(OSError):
            if path.is_socket():
                return str(path)
    return ""


def mps(root: str, proc: Path = Path("/proc")) -> Mps:
    """Return traces of MPS daemons: their processes, and their directories below the MPS root (empty: no root)."""
    controls = sorted(Path(root).glob(f"*.*/*/{PIPE}/{MPS_CONTROL}"))[:_MAX_DIRECTORIES] if root else ()
    found = {str(each.parent.parent): listening(os.fspath(each)) for each in controls}
    return Mps(processes((_MPS,), proc), found, root)
