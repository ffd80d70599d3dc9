"""The links between the node's GPUs, as read last from the driver and the host. `probe_links` blocks: use a driver thread.

It reads the NVLinks of each GPU once and the common PCIe ancestor of each pair once. A refused value counts as the worst
value, and has no effect on others.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, takewhile
from operator import attrgetter

import msgspec

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import OWN_MESH, Gpu, Link, Pair
from gpu_plugin.devices.nvml_h import MAX_NVLINKS, FabricState, Return, TopologyLevel
from gpu_plugin.health.observation import Fabric, Fault
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import Driver, Handle, NvmlError
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.nvml.sample import fault
from gpu_plugin.runtime.threads import SlowCall

_SAME_NODE = 10  # the distance of a NUMA node to itself (ACPI SLIT; Linux: LOCAL_DISTANCE)

# Names in sysfs of a host bridge, and of a device with its function
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_PCI_DEVICE = re.compile(r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2})\.[0-7]")


class LinkReading(msgspec.Struct, frozen=True):
    """The links between GPUs, in the form that `Node` has.

    `links` has each pair of the GPUs that answered, and `cliques` the clique of each GPU that is in a clique. `lost` are the
    uuids of GPUs that were out of reach before their NVLinks were read; no pair has them. `troubles` are sentences about
    values that were refused for a temporary reason, and about the values used instead.
    """

    links: Mapping[Pair, Link] = msgspec.field(default_factory=dict)
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    troubles: tuple[str, ...] = ()


class Ends(msgspec.Struct, frozen=True):
    """The far ends of a GPU's working NVLinks: how many lead to each GPU of the node, by uuid, and how many to NVSwitches.

    `clique` is the switch mesh that the GPU is in; empty if it is in no mesh.
    """

    direct: Mapping[str, int] = msgspec.field(default_factory=dict)
    switched: int = 0
    clique: str = ""


def probe_links(driver: Driver, host: HostView, handles: Mapping[str, Handle], gpus: Sequence[Gpu]) -> LinkReading:
    """Read the links of all pairs of these GPUs.

    Eight GPUs with 18 NVLinks to four switches take 220 driver calls: for each GPU 19 for the far ends of its links, including
    the first link that does not exist, 4 for the kinds of the switches and 1 for its fabric, and 28 for the common ancestors
    of the pairs. NVML itself is called 364 times, since the state of each link is read before its far end.

    `handles` has a handle of each GPU, by uuid. The host is asked for NUMA distances once, and for the PCI paths of GPUs whose
    common ancestor the driver does not report.
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
        self._unreported: Counter[str] = Counter()
        """Number of pairs whose common ancestor NVML did not report, by error."""

    def all(self) -> LinkReading:
        if len(self._gpus) < 2:
            return LinkReading()
        ends: dict[str, Ends] = {}
        for gpu in self._gpus:
            try:
                ends[gpu.uuid] = self._ends(gpu.uuid)
            except NvmlError:
                continue  # the look at this GPU reports the reason
        distances = self._host.numa_distances()
        links: dict[Pair, Link] = {}
        answering = sorted((gpu for gpu in self._gpus if gpu.uuid in ends), key=attrgetter("uuid"))
        for one, other in combinations(answering, 2):  # the lower uuid first
            distance = numa_distance(distances, one.numa_node, other.numa_node)
            links[one.uuid, other.uuid] = link_between(
                one.uuid, ends[one.uuid], other.uuid, ends[other.uuid], self._ancestor(one, other), distance
            )
        for words, count in self._unreported.items():
            those = "a pair" if count == 1 else f"{count} pairs"
            self._troubles.append(
                f"the common PCIe ancestor of {those} of GPUs is taken from sysfs, as NVML does not report it: {words}"
            )
        return LinkReading(
            links,
            {uuid: found.clique for uuid, found in ends.items() if found.clique},
            frozenset(gpu.uuid for gpu in self._gpus if gpu.uuid not in ends),
            tuple(self._troubles),
        )

    def _ends(self, uuid: str) -> Ends:
        """Read the far ends of the GPU's NVLinks. Raises NvmlError if the GPU is out of reach.

        A far end is a GPU of this node if it has the bus id of such a GPU, and a switch if the driver reports a switch. Other
        reported far ends are ignored, such as a processor or a GPU of another virtual machine. If the driver does not report
        the kind, the far end counts as a switch if this GPU has joined a fabric, since only GPUs behind switches do.
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
                    break  # the GPU has no link of this or a higher number
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
        """Return whether an NVLink leads to a switch; None if the driver or the GPU model does not report that."""
        try:
            return self._driver.nvlink_to_switch(handle, link)
        except NvmlError as error:
            if error.unsupported or error.code == Return.INVALID_ARGUMENT:
                return None
            raise

    def _fabric(self, uuid: str, handle: Handle) -> Fabric | None:
        """Return the state of the GPU in joining its fabric; None if GPUs of its kind have no fabric."""
        try:
            return self._driver.fabric(handle)
        except NvmlError as error:
            if error.unsupported:
                return None
            _raise_if_out_of_reach(error)
            self._troubles.append(f"GPU {uuid}: its NVLink fabric cannot be read and counts as not joined: {error}")
            return Fabric(state=-1)

    def _ancestor(self, one: Gpu, other: Gpu) -> int:
        """Return the common ancestor from NVML, else from sysfs, which also has the place of a GPU that is now lost."""
        try:
            return self._driver.common_ancestor(self._handles[one.uuid], self._handles[other.uuid])
        except NvmlError as error:
            if not error.unsupported and fault(error).fault is Fault.ERROR:
                self._unreported[str(error)] += 1
        near = one.numa_node is not None and one.numa_node == other.numa_node
        return pcie_relation(self._path(one), self._path(other), near=near)

    def _path(self, gpu: Gpu) -> str:
        if gpu.uuid not in self._paths:
            self._paths[gpu.uuid] = self._host.pci_path(gpu.pci_bus_id) if gpu.pci_bus_id else ""
        return self._paths[gpu.uuid]


def _raise_if_out_of_reach(error: NvmlError) -> None:
    """Raise the error if the GPU or the driver would refuse any other call for the same reason."""
    if fault(error).fault is not Fault.ERROR:
        raise error


def link_between(one: str, ends: Ends, other: str, others: Ends, ancestor: int, distance: int | None) -> Link:
    """Return the link between two GPUs, from their uuids and the ends of both.

    Through switches they are connected by the lower of both numbers of NVLinks. While a direct link comes up or goes down the
    two ends may report different numbers; the lower number counts.
    """
    if ends.clique and ends.clique == others.clique:
        return Link(min(ends.switched, others.switched), ancestor, switched=True, numa_distance=distance)
    return Link(min(ends.direct.get(other, 0), others.direct.get(one, 0)), ancestor, numa_distance=distance)


def joined(fabric: Fabric) -> bool:
    """Return whether a GPU has finished joining its fabric without an error."""
    return fabric.state == FabricState.COMPLETED and fabric.status == Return.SUCCESS


def clique(fabric: Fabric | None) -> str:
    """Return a name that all GPUs behind connected switches share; empty while a GPU has not joined, or failed to join.

    GPUs before Hopper join no fabric, and state 0 means that there is no fabric: then all switches of the node form one mesh.
    Else the name is <cluster uuid>.<clique>, as in the label nvidia.com/gpu.clique of NVIDIA's GPU feature discovery. Without
    a cluster uuid, the name is for a mesh of this node.
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
    """Return the distance between two NUMA nodes, the larger if firmware has two; None if it is not known."""
    if one is None or other is None:
        return None
    there = [distances[way] for way in ((one, other), (other, one)) if way in distances]
    return max(there, default=_SAME_NODE if one == other else None)


def pcie_relation(one: str, other: str, *, near: bool) -> TopologyLevel:
    """Return the closest common ancestor of two PCI devices from their sysfs paths, as NVML would report it.

    Two functions of one PCI device are on one board. If both devices are below a common bridge, each is behind one port (a
    bridge) of the same switch, or directly on a shared bus; more bridges mean more switches. Beyond the host bridge, the level
    depends on `near`: both are known to be on one NUMA node. An empty path counts as the greatest distance.
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

# Number of times in a row that a reading with temporarily refused values is repeated, one round later each.
REPEATS = 2


class Links:
    """Reads links on request. Links of GPUs that are out of reach keep their last values, even if lost during the reading."""

    def __init__(self, driver: Driver, host: HostView, calls: DriverCalls) -> None:
        self._driver = driver
        self._host = host
        self._known: Mapping[Pair, Link] = {}
        self._cliques: Mapping[str, str] = {}
        self._reading: SlowCall[LinkReading] = SlowCall(calls)
        self._asked: frozenset[str] = frozenset()
        self._unread: set[str] = set()
        """GPUs that are not in the newest reading."""
        self._away: set[str] = set()
        """GPUs of `_unread` that have been out of reach since: once such a GPU answers, the links must be read again."""
        self._postponed = False
        self._troubles: tuple[str, ...] = ()
        self._repeats = 0

    def between(self, uuids: Iterable[str]) -> dict[Pair, Link]:
        """Return the known links between the GPUs with these uuids, by pair."""
        wanted = frozenset(uuids)
        return {pair: link for pair, link in self._known.items() if wanted.issuperset(pair)}

    def cliques(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the known NVSwitch meshes of these GPUs, by uuid."""
        return {uuid: self._cliques[uuid] for uuid in uuids if uuid in self._cliques}

    def due(self, gpus: Iterable[Watched]) -> bool:
        """Return whether to read the links again: a reading was postponed, or a GPU that the last reading lacks answers now."""
        answering = {each.gpu.uuid for each in gpus if _answers(each)}
        self._away |= self._unread - answering
        return self._postponed or not self._away.isdisjoint(answering)

    def store_finished(self) -> bool:
        """Store the result of a reading that has finished in the background. Return whether there was such a reading."""
        if not self._reading.back:
            return False
        job = self._reading.take()
        error = job.done.exception()
        if error is None:
            self._store(job.done.result())
        else:
            log.error("the links between GPUs cannot be read; the known links stay in use: %r", error)
        return True

    async def read(self, gpus: Iterable[Watched], patience: float) -> None:
        """Read the links of all GPUs that answer. Wait up to `patience` seconds; `store_finished` stores a later result."""
        self.store_finished()
        if self._reading.begun:  # it may have begun before the change that this call must read
            self._postponed = True
            return
        self._postponed = False
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
        if not self.store_finished():
            log.error("the links between GPUs are not known yet; until then pods get GPUs without regard to them")

    def _store(self, found: LinkReading) -> None:
        read = self._asked - found.lost
        self._known = {**self._known, **found.links}
        self._cliques = {uuid: word for uuid, word in self._cliques.items() if uuid not in read} | dict(found.cliques)
        self._unread |= found.lost
        for trouble in found.troubles:
            if trouble not in self._troubles:
                log.warning("%s", trouble)
        self._troubles = found.troubles
        self._repeats = self._repeats + 1 if found.troubles else 0
        self._postponed |= 0 < self._repeats <= REPEATS


def _answers(watched: Watched) -> bool:
    return watched.pending is None and watched.handle is not None and not watched.gpu.unreadable
