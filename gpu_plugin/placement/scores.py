"""How well two GPUs are linked, as one number a pair."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_plugin.devices.node import Node

NVLINK_SCORE = 100
SAME_NUMA_SCORE = 5
"""Less than a step of PCIe closeness: decides only between pairs that PCIe and NVLink call equal."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Pair scores by GPU uuid, both ways round; 0 for a pair nothing is known of."""

    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, one: str, other: str) -> int:
        """The score of a pair."""
        return self.rows.get(one, {}).get(other, 0)


def scores(node: Node) -> Scores:
    """The pair scores of a node.

    PCIe closeness counts 10 (different NUMA nodes) to 60 (one board), each direct NVLink 100: the figures of NVIDIA's
    go-gpuallocator (besteffort_policy.go), so that pods land as its users expect. GPUs behind an NVSwitch reach each other
    equally well and differ by PCIe alone.
    """
    rows: dict[str, dict[str, int]] = {gpu.uuid: {} for gpu in node.gpus}
    for one in node.gpus:
        for other in node.gpus:
            if one.uuid == other.uuid:
                continue
            link = node.link(one.uuid, other.uuid)
            score = NVLINK_SCORE * link.nvlinks + 60 - min(max(link.ancestor, 0), 50)
            if one.numa_node is not None and one.numa_node == other.numa_node:
                score += SAME_NUMA_SCORE
            rows[one.uuid][other.uuid] = score
    return Scores(rows)
