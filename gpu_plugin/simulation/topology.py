"""How the GPUs of a simulated node hang together: NVLinks, PCIe and NUMA nodes, as a profile file says it. Pure.

GPUs are their indices; where something is wrong, a ConfigError says where in the file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import TopologyLevel

BusId = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Distance = Annotated[int, msgspec.Meta(ge=10, le=255)]
"""Of two NUMA nodes, in an ACPI System Locality Information Table: values below 10 are reserved, 255 is out of reach."""

# NUMA distances where a file tells none
_ONE_NODE = 10  # of a node and itself (ACPI)
_TWO_SOCKETS = 21  # as Intel's firmware commonly has it

# Bridges between a root complex and a GPU: a root port, and the two ports of each PCIe switch on the way
_CASCADE = 5
_SWITCH = 3
_PORT = 1
_NOTHING = 0

_BUSES = 256  # PCI bus numbers of a domain
_DEVICES = 32  # of a PCI bus


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of a profile file; a key it does not know is an error."""


class NvLink(Block, frozen=True):
    """GPU to GPU: `links` a GPU, and `pairs` as "0-1:2 0-2:1": two links between 0 and 1, one between 0 and 2."""

    links: Annotated[int, msgspec.Meta(ge=1, le=18)]
    pairs: str


class NvSwitch(Block, frozen=True):
    """Every one of a GPU's `links` ends at a switch; the switches take turns."""

    links: Annotated[int, msgspec.Meta(ge=1, le=18)]
    bus_ids: Annotated[tuple[BusId, ...], msgspec.Meta(min_length=1)] = ("00000000:05:00.0",)


class Pcie(Block, frozen=True):
    """Groups of GPU indices by the closest thing they share; on no list: by NUMA node, where both have a known one."""

    board: tuple[tuple[Count, ...], ...] = ()
    switch: tuple[tuple[Count, ...], ...] = ()
    switches: tuple[tuple[Count, ...], ...] = ()
    host_bridge: tuple[tuple[Count, ...], ...] = ()


def remotes(
    nvlink: NvLink | None, nvswitch: NvSwitch | None, buses: Sequence[str]
) -> tuple[tuple[str | None, ...], ...]:
    """The bus id at the far end of each GPU's NVLinks by link number, None where a link leads nowhere.

    Raises:
        ConfigError: both blocks are given, a switch has a GPU's bus id, or a pair cannot be.
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
    """The nvmlGpuTopologyLevel_t of every pair, the lower index first; a NUMA node below 0 is not known.

    Raises:
        ConfigError: a group names a GPU that there is not, or two groups of a kind name the same one.
    """
    levels: dict[tuple[int, int], int] = {}
    for high, node in enumerate(numa_nodes):
        for low in range(high):
            same = node == numa_nodes[low] >= 0
            levels[low, high] = TopologyLevel.NODE if same else TopologyLevel.SYSTEM
    for key, level in (
        ("host_bridge", TopologyLevel.HOSTBRIDGE),  # the farthest first: a closer one then takes its place
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
    """Where each GPU hangs in sysfs: two of these paths tell the same relation as `ancestors`, as far as sysfs can.

    Sysfs knows nothing of boards: GPUs on one hang on one switch. Groups that overlap count as one. Bridges are made up and
    numbered backwards from the GPU below them, as firmware numbers buses; where GPUs have neighbouring buses a number may
    come up twice, but no two root complexes have the same one, and no two bridges below the same bridge.
    """
    switch = _merged(len(buses), (*pcie.board, *pcie.switch))
    cascade = _merged(len(buses), (*pcie.board, *pcie.switch, *pcie.switches))
    root = _merged(len(buses), (*pcie.board, *pcie.switch, *pcie.switches, *pcie.host_bridge))
    places = [_place(bus) for bus in buses]

    def depth(index: int) -> int:
        """How many bridges lie between the root complex and a GPU."""
        if cascade.count(cascade[index]) > switch.count(switch[index]):
            return _CASCADE
        if switch.count(switch[index]) > 1:
            return _SWITCH
        # As in a virtual machine, whose only bus has the GPU on it
        return _PORT if places[index][1] or root.count(root[index]) > 1 else _NOTHING

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
    """The distance of every ordered pair of NUMA nodes: those of `rows` or, without any, of those that GPUs are on.

    A row is what sysfs has in the node's `distance`: one a node, in the order of their numbers.

    Raises:
        ConfigError: the rows are no square, a node is not 10 from itself, or a GPU is on a node without a row.
    """
    if not rows:
        known = sorted({node for node in numa_nodes if node >= 0})
        return {(one, other): _ONE_NODE if one == other else _TWO_SOCKETS for one in known for other in known}
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
            raise ConfigError(f"{where}: {'a GPU and itself' if low == high else 'this pair stands there already'}")
        seen.add((low, high))
        ends[low] += [buses[high]] * int(form[3])
        ends[high] += [buses[low]] * int(form[3])
    for index, used in enumerate(ends):
        if len(used) > nvlink.links:
            raise ConfigError(f"$.nvlink.pairs: GPU {index} has {nvlink.links} links, and {len(used)} are taken")
    return tuple(tuple(used + [None] * (nvlink.links - len(used))) for used in ends)


def _merged(count: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """Of each GPU the first one that it shares a group with, directly or through others."""
    first = list(range(count))
    for group in groups:
        joined = {first[index] for index in group}
        first = [min(joined) if each in joined else each for each in first]
    return first


def _position(parts: Sequence[int], wholes: Sequence[int], index: int) -> int:
    """Which of the parts that the GPU's whole is made of its own part is, from 0."""
    return sorted({part for part, whole in zip(parts, wholes, strict=True) if whole == wholes[index]}).index(
        parts[index]
    )


def _place(bus_id: str) -> tuple[str, int, str]:
    """The domain as sysfs writes it, the bus number, and the whole address as sysfs writes it."""
    domain, bus, device = bus_id.lower().split(":")
    domain = f"{int(domain, 16):04x}"
    return domain, int(bus, 16), f"{domain}:{bus}:{device}"


def _bridge(domain: str, bus: int, position: int) -> str:
    return f"{domain}:{bus % _BUSES:02x}:{position % _DEVICES:02x}.{position // _DEVICES}"
