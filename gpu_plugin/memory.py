"""What a daemon remembers of this boot over its own restarts: why GPUs were unfit, and which GPUs there were."""

import logging
from dataclasses import dataclass

from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.ledger import Evidence
from gpu_plugin.nvml.watched import PLACEHOLDER
from gpu_plugin.state import StateDirectory

log = logging.getLogger(__name__)

HEALTH_FILE = "health.json"
GPUS_FILE = "gpus.json"


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What `HEALTH_FILE` holds."""

    boot_id: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU as `GPUS_FILE` remembers it: enough to list it again when the driver cannot describe it."""

    uuid: str
    index: int
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What `GPUS_FILE` holds."""

    boot_id: str
    gpus: tuple[KnownGpu, ...] = ()


class Memory:
    """Reads and writes both files for one boot. What another boot wrote is not believed: hardware may have changed since."""

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, object] = {}

    def evidence(self) -> tuple[Evidence, ...]:
        """What was held against GPUs when an earlier process of this boot last wrote it down."""
        memory = self._state.read(HEALTH_FILE, HealthMemory)
        return memory.evidence if memory is not None and memory.boot_id == self._boot_id else ()

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that an earlier process of this boot knew by name."""
        memory = self._state.read(GPUS_FILE, GpuMemory)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return tuple(Gpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, numa_node=g.numa_node) for g in memory.gpus)

    def write(self, evidence: tuple[Evidence, ...], node: Node) -> bool:
        """Writes down what changed since the last time. Blocks for as long as the disk does. Returns whether all is written."""
        known = tuple(
            KnownGpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, g.numa_node)
            for g in node.gpus
            if not g.uuid.startswith(PLACEHOLDER)
        )
        wanted = {HEALTH_FILE: HealthMemory(self._boot_id, evidence), GPUS_FILE: GpuMemory(self._boot_id, known)}
        for name, content in wanted.items():
            if self._written.get(name) != content and self._state.write(name, content):
                self._written[name] = content
        return self._written == wanted
