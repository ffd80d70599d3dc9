"""The input of placement: the GPUs of a node by position, and a score and a NUMA distance for every pair."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from operator import attrgetter

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.devices.nvml_h import TopologyLevel

SAME_NODE = 10
OTHER_NODE = 20
"""NUMA distances without a firmware table, within a node and between nodes (Linux: LOCAL_DISTANCE, REMOTE_DISTANCE)."""

UNKNOWN_NODE = 255  # NUMA distance if the NUMA node of a GPU is not known: the worst value (ACPI: unreachable)

PCIE: Mapping[int, int] = {
    TopologyLevel.INTERNAL: 60,
    TopologyLevel.SINGLE: 50,
    TopologyLevel.MULTIPLE: 40,
    TopologyLevel.HOSTBRIDGE: 30,
    TopologyLevel.NODE: 20,
    TopologyLevel.SYSTEM: 10,
}
"""Points by closest common PCIe ancestor, as in NVIDIA's go-gpuallocator (besteffort_policy.go)."""

FARTHEST = 10  # points of any other PCIe relation
NVLINK = 100  # points of a direct NVLink of any generation, as in NVIDIA's go-gpuallocator (besteffort_policy.go)

POINTS_PER_GB_S = 4
"""Points of a GB/s in one direction through NVSwitches, so that an NVLink of 25 GB/s counts the same as a direct one."""

SWITCHED_GB_S: Mapping[int | None, int] = {5: 25, 7: 25, 9: 25, 10: 50}
"""GB/s in one direction of one NVLink to an NVSwitch, by nvmlDeviceArchitecture_t: Volta, Ampere, Hopper, Blackwell.

NVIDIA's figures for a whole GPU both ways, 300 (V100, 6 links), 600 (A100, 12), 900 (H100, 18) and 1800 GB/s (B200, 18), over
twice the number of links. go-gpuallocator counts no NVLink that ends at a switch.
"""

UNKNOWN_GB_S = 25  # GB/s for an unknown generation, or one without an entry in the table

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs by position, which is the order of their NVML index. The matrices are symmetric, and 0 for a GPU with itself."""

    uuids: tuple[str, ...] = ()
    scores: Matrix = ()  # [a][b] is the score of the links of two GPUs
    distances: Matrix = ()  # [a][b] is the distance of the NUMA nodes of two GPUs
    numa: tuple[int | None, ...] = ()  # the NUMA node of each GPU
    position: Mapping[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, node: Node) -> "Topology":
        """Return the topology of a probed node."""
        gpus = sorted(node.gpus, key=attrgetter("index"))
        pairs = [
            [None if one is other else (one, other, node.link(one.uuid, other.uuid)) for other in gpus] for one in gpus
        ]
        return cls(
            tuple(gpu.uuid for gpu in gpus),
            tuple(tuple(0 if pair is None else pair_score(*pair) for pair in row) for row in pairs),
            tuple(tuple(0 if pair is None else _distance(*pair) for pair in row) for row in pairs),
            tuple(gpu.numa_node for gpu in gpus),
            {gpu.uuid: at for at, gpu in enumerate(gpus)},
        )

    def __len__(self) -> int:
        """Return the number of GPUs."""
        return len(self.uuids)

    @property
    def weights(self) -> Matrix:
        """A number for each pair that puts the score first and, of equal scores, the shorter NUMA distance.

        The same holds for totals over pairs: no total distance outweighs a point of score.
        """
        unit = self._unit
        return tuple(
            tuple(score * unit - distance for score, distance in zip(*rows, strict=True))
            for rows in zip(self.scores, self.distances, strict=True)
        )

    def parts(self, weight: int) -> tuple[int, int]:
        """Return the total score and the total NUMA distance of a total of `weights`."""
        score = -(-weight // self._unit)
        return score, score * self._unit - weight

    @property
    def _unit(self) -> int:
        """More than the NUMA distance of all pairs together."""
        return 1 + sum(map(sum, self.distances))

    def score(self, gpus: Iterable[int]) -> int:
        """Return the total score of all pairs of these positions."""
        return sum(self.scores[one][other] for one, other in combinations(gpus, 2))

    def distance(self, gpus: Iterable[int]) -> int:
        """Return the total NUMA distance of all pairs of these positions."""
        return sum(self.distances[one][other] for one, other in combinations(gpus, 2))


def _distance(one: Gpu, other: Gpu, link: Link) -> int:
    if link.numa_distance is not None:
        return link.numa_distance
    if one.numa_node is None or other.numa_node is None:
        return UNKNOWN_NODE
    return SAME_NODE if one.numa_node == other.numa_node else OTHER_NODE


def pair_score(one: Gpu, other: Gpu, link: Link) -> int:
    """Return the points of a pair for its PCIe relation and its NVLinks. Switched NVLinks count by the slower end."""
    slower = min(SWITCHED_GB_S.get(gpu.architecture, UNKNOWN_GB_S) for gpu in (one, other))
    return PCIE.get(link.ancestor, FARTHEST) + link.nvlinks * (POINTS_PER_GB_S * slower if link.switched else NVLINK)
