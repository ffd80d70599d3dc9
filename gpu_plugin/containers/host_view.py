"""What the node's own /sys, /dev and /proc say about its GPUs; of a copy of a node, without a running driver, what /proc does."""

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

# Every node under /dev that a container could be given on account of a GPU, as patterns under a root.
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

_LARGEST = (1 << 63) - 1  # the largest number that any reader of our state file takes for an integer
_MAX_NUMA_NODES = 1024  # as many as any kernel can be built for (CONFIG_NODES_SHIFT of at most 10)

# A line of it that is a GPU or compute instance's: "gpu0/gi2/ci0/access 22". The others are config and monitor.
_MIG_MINOR = re.compile(rb"^(gpu[0-9]+/gi[0-9]+(?:/ci[0-9]+)?/access) ([0-9]+)$", re.MULTILINE)


class HostView(Protocol):
    """What the node's file system says about GPUs: /sys, /dev, /proc. Real, or a simulated node's."""

    def numa_node(self, pci_bus_id: str) -> int | None:
        """Sysfs numa_node of a PCI device; None where the file is missing or negative (no node is known)."""

    def pci_path(self, pci_bus_id: str) -> str:
        """Where a PCI device hangs: its sysfs path with every bridge above it; empty where the host does not say.

        Such as /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:19:00.0.
        """

    def machine(self) -> str | None:
        """The product name of firmware (/sys/class/dmi/id/product_name); None where it has none, as on many boards for Arm."""

    def pci_class(self, pci_bus_id: str) -> int | None:
        """The class code of a PCI device, such as 0x030200; None where the host does not say."""

    def pci_config(self, pci_bus_id: str) -> bytes:
        """The first 256 bytes of a PCI device's configuration space; 64 without CAP_SYS_ADMIN, none where it has no file."""

    def numa_distances(self) -> Mapping[tuple[int, int], int]:
        """The distance of every ordered pair of NUMA nodes, a node and itself included (ACPI SLIT); empty where not known."""

    def device_roots(self) -> Mapping[str, str]:
        """The root on the host of each path under /dev that an NVIDIA driver may own and that exists.

        Such as /dev/nvidiactl. Roots have no slash at the end; / is empty.
        """

    def devices(self, pci_bus_ids: Iterable[str]) -> "HostDevices":
        """Device nodes that GPUs, their features and the DRM have, with their numbers, links followed; the DRM's by bus id."""

    def mig_minors(self) -> Mapping[str, int]:
        """N of /dev/nvidia-caps/nvidia-capN by what it gives access to (/proc/driver/nvidia-caps/mig-minors).

        Such as gpu0/gi2/access and gpu0/gi2/ci0/access, where 0 is the GPU's minor number. Empty where there is no such file;
        the same object for as long as nothing in it changes.
        """

    def bindings(self) -> Mapping[str, int]:
        """The GPUs that the NVIDIA driver is bound to, by PCI bus id as NVML writes it; empty where the host does not say.

        The number is another one whenever the driver was bound again, be it because it was reloaded, or because the GPU was
        taken off the bus and found again. Numbers of two boots say nothing about each other; each is below 2^63. Raises
        OSError where the host cannot be asked now.
        """

    def pci_gpus(self) -> Mapping[str, str] | None:
        """NVIDIA's GPUs on the PCI bus, by bus id as NVML writes it, each with the kernel driver bound to it; empty for none.

        Virtual functions are not among them. None where the host does not say.
        """

    def boot_id(self) -> str:
        """What changes with every boot (/proc/sys/kernel/random/boot_id)."""


class LinuxHost:
    """`HostView` of this machine.

    `roots` are directories whose dev/ may hold the nodes, best first: each as this process sees it, and as the host calls it.
    / itself comes after them. Their proc/ is read where `procfs` has no such file. `own` is False if everything belongs to
    another machine; then / itself does not count.
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
        # A node's file has one column for each node that is online, in ascending order (drivers/base/node.c). One that cannot
        # be read, or that nodes came or went under, tells nothing of its node.
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
        """Character devices with the host's name of their root and their path below it, unsafe ones included."""
        from gpu_plugin.containers.cdi.host_files import Kind  # noqa: PLC0415 - a simulated node has none of them
        from gpu_plugin.containers.driver_root.safe import judge  # noqa: PLC0415

        for (root, host), pattern in product(self._roots.items(), patterns):
            with suppress(OSError):  # an unreadable directory has no nodes for us
                for path in sorted(Path(root or "/").glob(pattern), key=str):
                    judged = judge(root, str(path).removeprefix(root), (Kind.DEVICE,))
                    if judged.way.status is not None and stat.S_ISCHR(judged.way.status.st_mode):
                        yield host, judged.seen, judged.way.status

    def _drm(self, pci_bus_id: str) -> tuple[str, ...]:
        """Paths of a PCI device's DRM nodes, such as /dev/dri/card1 and /dev/dri/renderD128."""
        try:
            names = sorted(path.name for path in (self._pci_device(pci_bus_id) / "drm").iterdir())
        except (OSError, ValueError):
            return ()
        return tuple(f"/dev/dri/{name}" for name in names if _DRM_NODE.fullmatch(name))

    def mig_minors(self) -> Mapping[str, int]:
        # A driver lists every instance that there could be, over 4000 lines: they are parsed again only if they changed.
        content = b""
        for proc in (self._procfs, *(Path(root, "proc") for root in self._roots if root)):
            try:
                content = (proc / _MIG_MINORS).read_bytes()
            except OSError:
                continue
            break
        with self._parsing:  # once, not once for every GPU that is probed at the start
            if content != self._mig_minors[0]:
                self._mig_minors = content, {name.decode(): int(minor) for name, minor in _MIG_MINOR.findall(content)}
            return self._mig_minors[1]

    def bindings(self) -> Mapping[str, int]:
        # The number is the inode of the link that says so. The kernel makes that when it binds the driver, and numbers what it
        # makes in turn (fs/kernfs), so that none comes twice while anyone remembers it. The link's times are worth nothing here:
        # they are those of the first look at it, and change when the kernel drops what it had cached of it.
        try:
            links = os.scandir(self._sysfs / _BINDINGS)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}  # a host without the driver, or one that does not show it
        with links:
            return {at: link.inode() & _LARGEST for link in links if (at := nvml_bus_id(link.name))}

    def pci_gpus(self) -> Mapping[str, str] | None:
        try:
            names = [device.name for device in (self._sysfs / _PCI_DEVICES).iterdir()]
        except OSError:
            return None
        # What a device is does not change while its directory is there; a scan reads new ones only
        self._pci_kinds = {
            name: self._pci_kinds[name] if name in self._pci_kinds else self._is_gpu(name) for name in names
        }
        return {at: self._bound(name) for name in names if self._pci_kinds[name] and (at := nvml_bus_id(name))}

    def _is_gpu(self, name: str) -> bool:
        """Whether a device of sysfs is a GPU of NVIDIA's and no virtual function (PCI code and ID assignment specification)."""
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
        """Sysfs's directory of a PCI device. Raises ValueError for what is no bus id."""
        # NVML writes the PCI domain with eight digits and in capitals, sysfs with at least four and in small letters.
        domain, _, rest = pci_bus_id.lower().partition(":")
        return self._sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest}"


def nvml_bus_id(name: str) -> str:
    """A PCI bus id as NVML writes it, of one as the kernel does (0000:1b:00.0); empty for anything else."""
    found = _PCI_ADDRESS.fullmatch(name)
    return f"{int(found[1], 16):08X}:{found[2].upper()}" if found else ""


def _listed(text: str) -> list[int]:
    """The numbers of a kernel's list such as 0-1,3, in ascending order. Raises ValueError for anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < _MAX_NUMA_NODES:
            raise ValueError(text)
        numbers.update(range(low, high + 1))
    return sorted(numbers)


_LONGEST = 4096  # bytes of a file that are read; the driver's have some 500

_UUID = re.compile(r"GPU-[0-9A-Za-z-]*[0-9A-Za-z]")
_MINOR = re.compile(r"[0-9]{1,7}")
_VERSION = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)*)\s")
_INSTANCES = "driver/nvidia/capabilities/gpu[0-9]*/mig/gi[0-9]*"


def listed_gpus(proc: Path) -> list[Gpu]:
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


def any_partitioned(proc: Path) -> bool:
    """Whether any GPU has GPU instances, in driver/nvidia/capabilities/gpuN/mig/giM.

    driver/nvidia-caps/mig-minors says nothing of that: it lists every instance that there could be.
    """
    return any(proc.glob(_INSTANCES))


def kernel_driver_version(proc: Path) -> str:
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
