"""How the GPUs of a simulated node are linked: NVLinks, PCIe and NUMA nodes, from a profile file. Pure.

GPUs are given by index. A ConfigError has the place of the fault in the file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import TopologyLevel

BusId = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
# Distance of two NUMA nodes in an ACPI System Locality Information Table: below 10 is reserved, 255 is unreachable
Distance = Annotated[int, msgspec.Meta(ge=10, le=255)]
_ONE_NODE = 10  # distance of a node to itself (ACPI)

# Bridges between a root complex and a GPU: a root port, and the two ports of each PCIe switch on the way
_CASCADE = 5
_SWITCH = 3

_BUSES = 256  # PCI bus numbers of a domain


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of a profile file. Unknown keys are errors."""


class NvLink(Block, frozen=True):
    """GPU to GPU: `links` per GPU, and `pairs` such as "0-1:2 0-2:1": two links between 0 and 1, one between 0 and 2."""

    links: Annotated[int, msgspec.Meta(ge=1, le=18)]
    pairs: str


class NvSwitch(Block, frozen=True):
    """All `links` of each GPU end at switches, assigned in turn."""

    links: Annotated[int, msgspec.Meta(ge=1, le=18)]
    bus_ids: Annotated[tuple[BusId, ...], msgspec.Meta(min_length=1)] = ("00000000:05:00.0",)


class Pcie(Block, frozen=True):
    """Groups of GPU indices by their closest common part. GPUs in no group are related by NUMA node, if both are known."""

    board: tuple[tuple[Count, ...], ...] = ()
    switch: tuple[tuple[Count, ...], ...] = ()
    switches: tuple[tuple[Count, ...], ...] = ()
    host_bridge: tuple[tuple[Count, ...], ...] = ()


def remotes(
    nvlink: NvLink | None, nvswitch: NvSwitch | None, buses: Sequence[str]
) -> tuple[tuple[str | None, ...], ...]:
    """Return the bus id at the far end of each GPU's NVLinks by link number, None if a link leads nowhere.

    Raises:
        ConfigError: both blocks are given, a switch has a GPU's bus id, or a pair is invalid.
    """
    if nvlink and nvswitch:
        raise ConfigError("$.nvswitch: a node has nvlink or nvswitch, not both")
    if nvswitch:
        for number, bus in enumerate(nvswitch.bus_ids):
            if bus in buses:
                raise ConfigError(f"$.nvswitch.bus_ids[{number}]: {bus} is a GPU's")
        return (tuple(nvswitch.bus_ids[link % len(nvswitch.bus_ids)] for link in range(nvswitch.links)),) * len(buses)
    if nvlink:
        return _paired(nvlink, buses)
    return ((),) * len(buses)


def ancestors(pcie: Pcie, numa_nodes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the nvmlGpuTopologyLevel_t of each pair, the lower index first. A NUMA node below 0 is unknown.

    Raises:
        ConfigError: a group has a GPU that does not exist, or two groups of a kind have the same GPU.
    """
    levels: dict[tuple[int, int], int] = {}
    for high, node in enumerate(numa_nodes):
        for low in range(high):
            same = node == numa_nodes[low] >= 0
            levels[low, high] = TopologyLevel.NODE if same else TopologyLevel.SYSTEM
    for key, level in (
        ("host_bridge", TopologyLevel.HOSTBRIDGE),  # the farthest level first: closer levels replace it
        ("switches", TopologyLevel.MULTIPLE),
        ("switch", TopologyLevel.SINGLE),
        ("board", TopologyLevel.INTERNAL),
    ):
        placed: set[int] = set()
        for number, group in enumerate(getattr(pcie, key)):
            for index in group:
                if index >= len(numa_nodes):
                    where = f"$.pcie.{key}[{number}]: GPU {index}"
                    raise ConfigError(f"{where}: this node has GPUs 0 to {len(numa_nodes) - 1}")
                if index in placed:
                    raise ConfigError(f"$.pcie.{key}[{number}]: GPU {index} is in another group or here twice")
                placed.add(index)
            levels |= {(low, high): level for high in group for low in group if low < high}
    return levels


def pci_paths(pcie: Pcie, buses: Sequence[str]) -> tuple[str, ...]:
    """Return each GPU's path in sysfs: two paths show the same relation as `ancestors`, as far as sysfs can.

    Sysfs has no boards: GPUs on a board are below one switch. Overlapping groups count as one. Bridges are invented and
    numbered backwards from the GPU below them, as firmware numbers buses. If GPUs have neighboring buses, a number may occur
    twice, but root complexes have different numbers, and so have bridges below the same bridge.
    """
    switch = _merged(len(buses), (*pcie.board, *pcie.switch))
    cascade = _merged(len(buses), (*pcie.board, *pcie.switch, *pcie.switches))
    root = _merged(len(buses), (*pcie.board, *pcie.switch, *pcie.switches, *pcie.host_bridge))
    places = [_place(bus) for bus in buses]

    def depth(index: int) -> int:
        """Return the number of bridges between the root complex and a GPU."""
        if cascade.count(cascade[index]) > switch.count(switch[index]):
            return _CASCADE
        if switch.count(switch[index]) > 1:
            return _SWITCH
        # As in a virtual machine, whose only bus has the GPU.
        return 1 if places[index][1] or root.count(root[index]) > 1 else 0

    depths = [depth(index) for index in range(len(buses))]
    taken: dict[tuple[str, int], int] = {}
    for index in sorted(set(root)):
        domain, bus, _ = places[index]
        number = (bus - depths[index]) % _BUSES
        while (domain, number) in taken:
            number = (number - 1) % _BUSES
        taken[domain, number] = index
    complexes = {index: (domain, number) for (domain, number), index in taken.items()}
    paths = []
    for index, (_, _, own) in enumerate(places):
        domain, number = complexes[root[index]]
        steps = [f"/sys/devices/pci{domain}:{number:02x}"]
        outer, inner = places[cascade[index]][1], places[switch[index]][1]
        if depths[index]:
            steps.append(_bridge(domain, number, 1 + _position(cascade, root, index)))
        if depths[index] == _CASCADE:
            steps.append(_bridge(domain, outer - 4, 0))
            steps.append(_bridge(domain, outer - 3, _position(switch, cascade, index)))
        if depths[index] >= _SWITCH:
            steps.append(_bridge(domain, inner - 2, 0))
            steps.append(_bridge(domain, inner - 1, _position(range(len(buses)), switch, index)))
        paths.append("/".join((*steps, own)))
    return tuple(paths)


def numa_distances(rows: Mapping[int, Sequence[int]], numa_nodes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the distance of each ordered pair of NUMA nodes: from `rows` or, if empty, defaults for the GPUs' nodes.

    A row is as in the node's `distance` in sysfs: a value for each node, in the order of their numbers.

    Raises:
        ConfigError: the rows are not a square, a node's distance to itself is not 10, or a GPU's node has no row.
    """
    if not rows:
        known = sorted({node for node in numa_nodes if node >= 0})
        # 21 is the common value of Intel's firmware for two sockets.
        return {(one, other): _ONE_NODE if one == other else 21 for one in known for other in known}
    nodes = sorted(rows)
    for number, node in enumerate(nodes):
        if len(rows[node]) != len(nodes):
            raise ConfigError(
                f"$.numa_distances.{node}: {len(rows[node])} distances: one for every node with a row is wanted, {len(nodes)}"
            )
        if rows[node][number] != _ONE_NODE:
            raise ConfigError(
                f"$.numa_distances.{node}[{number}]: {rows[node][number]}: a node is {_ONE_NODE} from itself"
            )
    for index, node in enumerate(numa_nodes):
        if node >= 0 and node not in rows:
            raise ConfigError(f"$.numa_distances: no row for NUMA node {node}, which GPU {index} is on")
    return {(node, other): distance for node in nodes for other, distance in zip(nodes, rows[node], strict=True)}


def _paired(nvlink: NvLink, buses: Sequence[str]) -> tuple[tuple[str | None, ...], ...]:
    ends: list[list[str | None]] = [[] for _ in buses]
    seen = set()
    for pair in nvlink.pairs.split():
        where = f"$.nvlink.pairs: {pair}"
        form = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3}):([1-9][0-9]?)", pair)
        if not form:
            raise ConfigError(f"{where}: a pair reads GPU-GPU:LINKS, such as 0-1:2")
        low, high = sorted((int(form[1]), int(form[2])))
        if high >= len(buses):
            raise ConfigError(f"{where}: GPU {high}: this node has GPUs 0 to {len(buses) - 1}")
        if low == high or (low, high) in seen:
            raise ConfigError(f"{where}: {'a GPU and itself' if low == high else 'this pair is there already'}")
        seen.add((low, high))
        ends[low] += [buses[high]] * int(form[3])
        ends[high] += [buses[low]] * int(form[3])
    for index, used in enumerate(ends):
        if len(used) > nvlink.links:
            raise ConfigError(f"$.nvlink.pairs: GPU {index} has {nvlink.links} links, and {len(used)} are taken")
    return tuple(tuple(used + [None] * (nvlink.links - len(used))) for used in ends)


def _merged(count: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """Return for each GPU the lowest index of the GPUs that it shares groups with, directly or through others."""
    first = list(range(count))
    for group in groups:
        joined = {first[index] for index in group}
        first = [min(joined) if each in joined else each for each in first]
    return first


def _position(parts: Sequence[int], wholes: Sequence[int], index: int) -> int:
    """Return the position, from 0, of the GPU's own part among the parts of its whole."""
    within = sorted({part for part, whole in zip(parts, wholes, strict=True) if whole == wholes[index]})
    return within.index(parts[index])


def _place(bus_id: str) -> tuple[str, int, str]:
    """Return the domain, the bus number, and the whole address, with domain and address as in sysfs."""
    domain, bus, device = bus_id.lower().split(":")
    domain = f"{int(domain, 16):04x}"
    return domain, int(bus, 16), f"{domain}:{bus}:{device}"


def _bridge(domain: str, bus: int, position: int) -> str:
    return f"{domain}:{bus % _BUSES:02x}:{position % 32:02x}.{position // 32}"  # a bus has 32 devices
