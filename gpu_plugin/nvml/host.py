"""What the node's own /sys, /dev and /proc say about its GPUs."""

from collections.abc import Sequence
from pathlib import Path

# Every node under /dev that a container could be given on account of a GPU, as patterns under a root.
_NODE_PATTERNS = (
    "dev/nvidia*",
    "dev/nvidia-caps/*",
    "dev/nvidia-caps-imex-channels/*",
    "dev/gdrdrv",
    "dev/infiniband/*",
)


class LinuxHost:
    """`port.HostView` of this machine. A `roots` entry is a directory whose dev/ may hold the nodes, besides / itself."""

    def __init__(self, roots: Sequence[str] = (), sysfs: str = "/sys") -> None:
        self._roots = tuple(dict.fromkeys(("/", *roots)))
        self._sysfs = Path(sysfs)

    def numa_node(self, pci_bus_id: str) -> int | None:
        """Sysfs's numa_node of a PCI device; None where there is no such file or no such node (-1)."""
        # NVML writes the PCI domain with eight digits and in capitals, sysfs with at least four and in small letters.
        domain, _, rest = pci_bus_id.lower().partition(":")
        try:
            address = f"{int(domain, 16):04x}:{rest}"
            node = int((self._sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def device_nodes(self) -> frozenset[str]:
        """Device nodes that exist here, by their path under /dev, wherever the root that has them is mounted."""
        found: set[str] = set()
        for root in self._roots:
            base = Path(root)
            for pattern in _NODE_PATTERNS:
                try:
                    found.update(f"/{p.relative_to(base)}" for p in base.glob(pattern) if p.is_char_device())
                except OSError:
                    continue  # an unreadable directory has no nodes for us
        return frozenset(found)

    def boot_id(self) -> str:
        """The kernel's id of this boot; empty where /proc does not say."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
