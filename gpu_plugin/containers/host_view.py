"""Reads facts about GPUs from the node's /sys, /dev and /proc. `listed_gpus` and others read the /proc of any node."""

import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpu_plugin.devices.node import Gpu
from gpu_plugin.runtime.regular_file import open_file

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.host_files import HostDevices, Seen

# Patterns, under a root, of all device nodes that a container with a GPU may get.
_NODE_PATTERNS = (
    "dev/nvidia*",
    "dev/nvidia-caps/*",
    "dev/nvidia-caps-imex-channels/*",
    "dev/gdrdrv",
    "dev/infiniband/*",
    "dev/dxg",
)

_DRM_PATTERNS = ("dev/dri/*", "dev/dri/by-path/*")

_DRM_NODE = re.compile(r"(?:card|renderD)[0-9]+")

_MIG_MINORS = "driver/nvidia-caps/mig-minors"

_BINDINGS = "bus/pci/drivers/nvidia"

_PCI_DEVICES = "bus/pci/devices"
_NVIDIA = 0x10DE  # vendor
_DISPLAY = 0x03  # base class of GPUs

_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")

_LARGEST = (1 << 63) - 1  # the largest number that every reader of our state file accepts as an integer
_MAX_NUMA_NODES = 1024  # the most that a kernel can be built for (CONFIG_NODES_SHIFT of at most 10)

# A line of _MIG_MINORS for a GPU instance or compute instance: "gpu0/gi2/ci0/access 22". Other lines are config and monitor.
_MIG_MINOR = re.compile(rb"^(gpu[0-9]+/gi[0-9]+(?:/ci[0-9]+)?/access) ([0-9]+)$", re.MULTILINE)


class HostView(Protocol):
    """The facts about GPUs in a node's /sys, /dev and /proc, of a real node or a simulated node."""

    def numa_node(self, pci_bus_id: str) -> int | None:
        """Return numa_node of a PCI device from sysfs; None if the file is missing or negative (the NUMA node is unknown)."""

    def pci_path(self, pci_bus_id: str) -> str:
        """Return the sysfs path of a PCI device with every bridge above it; empty if it is not known.

        For example /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:19:00.0.
        """

    def machine(self) -> str | None:
        """Return the firmware's product name (/sys/class/dmi/id/product_name); None if it has no name, as on many Arm boards."""

    def pci_class(self, pci_bus_id: str) -> int | None:
        """Return the class code of a PCI device, such as 0x030200; None if it is not known."""

    def pci_config(self, pci_bus_id: str) -> bytes:
        """Return the first 256 bytes of a PCI device's configuration space.

        There are only 64 bytes without CAP_SYS_ADMIN, and no bytes if the file is missing.
        """

    def numa_distances(self) -> Mapping[tuple[int, int], int]:
        """Return the distance of each ordered pair of NUMA nodes, also of a node to itself (ACPI SLIT); empty if not known."""

    def device_roots(self) -> Mapping[str, str]:
        """Return the root on the host of each existing path under /dev that an NVIDIA driver may own, such as /dev/nvidiactl.

        Roots have no slash at the end; / is empty.
        """

    def devices(self, pci_bus_ids: Iterable[str]) -> "HostDevices":
        """Return the device nodes of GPUs, of their features and of the DRM, with their numbers. Links are followed.

        The DRM's device nodes are grouped by these bus ids.
        """

    def mig_minors(self) -> Mapping[str, int]:
        """Return N of /dev/nvidia-caps/nvidia-capN for each access file (/proc/driver/nvidia-caps/mig-minors).

        For example gpu0/gi2/access and gpu0/gi2/ci0/access, where 0 is the GPU's minor number. Empty if the file is missing.
        Returns the same object until the content changes.
        """

    def bindings(self) -> Mapping[str, int]:
        """Return a number for each GPU that the NVIDIA driver is bound to, by PCI bus id in NVML's form; empty if not known.

        The number changes whenever the driver is bound again: after a reload of the driver, or after the GPU was removed from the
        bus and found again. Numbers of different boots cannot be compared. Each number is below 2^63. Raises OSError if sysfs
        cannot be read now.
        """

    def pci_gpus(self) -> Mapping[str, str] | None:
        """Return the kernel driver of each of NVIDIA's GPUs on the PCI bus, by bus id in NVML's form.

        The driver's name is empty if no driver is bound. Virtual functions are left out. None if the devices are not known.
        """

    def boot_id(self) -> str:
        """Return an id that changes with every boot (/proc/sys/kernel/random/boot_id)."""


class LinuxHost:
    """`HostView` of this machine.

    `roots` are directories whose dev/ may have the device nodes, best first. Each entry is the path in this process and the path
    on the host. / itself comes after them. Their proc/ is read if a file is missing in `procfs`. `own` is False if all files
    belong to another machine; then / itself does not count.
    """

    def __init__(
        self, roots: Sequence[tuple[str, str]] = (), sysfs: str = "/sys", procfs: str = "/proc", *, own: bool = True
    ) -> None:
        self._roots: dict[str, str] = {}
        for seen_at, host in (*roots, *((("", ""),) if own else ())):
            self._roots.setdefault(seen_at.rstrip("/"), host.rstrip("/"))
        self._sysfs = Path(sysfs)
        self._procfs = Path(procfs)
        self._parsing = threading.Lock()
        self._pci_kinds: dict[str, bool] = {}
        self._mig_minors: tuple[bytes, Mapping[str, int]] = (b"", {})

    def numa_node(self, pci_bus_id: str) -> int | None:
        node = self._pci_number(pci_bus_id, "numa_node", 10)
        return None if node is None or node < 0 else node

    def pci_path(self, pci_bus_id: str) -> str:
        try:
            return os.path.realpath(self._pci_device(pci_bus_id), strict=True)
        except (OSError, ValueError):
            return ""

    def machine(self) -> str | None:
        try:
            return (self._sysfs / "class/dmi/id/product_name").read_text(errors="replace").strip()
        except OSError:
            return None

    def pci_class(self, pci_bus_id: str) -> int | None:
        return self._pci_number(pci_bus_id, "class", 16)

    def pci_config(self, pci_bus_id: str) -> bytes:
        try:
            with (self._pci_device(pci_bus_id) / "config").open("rb") as file:
                return file.read(256)
        except (OSError, ValueError):
            return b""

    def numa_distances(self) -> Mapping[tuple[int, int], int]:
        # The file of a NUMA node has a column for each node that is online, in ascending order (drivers/base/node.c). A node is
        # left out if its file cannot be read, or if the number of online nodes changed in the meantime.
        nodes = self._sysfs / "devices/system/node"
        try:
            online = _listed((nodes / "online").read_text())
        except (OSError, ValueError):
            return {}
        distances: dict[tuple[int, int], int] = {}
        for one in online:
            try:
                row = [int(column) for column in (nodes / f"node{one}/distance").read_bytes().split()]
            except (OSError, ValueError):
                continue
            if len(row) == len(online):
                distances |= {(one, other): distance for other, distance in zip(online, row, strict=True)}
        return distances

    def device_roots(self) -> Mapping[str, str]:
        roots: dict[str, str] = {}
        for host, seen, _ in self._characters(_NODE_PATTERNS):
            if not seen.fault:
                roots.setdefault(seen.path, host)
        return roots

    def devices(self, pci_bus_ids: Iterable[str]) -> "HostDevices":
        from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices  # noqa: PLC0415 - only CDI specifications need it

        nodes: dict[str, DeviceFile] = {}
        faults: dict[str, str] = {}
        for host, seen, status in self._characters((*_NODE_PATTERNS, *_DRM_PATTERNS)):
            if seen.fault:
                faults[seen.path] = seen.fault
                continue
            numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
            nodes.setdefault(seen.path, DeviceFile(*numbers, status.st_mode & 0o777, status.st_gid, root=host))
        drm = {bus_id: self._drm(bus_id) for bus_id in pci_bus_ids if bus_id}
        faults = {path: fault for path, fault in faults.items() if path not in nodes}
        searched = tuple(root or "/" for root in self._roots)
        return HostDevices(nodes, {bus_id: found for bus_id, found in drm.items() if found}, faults, searched)

    def _characters(self, patterns: Iterable[str]) -> Iterator[tuple[str, "Seen", os.stat_result]]:
        """Yield character devices, also unsafe devices: the host path of their root, the file, and its status."""
        from gpu_plugin.containers.cdi.host_files import Kind  # noqa: PLC0415 - simulated nodes do not need it
        from gpu_plugin.containers.driver_root.safe import judge  # noqa: PLC0415

        for (root, host), pattern in product(self._roots.items(), patterns):
            with suppress(OSError):  # an unreadable directory has no nodes for us
                for path in sorted(Path(root or "/").glob(pattern), key=str):
                    judged = judge(root, str(path).removeprefix(root), (Kind.DEVICE,))
                    if judged.way.status is not None and stat.S_ISCHR(judged.way.status.st_mode):
                        yield host, judged.seen, judged.way.status

    def _drm(self, pci_bus_id: str) -> tuple[str, ...]:
        """Return the paths of a PCI device's DRM device nodes, such as /dev/dri/card1 and /dev/dri/renderD128."""
        try:
            names = sorted(path.name for path in (self._pci_device(pci_bus_id) / "drm").iterdir())
        except (OSError, ValueError):
            return ()
        return tuple(f"/dev/dri/{name}" for name in names if _DRM_NODE.fullmatch(name))

    def mig_minors(self) -> Mapping[str, int]:
        # A driver lists every possible instance in over 4,000 lines, which are parsed again only after a change.
        content = b""
        for proc in (self._procfs, *(Path(root, "proc") for root in self._roots if root)):
            try:
                content = (proc / _MIG_MINORS).read_bytes()
            except OSError:
                continue
            break
        with self._parsing:  # so that the file is parsed once, and not for every GPU that is probed at the start
            if content != self._mig_minors[0]:
                self._mig_minors = content, {name.decode(): int(minor) for name, minor in _MIG_MINOR.findall(content)}
            return self._mig_minors[1]

    def bindings(self) -> Mapping[str, int]:
        # The number is the inode of the link from the driver to the GPU. The kernel makes the link when it binds the driver, and
        # gives increasing numbers to new inodes (fs/kernfs), so that a number does not occur again soon. The link's times cannot
        # be used: they are the times of the first read, and change when the kernel drops its cached inode.
        try:
            links = os.scandir(self._sysfs / _BINDINGS)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}  # the host does not have the driver, or does not show it
        with links:
            return {at: link.inode() & _LARGEST for link in links if (at := nvml_bus_id(link.name))}

    def pci_gpus(self) -> Mapping[str, str] | None:
        try:
            names = [device.name for device in (self._sysfs / _PCI_DEVICES).iterdir()]
        except OSError:
            return None
        # The type of a device does not change while its directory exists, so a scan reads only new directories.
        self._pci_kinds = {
            name: self._pci_kinds[name] if name in self._pci_kinds else self._is_gpu(name) for name in names
        }
        return {at: self._bound(name) for name in names if self._pci_kinds[name] and (at := nvml_bus_id(name))}

    def _is_gpu(self, name: str) -> bool:
        """Whether a device of sysfs is one of NVIDIA's GPUs and not a virtual function.

        Source: the PCI code and ID assignment specification.
        """
        device = self._sysfs / _PCI_DEVICES / name
        try:
            vendor, kind = int((device / "vendor").read_text(), 16), int((device / "class").read_text(), 16)
        except (OSError, ValueError):
            return False
        return vendor == _NVIDIA and kind >> 16 == _DISPLAY and not (device / "physfn").exists()

    def _bound(self, name: str) -> str:
        try:
            return (self._sysfs / _PCI_DEVICES / name / "driver").readlink().name
        except OSError:
            return ""

    def boot_id(self) -> str:
        return _text(self._procfs / "sys/kernel/random/boot_id").strip()

    def _pci_number(self, pci_bus_id: str, file: str, base: int) -> int | None:
        try:
            return int((self._pci_device(pci_bus_id) / file).read_text(), base)
        except (OSError, ValueError):
            return None

    def _pci_device(self, pci_bus_id: str) -> Path:
        """Return the directory of a PCI device in sysfs. Raises ValueError if the text is not a bus id."""
        # NVML writes the PCI domain with eight digits and in capitals, sysfs with at least four and in small letters.
        domain, _, rest = pci_bus_id.lower().partition(":")
        return self._sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest}"


def nvml_bus_id(name: str) -> str:
    """Convert a PCI bus id from the kernel's form (0000:1b:00.0) to NVML's form; empty for any other text."""
    found = _PCI_ADDRESS.fullmatch(name)
    return f"{int(found[1], 16):08X}:{found[2].upper()}" if found else ""


def _listed(text: str) -> list[int]:
    """Return the numbers of a kernel list such as 0-1,3, in ascending order. Raises ValueError for any other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < _MAX_NUMA_NODES:
            raise ValueError(text)
        numbers.update(range(low, high + 1))
    return sorted(numbers)


_LONGEST = 4096  # the most bytes of a file that are read; the driver's files have some 500

_UUID = re.compile(r"GPU-[0-9A-Za-z-]*[0-9A-Za-z]")
_MINOR = re.compile(r"[0-9]{1,7}")
_VERSION = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)*)\s")
_INSTANCES = "driver/nvidia/capabilities/gpu[0-9]*/mig/gi[0-9]*"


def listed_gpus(proc: Path) -> list[Gpu]:
    """Return the GPUs in driver/nvidia/gpus/*/information, in the order of their bus ids, the same as NVML's. No MIG devices.

    A GPU is left out if its information file cannot be read or has no uuid or no minor number. Raises OSError if
    driver/nvidia/gpus cannot be read.
    """
    found: list[Gpu] = []
    for directory in sorted((proc / "driver/nvidia/gpus").iterdir()):
        values = _information(directory / "information")
        uuid, minor = values.get("GPU UUID", ""), values.get("Device Minor", "")
        if _UUID.fullmatch(uuid) and _MINOR.fullmatch(minor):
            bus_id = nvml_bus_id(values.get("Bus Location", directory.name))
            found.append(
                Gpu(uuid=uuid, index=len(found), minor=int(minor), pci_bus_id=bus_id, model=values.get("Model", ""))
            )
    return found


def any_partitioned(proc: Path) -> bool:
    """Whether any GPU has GPU instances, in driver/nvidia/capabilities/gpuN/mig/giM.

    driver/nvidia-caps/mig-minors does not show this, since it lists every possible instance.
    """
    return any(proc.glob(_INSTANCES))


def kernel_driver_version(proc: Path) -> str:
    """Return the version of the kernel modules from driver/nvidia/version; empty if the file does not have it."""
    match = _VERSION.search(_text(proc / "driver/nvidia/version"))
    return match[1] if match else ""


def _information(file: Path) -> dict[str, str]:
    parts = (line.partition(":") for line in _text(file).split("\n"))
    return {key.strip(): value.strip() for key, colon, value in parts if colon}


def _text(file: Path) -> str:
    """Return at most the first _LONGEST bytes of a file as text; empty if it cannot be read."""
    try:
        with open_file(file) as stream:
            return stream.read(_LONGEST).decode(errors="replace")
    except OSError:
        return ""
