"""Groups of linked GPUs of a node: by NVLinks, by PCIe, by NUMA node. They are for people; placement itself scores pairs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from operator import attrgetter

import msgspec

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.devices.nvml_h import TopologyLevel

NEARER_THAN_NUMA = (TopologyLevel.INTERNAL, TopologyLevel.SINGLE, TopologyLevel.MULTIPLE, TopologyLevel.HOSTBRIDGE)
"""PCIe ancestors of two GPUs that are nearer than a NUMA node: a board, a switch, several switches, a host bridge."""

Group = tuple[int, ...]  # GPUs by position, ascending


class NvlinkGroup(msgspec.Struct, frozen=True):
    """GPUs that NVLinks join, directly or through other GPUs."""

    gpus: Group
    switched: bool
    fewest: int  # NVLinks of a pair with NVLinks
    most: int  # NVLinks of a pair
    pairs: int  # the number of pairs with NVLinks
    # Sets of three or more GPUs in which every pair has NVLinks; only the whole group if all its pairs have.
    complete: tuple[Group, ...]
    mesh: str = ""  # the name of the NVSwitch mesh of a `switched` group

    @property
    def whole(self) -> bool:
        """True if every pair has an NVLink."""
        return self.pairs == len(self.gpus) * (len(self.gpus) - 1) // 2


class LinkGroups(msgspec.Struct, frozen=True):
    """The GPUs of a node by position, which is the order of their NVML index, their links, and their groups."""

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[Link, ...], ...]
    numa: tuple[tuple[int | None, Group], ...]  # every GPU once, by NUMA node (None: not known), by the first GPU
    # By common ancestor (nvmlGpuTopologyLevel_t), the groups of two or more GPUs that have no nearer common ancestor.
    pcie: Mapping[int, tuple[Group, ...]]
    nvlink: tuple[NvlinkGroup, ...]

    @classmethod
    def of(cls, node: Node) -> "LinkGroups":
        """Return the groups of a probed node."""
        gpus = tuple(sorted(node.gpus, key=attrgetter("index")))
        links = tuple(tuple(node.link(one.uuid, other.uuid) for other in gpus) for one in gpus)
        every = range(len(gpus))
        numa = dict.fromkeys(gpu.numa_node for gpu in gpus)
        return cls(
            gpus,
            links,
            tuple((node_, tuple(at for at in every if gpus[at].numa_node == node_)) for node_ in numa),
            dict(_pcie(every, links)),
            tuple(_nvlink(every, links, [node.cliques.get(gpu.uuid, "") for gpu in gpus])),
        )

    def names(self, group: Iterable[int]) -> str:
        """Return the NVML indices of GPUs with runs shortened: 0-3,5."""
        return spans(self.gpus[at].index for at in group)

    def called(self, group: Iterable[int]) -> str:
        """Return words for GPUs: GPU 3, or GPUs 0-3,5."""
        return called(self.gpus[at].index for at in group)


def called(indices: Iterable[int]) -> str:
    """Return words for GPUs of these ascending indices: GPU 3, or GPUs 0-3,5."""
    listed = list(indices)
    return f"{'GPU' if len(listed) == 1 else 'GPUs'} {spans(listed)}"


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers with runs shortened: 0-3,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def mig_spans(indices: Iterable[str]) -> str:
    """Return indices of MIG devices with runs on a GPU shortened: 0:0-2,0:5,3:0."""
    by_gpu: dict[str, list[int]] = {}
    for index in indices:
        gpu, _, place = index.partition(":")
        by_gpu.setdefault(gpu, []).append(int(place))
    return ",".join(f"{gpu}:{run}" for gpu, places in by_gpu.items() for run in spans(sorted(places)).split(","))


def joined(positions: Iterable[int], linked: Callable[[int, int], bool]) -> list[Group]:
    """Return positions in groups: two positions are in the same group if a chain of links connects them."""
    groups: list[list[int]] = []
    for new in positions:
        touching = [group for group in groups if any(linked(one, new) for one in group)]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted([new, *(one for group in touching for one in group)]))
    return sorted(map(tuple, groups))


def _pcie(every: Sequence[int], links: Sequence[Sequence[Link]]) -> Iterator[tuple[int, tuple[Group, ...]]]:
    nearer: set[Group] = set()
    for level in NEARER_THAN_NUMA:
        groups = joined(every, lambda a, b, level=level: links[a][b].ancestor <= level)  # type: ignore[misc]
        own = tuple(group for group in groups if len(group) > 1 and group not in nearer)
        nearer.update(own)
        if own:
            yield level, own


def _nvlink(every: Sequence[int], links: Sequence[Sequence[Link]], meshes: Sequence[str]) -> Iterator[NvlinkGroup]:
    for switched in (True, False):

        def linked(a: int, b: int, switched: bool = switched) -> bool:  # noqa: FBT001 - bound early, never passed
            return links[a][b].nvlinks > 0 and links[a][b].switched == switched

        for gpus in joined(every, linked):
            counts = [links[a][b].nvlinks for a, b in combinations(gpus, 2) if linked(a, b)]
            if counts:
                complete = tuple(_complete(gpus, linked))
                mesh = meshes[gpus[0]] if switched else ""
                yield NvlinkGroup(gpus, switched, min(counts), max(counts), len(counts), complete, mesh)


def _complete(gpus: Group, linked: Callable[[int, int], bool]) -> Iterator[Group]:
    """Yield disjoint sets of three or more GPUs in which every pair is linked: the largest first, then the lowest."""
    left = gpus
    while len(largest := _largest((), left, linked, ())) >= 3:
        yield largest
        left = tuple(one for one in left if one not in largest)


def _largest(chosen: Group, more: Group, linked: Callable[[int, int], bool], best: Group) -> Group:
    """Return the largest set of `chosen` and some of `more` in which every pair is linked; `best` if no set is larger."""
    if len(chosen) > len(best):
        best = chosen
    for at, gpu in enumerate(more):
        if len(chosen) + len(more) - at <= len(best):
            break
        best = _largest((*chosen, gpu), tuple(one for one in more[at + 1 :] if linked(gpu, one)), linked, best)
    return best
