"""A node's topology as text: the matrix of `nvidia-smi topo -m`, a legend, and the link groups in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from gpu_plugin.config.words import shortened
from gpu_plugin.devices.device import GPU
from gpu_plugin.devices.node import OWN_MESH, Link, Node
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.placement.topology import Matrix, Topology
from gpu_plugin.placement.views.groups import LinkGroups, NvlinkGroup, called, mig_spans
from gpu_plugin.placement.views.report import Offered

SELF = "X"

LONGEST_REASON = 240  # the most characters of a reason in a line with other reasons; `gpu-plugin explain` has all of it
CHANGES = 28  # the most pairs of GPUs that a sentence names: all pairs of eight GPUs

_LEGEND: Mapping[str, str] = {
    SELF: "the GPU itself",
    "SYS": "PCIe, and what joins NUMA nodes",
    "NODE": "PCIe, and what joins the host bridges of one NUMA node",
    "PHB": "PCIe and one host bridge",
    "PXB": "several PCIe bridges, no host bridge",
    "PIX": "one PCIe bridge at most",
    "NV#": "# NVLinks, direct ones or those that both GPUs have to the same NVSwitches",
}
"""Meanings of the matrix's words, the worst first, as in nvidia-smi."""

_PCIE: Mapping[int, tuple[str, str]] = {
    TopologyLevel.INTERNAL: ("PIX", "One board"),
    TopologyLevel.SINGLE: ("PIX", "PCIe switch"),
    TopologyLevel.MULTIPLE: ("PXB", "Several PCIe switches"),
    TopologyLevel.HOSTBRIDGE: ("PHB", "PCIe host bridge"),
    TopologyLevel.NODE: ("NODE", ""),
    TopologyLevel.SYSTEM: ("SYS", ""),
}
"""nvidia-smi's word for a PCIe relation, and the name of the common ancestor. PIX is "at most one bridge"; a board has none."""


def pcie_word(link: Link) -> str:
    """Return nvidia-smi's word for the PCIe relation of a pair."""
    return _PCIE.get(link.ancestor, _PCIE[TopologyLevel.SYSTEM])[0]


def word(link: Link) -> str:
    """Return nvidia-smi's word for a pair: its NVLinks or, without NVLinks, its PCIe relation."""
    return f"NV{link.nvlinks}" if link.nvlinks else pcie_word(link)


def matrix(groups: LinkGroups) -> list[str]:
    """Return a line of headings and a line for each GPU: its links to each other GPU, and its NUMA node."""
    every = range(len(groups.gpus))
    return _table(groups, [[SELF if a == b else word(groups.links[a][b]) for b in every] for a in every])


def scores(groups: LinkGroups, rows: Matrix) -> list[str]:
    """Return the lines of `matrix` with the score of each pair. Placement adds up these scores."""
    return _table(
        groups, [[SELF if a == b else str(score) for b, score in enumerate(row)] for a, row in enumerate(rows)]
    )


def legend(groups: LinkGroups) -> list[str]:
    """Return the meanings of the words that occur in the matrix, a line each."""
    return ["Legend:", *(f"  {term:<4} = {meaning}" for term, meaning in meanings(groups).items())]


def meanings(groups: LinkGroups) -> Mapping[str, str]:
    """Return the meanings of the words that occur in the matrix, by word."""
    pairs = combinations(range(len(groups.gpus)), 2)
    links = [groups.links[a][b] for a, b in pairs]
    occur = {SELF} | {"NV#" if link.nvlinks else pcie_word(link) for link in links}
    return {term: meaning for term, meaning in _LEGEND.items() if term in occur}


def words(groups: LinkGroups) -> Iterator[str]:
    """Yield the link groups, a line for each kind: `NVLink: GPUs 0-7: NV18 each through switches`."""
    alike: dict[str, list[str]] = {}
    for group in groups.nvlink:
        alike.setdefault(_nvlinks(groups, group), []).append(groups.names(group.gpus))
    yield from (f"NVLink: GPUs {'; '.join(names)}: {how}" for how, names in alike.items())
    for level, found in groups.pcie.items():
        yield f"{_PCIE[level][1]}: GPUs {'; '.join(groups.names(group) for group in found)}"
    for node, gpus in groups.numa:
        yield f"NUMA node {'unknown' if node is None else node}: {groups.called(gpus)}"
    for gpu in groups.gpus:
        if gpu.unreadable:
            yield f"GPU {gpu.index}: its links are shown as they were last known: {gpu.unreadable}"


def changed_links(before: Node, after: Node) -> str:
    """Return the pairs of GPUs whose links changed: `0-1 NV2, now PIX; 0-3 PHB, now NV1`. Empty if no link changed.

    New pairs are left out.
    """
    index = {gpu.uuid: gpu.index for gpu in after.gpus}
    found = sorted(
        (sorted(map(index.__getitem__, pair)), word(before.links[pair]), word(link))
        for pair, link in after.links.items()
        if pair in before.links and word(before.links[pair]) != word(link)
    )
    more = f"; and {len(found) - CHANGES} pairs more" if len(found) > CHANGES else ""
    return "; ".join(f"{one}-{other} {was}, now {now}" for (one, other), was, now in found[:CHANGES]) + more


def held_back_words(items: Iterable[Offered]) -> str:
    """Return the hardware that pods do not get, grouped by reason: `GPUs 2,5 (cordoned), MIG device 0:3 (Xid 79)`."""
    by_reason: dict[tuple[str, str], list[Offered]] = {}
    for each in items:
        by_reason.setdefault((shortened(each.reason, LONGEST_REASON), each.kind), []).append(each)
    return ", ".join(f"{_called(kind, alike)} ({reason})" for (reason, kind), alike in by_reason.items())


def _called(kind: str, alike: Sequence[Offered]) -> str:
    indices = [each.index for each in alike]
    if not all(indices):  # the device is gone, and its index is unknown
        return ", ".join(each.visible_id for each in alike)
    if kind == GPU:
        return called(map(int, indices))
    return f"{'MIG device' if len(alike) == 1 else 'MIG devices'} {mig_spans(indices)}"


def pairs_json(groups: LinkGroups, topology: Topology) -> Mapping[str, object]:
    """Return the topology for programs: every GPU, and every pair of GPUs once, the lower index first."""
    return {
        "gpus": [{"index": gpu.index, "uuid": gpu.uuid, "numa": gpu.numa_node} for gpu in groups.gpus],
        "links": [
            {
                "a": groups.gpus[a].index,
                "b": groups.gpus[b].index,
                "nvlinks": groups.links[a][b].nvlinks,
                "pcie": pcie_word(groups.links[a][b]),
                "score": topology.scores[a][b],
            }
            for a, b in combinations(range(len(groups.gpus)), 2)
        ],
    }


def _nvlinks(groups: LinkGroups, group: NvlinkGroup) -> str:
    count = f"NV{group.most}" if group.fewest == group.most else f"NV{group.fewest} to NV{group.most}"
    if group.whole:
        how = f"{count} each"
    else:
        how = f"{count}, {group.pairs} of {len(group.gpus) * (len(group.gpus) - 1) // 2} pairs"
        if group.complete:
            how += f"; every pair of {' and of '.join(groups.names(each) for each in group.complete)}"
    through = " through switches" if group.switched else ""
    named = group.mesh and group.mesh.partition(".")[0] != OWN_MESH
    domain = f", NVLink domain {group.mesh}" if named else ""
    return how + through + domain


def _table(groups: LinkGroups, cells: Sequence[Sequence[str]]) -> list[str]:
    names = [f"GPU{gpu.index}" for gpu in groups.gpus]
    numa = ["N/A" if gpu.numa_node is None else str(gpu.numa_node) for gpu in groups.gpus]
    first = max(map(len, names), default=0)
    width = max((len(text) for row in (names, *cells) for text in row), default=0) + 2
    shown = [" " * first + "  " + "".join(f"{name:<{width}}" for name in names) + "NUMA Affinity"]
    for name, row, node in zip(names, cells, numa, strict=True):
        texts = (f"{f' {text}' if text == SELF else text:<{width}}" for text in row)
        shown.append(f"{name:<{first}}  {''.join(texts)}{node}")
    return shown
