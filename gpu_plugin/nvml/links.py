"""How the node's GPUs are linked, as the driver and the host said last. `probe_links` blocks: it runs on a driver thread.

Every GPU is asked for its own ends once, and every pair for its common ancestor once. What is refused is the worst there is,
and spoils nothing else.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, takewhile

import msgspec

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import OWN_MESH, Gpu, Link, Pair
from gpu_plugin.devices.nvml_h import MAX_NVLINKS, FabricState, Return, TopologyLevel
from gpu_plugin.health.observation import Fabric, Fault
from gpu_plugin.nvml.port import Driver, Handle, NvmlError
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.nvml.sample import fault
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.slow_call import SlowCall

_SAME_NODE = 10  # the distance of a NUMA node to itself (ACPI SLIT; Linux: LOCAL_DISTANCE)

_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_PCI_DEVICE = re.compile(r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]")
"""How sysfs names a host bridge, and a device with its function."""


class LinkReading(msgspec.Struct, frozen=True):
    """How GPUs were found to be linked, as `Node` has it.

    `links` has every pair of the GPUs that answered; `cliques` those of them that are in one. `lost` are the uuids of GPUs that
    were out of reach before they had told of their NVLinks: nothing is said of their pairs. `troubles` says in sentences what
    was refused for no lasting reason, and what was taken to be so instead.
    """

    links: Mapping[Pair, Link] = msgspec.field(default_factory=dict)
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    troubles: tuple[str, ...] = ()


class Ends(msgspec.Struct, frozen=True):
    """Where the working NVLinks of one GPU lead: how many to each GPU of the node, by uuid, and how many to NVSwitches.

    `clique` is the mesh of switches that the GPU is part of, empty where it is in none.
    """

    direct: Mapping[str, int] = msgspec.field(default_factory=dict)
    switched: int = 0
    clique: str = ""


def probe_links(driver: Driver, host: HostView, handles: Mapping[str, Handle], gpus: Sequence[Gpu]) -> LinkReading:
    """Reads every pair of these GPUs once.

    Eight GPUs of 18 NVLinks to four switches are asked 220 questions: each GPU for the far end of each link and of the first
    that is not there (19), for the kind of each switch (4) and for its fabric (1), and 28 pairs for their common ancestor. NVML
    itself is called 364 times, as it is asked of each link whether it works before where it leads.

    `handles` has one of each GPU, by uuid. The host is asked for NUMA distances once, and for the PCI paths of GPUs whose common
    ancestor the driver does not tell.
    """
    return _Reading(driver, host, handles, gpus).all()


class _Reading:
    def __init__(self, driver: Driver, host: HostView, handles: Mapping[str, Handle], gpus: Sequence[Gpu]) -> None:
        self._driver = driver
        self._host = host
        self._handles = handles
        self._gpus = gpus
        self._by_bus = {gpu.pci_bus_id.lower(): gpu.uuid for gpu in gpus if gpu.pci_bus_id}
        self._paths: dict[str, str] = {}
        self._troubles: list[str] = []
        self._untold: Counter[str] = Counter()
        """How many pairs NVML told no ancestor of, by its words."""

    def all(self) -> LinkReading:
        if len(self._gpus) < 2:
            return LinkReading()
        ends: dict[str, Ends] = {}
        for gpu in self._gpus:
            try:
                ends[gpu.uuid] = self._ends(gpu.uuid)
            except NvmlError:
                continue  # why, its own look tells
        distances = self._host.numa_distances()
        links: dict[Pair, Link] = {}
        answering = sorted((gpu for gpu in self._gpus if gpu.uuid in ends), key=lambda gpu: gpu.uuid)
        for one, other in combinations(answering, 2):  # the lower uuid first
            distance = numa_distance(distances, one.numa_node, other.numa_node)
            links[one.uuid, other.uuid] = link_between(
                one.uuid, ends[one.uuid], other.uuid, ends[other.uuid], self._ancestor(one, other), distance
            )
        for words, count in self._untold.items():
            those = "a pair" if count == 1 else f"{count} pairs"
            self._troubles.append(
                f"the common PCIe ancestor of {those} of GPUs is taken from sysfs, as NVML does not tell: {words}"
            )
        return LinkReading(
            links,
            {uuid: found.clique for uuid, found in ends.items() if found.clique},
            frozenset(gpu.uuid for gpu in self._gpus if gpu.uuid not in ends),
            tuple(self._troubles),
        )

    def _ends(self, uuid: str) -> Ends:
        """Where the GPU's NVLinks lead. Raises NvmlError where it is out of reach.

        The far end of an NVLink is a GPU of this node where it has one's bus id; a switch where the driver says so. What
        else it says does not count: a processor, or a GPU that is another virtual machine's. Where it does not say what kind of
        thing is there, it is a switch if the GPU has joined a fabric, which only those behind switches do.
        """
        handle = self._handles[uuid]
        direct: Counter[str] = Counter()
        kinds: dict[str, bool | None] = {}
        switched = unknown = 0
        refused: dict[int, NvmlError] = {}
        for link in range(MAX_NVLINKS):
            try:
                remote = self._driver.nvlink_remote_bus_id(handle, link)
                if remote is None:
                    continue
                if (peer := self._by_bus.get(remote.lower())) is not None:
                    direct[peer] += 1
                    continue
                if not remote or remote not in kinds:
                    kinds[remote] = self._to_switch(handle, link)
            except NvmlError as error:
                if error.unsupported or error.code == Return.INVALID_ARGUMENT:
                    break  # no such link: there are none after it either
                _raise_if_out_of_reach(error)
                refused[link] = error
                continue
            switched += kinds[remote] is True
            unknown += kinds[remote] is None
        if refused:
            numbers, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            self._troubles.append(f"GPU {uuid}: NVLinks {numbers} cannot be read and count as down: {why}")
        if not switched and not unknown:
            return Ends(direct)
        fabric = self._fabric(uuid, handle)
        if fabric is not None and joined(fabric):
            switched += unknown
        return Ends(direct, switched, clique(fabric) if switched else "")

    def _to_switch(self, handle: Handle, link: int) -> bool | None:
        """Whether an NVLink leads to a switch; None where the driver or the part does not tell."""
        try:
            return self._driver.nvlink_to_switch(handle, link)
        except NvmlError as error:
            if error.unsupported or error.code == Return.INVALID_ARGUMENT:
                return None
            raise

    def _fabric(self, uuid: str, handle: Handle) -> Fabric | None:
        """How far the GPU has come in joining its fabric; None where parts like it have none to join."""
        try:
            return self._driver.fabric(handle)
        except NvmlError as error:
            if error.unsupported:
                return None
            _raise_if_out_of_reach(error)
            self._troubles.append(f"GPU {uuid}: its NVLink fabric cannot be read and counts as not joined: {error}")
            return Fabric(state=-1)

    def _ancestor(self, one: Gpu, other: Gpu) -> int:
        """NVML's word first; where it has none, that of sysfs, which also knows where a GPU hangs that is lost by now."""
        try:
            return self._driver.common_ancestor(self._handles[one.uuid], self._handles[other.uuid])
        except NvmlError as error:
            if not error.unsupported and fault(error).fault is Fault.ERROR:
                self._untold[str(error)] += 1
        near = one.numa_node is not None and one.numa_node == other.numa_node
        return pcie_relation(self._path(one), self._path(other), near=near)

    def _path(self, gpu: Gpu) -> str:
        if gpu.uuid not in self._paths:
            self._paths[gpu.uuid] = self._host.pci_path(gpu.pci_bus_id) if gpu.pci_bus_id else ""
        return self._paths[gpu.uuid]


def _raise_if_out_of_reach(error: NvmlError) -> None:
    """Raises what the GPU or the driver would answer to any other question too."""
    if fault(error).fault is not Fault.ERROR:
        raise error


def link_between(one: str, ends: Ends, other: str, others: Ends, ancestor: int, distance: int | None) -> Link:
    """What lies between two GPUs, by their uuids and the ends of both.

    Through switches they reach each other with as many NVLinks as the one that has fewer. Of direct ones, both ends may
    disagree while a link is coming up or going down: what both see is there.
    """
    if ends.clique and ends.clique == others.clique:
        return Link(min(ends.switched, others.switched), ancestor, switched=True, numa_distance=distance)
    return Link(min(ends.direct.get(other, 0), others.direct.get(one, 0)), ancestor, numa_distance=distance)


def joined(fabric: Fabric) -> bool:
    """Whether a GPU has come to the end of joining its fabric, and without an error."""
    return fabric.state == FabricState.COMPLETED and fabric.status == Return.SUCCESS


def clique(fabric: Fabric | None) -> str:
    """One word for all GPUs behind switches that reach each other; empty for one that reaches nobody yet, or failed to.

    Before Hopper there was no fabric to join, and state 0 says that there is none here: all switches of a node are one mesh
    then. Else the clique is that of the cluster, as <cluster uuid>.<clique>, the way NVIDIA's GPU feature discovery writes it
    (nvidia.com/gpu.clique), or without one that of the node.
    """
    if fabric is None or fabric.state == FabricState.NOT_SUPPORTED:
        return OWN_MESH
    if not joined(fabric):
        return ""
    if fabric.cluster:
        digits = fabric.cluster.lower()
        dashed = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        return f"{dashed}.{fabric.clique}"
    return f"{OWN_MESH}.{fabric.clique}" if fabric.clique else OWN_MESH


def numa_distance(distances: Mapping[tuple[int, int], int], one: int | None, other: int | None) -> int | None:
    """How far two NUMA nodes are from each other, the longer way where firmware has two; None where it is not known."""
    if one is None or other is None:
        return None
    there = [distances[way] for way in ((one, other), (other, one)) if way in distances]
    return max(there, default=_SAME_NODE if one == other else None)


def pcie_relation(one: str, other: str, *, near: bool) -> TopologyLevel:
    """The closest common ancestor of two PCI devices by their sysfs paths, as NVML would name it.

    Two functions of one device are one board. Below a bridge that both share, each has its own port of one switch, which is a
    bridge, or none where the bus is shared; any more are further switches. Beyond the host bridge it counts whether they are
    `near`: known to be on one NUMA node. An empty path is as far as can be.
    """
    if not one or not other:
        return TopologyLevel.SYSTEM
    ways = one.split("/"), other.split("/")
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*ways, strict=False)))
    below = max(map(len, ways)) - shared
    if below <= 1 and _device(ways[0][-1]) == _device(ways[1][-1]):
        return TopologyLevel.INTERNAL
    ancestor = ways[0][shared - 1] if shared else ""
    if _PCI_DEVICE.fullmatch(ancestor):
        return TopologyLevel.SINGLE if below <= 2 else TopologyLevel.MULTIPLE  # a port and the GPU itself
    if _PCI_ROOT.fullmatch(ancestor):
        return TopologyLevel.HOSTBRIDGE
    return TopologyLevel.NODE if near else TopologyLevel.SYSTEM


def _device(name: str) -> str:
    found = _PCI_DEVICE.fullmatch(name)
    return found[1] if found else name


log = logging.getLogger(__name__)

# How often in a row a reading is repeated, a round later, in which something was refused for no lasting reason.
REPEATS = 2


class Links:
    """Reads them when asked to; what was known of GPUs that are out of reach still holds, one lost midway among them."""

    def __init__(self, driver: Driver, host: HostView, calls: DriverCalls) -> None:
        self._driver = driver
        self._host = host
        self._known: Mapping[Pair, Link] = {}
        self._cliques: Mapping[str, str] = {}
        self._reading: SlowCall[LinkReading] = SlowCall(calls.begin)
        self._asked: frozenset[str] = frozenset()
        self._unread: set[str] = set()
        """GPUs that the newest reading is without, """
        self._away: set[str] = set()
        """and those of them that have been out of reach since: once one answers, there is something to read."""
        self._owed = False
        self._troubles: tuple[str, ...] = ()
        self._repeats = 0

    def between(self, uuids: Iterable[str]) -> dict[Pair, Link]:
        """Links between the GPUs with these uuids, by pair, as far as they are known."""
        wanted = frozenset(uuids)
        return {pair: link for pair, link in self._known.items() if wanted.issuperset(pair)}

    def cliques(self, uuids: Iterable[str]) -> dict[str, str]:
        """By uuid, the NVSwitch meshes that these GPUs are in, as far as they are known."""
        return {uuid: self._cliques[uuid] for uuid in uuids if uuid in self._cliques}

    def due(self, gpus: Iterable[Watched]) -> bool:
        """Whether they are to be read again: that was put off, or a GPU answers that had no part in the last reading."""
        answering = {each.gpu.uuid for each in gpus if _answers(each)}
        self._away |= self._unread - answering
        return self._owed or not self._away.isdisjoint(answering)

    def came(self) -> bool:
        """Takes in what a reading brought that was not waited for. Returns whether there was one."""
        if not self._reading.back:
            return False
        job = self._reading.take()
        error = job.done.exception()
        if error is None:
            self._take(job.done.result())
        else:
            log.error("the links between GPUs cannot be read; what is known of them holds: %r", error)
        return True

    async def read(self, gpus: Iterable[Watched], patience: float) -> None:
        """Asks for those between all GPUs that answer, for `patience` seconds; what takes longer comes some time."""
        self.came()
        if self._reading.begun:  # it may have begun before what this is to find
            self._owed = True
            return
        self._owed = False
        everyone = list(gpus)
        answering = [each for each in everyone if _answers(each)]
        handles = {each.gpu.uuid: each.handle for each in answering if each.handle is not None}
        described = [each.gpu for each in answering]
        self._asked = frozenset(handles)
        self._unread = {each.gpu.uuid for each in everyone} - self._asked
        self._away = set(self._unread)
        if len(described) < 2:
            return
        driver, host = self._driver, self._host
        self._reading.begin(lambda: probe_links(driver, host, handles, described))
        await self._reading.wait(patience)
        if not self.came():
            log.error("the links between GPUs are not known yet; pods get GPUs without regard to what is unknown")

    def _take(self, found: LinkReading) -> None:
        read = self._asked - found.lost
        self._known = {**self._known, **found.links}
        self._cliques = {uuid: word for uuid, word in self._cliques.items() if uuid not in read} | dict(found.cliques)
        self._unread |= found.lost
        for trouble in found.troubles:
            if trouble not in self._troubles:
                log.warning("%s", trouble)
        self._troubles = found.troubles
        self._repeats = self._repeats + 1 if found.troubles else 0
        self._owed |= 0 < self._repeats <= REPEATS


def _answers(watched: Watched) -> bool:
    return watched.pending is None and watched.handle is not None and not watched.gpu.unreadable
