"""How well two GPUs are linked, as one number a pair: the tables, and the rule that adds them up."""

from collections.abc import Mapping

from gpu_plugin.devices.node import Gpu, Link

PCIE: Mapping[int, int] = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
"""Points by closest common PCIe ancestor (nvmlGpuTopologyLevel_t): one board 60, one switch 50, several switches 40, one host
bridge 30, one NUMA node 20, further apart 10. NVIDIA's go-gpuallocator (besteffort_policy.go) gives the same."""

FARTHEST = 10
"""Points of a PCIe relation that is none of those."""

NVLINK = 100
"""Points of a direct NVLink, whatever its generation: NVIDIA's go-gpuallocator (besteffort_policy.go) gives the same."""

POINTS_PER_GB_S = 4
"""Points of a GB/s in one direction through NVSwitches, so that an NVLink of 25 GB/s counts the same as a direct one."""

SWITCHED_GB_S: Mapping[int | None, int] = {5: 25, 7: 25, 9: 25, 10: 50}
"""GB/s in one direction of one NVLink to an NVSwitch, by nvmlDeviceArchitecture_t: Volta, Ampere, Hopper, Blackwell.

NVIDIA's figures for a whole GPU both ways, 300 (V100, 6 links), 600 (A100, 12), 900 (H100, 18) and 1800 GB/s (B200, 18), over
twice the number of links. go-gpuallocator counts no NVLink that ends at a switch.
"""

UNKNOWN_GB_S = 25
"""The same for a generation that is not in the table, or that the part does not tell."""


def pair_score(one: Gpu, other: Gpu, link: Link) -> int:
    """The points of a pair: those of its PCIe relation and those of its NVLinks, the slower end's where it is switched."""
    return PCIE.get(link.ancestor, FARTHEST) + link.nvlinks * (_switched(one, other) if link.switched else NVLINK)


def _switched(one: Gpu, other: Gpu) -> int:
    return POINTS_PER_GB_S * min(SWITCHED_GB_S.get(gpu.architecture, UNKNOWN_GB_S) for gpu in (one, other))
