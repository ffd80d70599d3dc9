"""What placement knows of a node: its GPUs by position, and how well and how near every two of them are to each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.scores import pair_score

SAME_NODE, OTHER_NODE, UNKNOWN_NODE = 10, 20, 255
"""NUMA distances where firmware tells none: of a node to itself and to another (Linux: LOCAL_DISTANCE, REMOTE_DISTANCE), and
the worst there is (ACPI: unreachable) where it is not even known which node a GPU is near."""

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs by position, which is the order of their NVML index; what is said of pairs is the same both ways round.

    `scores[a][b]` is how well two are linked, `distances[a][b]` how far apart their NUMA nodes are; 0 of one with itself.
    `numa` is each one's NUMA node, None where it is not known.
    """

    uuids: tuple[str, ...] = ()
    scores: Matrix = ()
    distances: Matrix = ()
    numa: tuple[int | None, ...] = ()
    position: Mapping[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, node: Node) -> "Topology":
        """The topology of a probed node."""
        gpus = sorted(node.gpus, key=lambda gpu: gpu.index)
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
        """How many GPUs there are."""
        return len(self.uuids)

    def score(self, gpus: Iterable[int]) -> int:
        """The total of the scores of all pairs of these positions."""
        return sum(self.scores[one][other] for one, other in combinations(gpus, 2))

    def distance(self, gpus: Iterable[int]) -> int:
        """The total NUMA distance of all pairs of these positions."""
        return sum(self.distances[one][other] for one, other in combinations(gpus, 2))


def _distance(one: Gpu, other: Gpu, link: Link) -> int:
    if link.numa_distance is not None:
        return link.numa_distance
    if one.numa_node is None or other.numa_node is None:
        return UNKNOWN_NODE
    return SAME_NODE if one.numa_node == other.numa_node else OTHER_NODE
