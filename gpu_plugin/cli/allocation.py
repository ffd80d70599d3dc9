"""The request and the answer of `simulate-allocation`: the free hardware, a container's wishes, and the devices that it gets."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import click
import msgspec

from gpu_plugin.cli.gpu_list import Amount, Hardware, amounts
from gpu_plugin.cli.topology_source import daemons_node, simulated_node
from gpu_plugin.config.sharing import DISTRIBUTED, TIME_SLICING
from gpu_plugin.config.words import are, counted
from gpu_plugin.devices.device import GPU
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import GPU_RESOURCE
from gpu_plugin.placement import shared, whole
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import explain
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.matrix import held_back_words
from gpu_plugin.placement.views.report import Offered, OfferedResource, left_out

Ids = Mapping[int, Sequence[str]]
"""Device ids by the place of their hardware in a resource. Hardware without ids has no entry."""


class Served(msgspec.Struct, frozen=True):
    """A resource of a node. `left_out` is its hardware that pods do not get now; `live` is True if a running daemon serves it."""

    node: Node
    resource: OfferedResource
    left_out: Sequence[Offered] = ()
    live: bool = False


class Request(msgspec.Struct, frozen=True):
    """A container's request: `size` devices of `available`, including all of `must`."""

    available: Ids
    must: Ids
    size: int


def simulated(profile: str, replicas: int | None, policy: str | None) -> Served:
    """Return all GPUs of a simulated node, given out once or `replicas` times. Raises UsageError for an unknown node."""
    node = simulated_node(profile)
    count, how = (replicas, TIME_SLICING) if replicas else (1, "")
    gpus = sorted(node.gpus, key=attrgetter("index"))
    hardware = [Offered(gpu.uuid, gpu.uuid, str(gpu.index), GPU, count, count, shared=how) for gpu in gpus]
    return Served(node, OfferedResource(GPU_RESOURCE, policy or DISTRIBUTED, tuple(hardware)))


def served(state_dir: Path, name: str | None, replicas: int | None, policy: str | None) -> Served:
    """Return a resource as the daemon of `state_dir` serves it, or under another policy or number of replicas.

    Raises:
        UsageError: the daemon does not serve the resource, or serves several and `name` is None.
        ClickException: no daemon of this version answers, or it serves nothing yet.
    """
    node, resources = daemons_node(state_dir)
    if not resources:
        raise click.ClickException("the running daemon serves no resource of this node yet: its log says why")
    found = _resource(name, resources)
    hardware = found.hardware if replicas is None else tuple(each.given_out(replicas) for each in found.hardware)
    chosen = OfferedResource(found.name, policy or found.policy, hardware)
    return Served(node, chosen, left_out(node, resources, chosen), live=True)


def _resource(name: str | None, resources: Sequence[OfferedResource]) -> OfferedResource:
    by_name = {resource.name: resource for resource in resources}
    if name is None and GPU_RESOURCE not in by_name and len(resources) > 1:
        raise click.UsageError(f"--resource: name one of {', '.join(by_name)}")
    fallback = GPU_RESOURCE if GPU_RESOURCE in by_name else resources[0].name
    wanted = fallback if name is None else name
    if wanted not in by_name:
        raise click.UsageError(f"--resource: {wanted!r} is not served here: {', '.join(by_name)} {are(len(by_name))}")
    return by_name[wanted]


def request(offer: Served, available: Sequence[str], taken: Sequence[str], must: Sequence[str], size: int) -> Request:
    """Return the request of the options. Without `available`, all healthy hardware that is not `taken` is free.

    Raises:
        UsageError: the hardware does not exist, or the request cannot be met.
    """
    hardware = offer.resource.hardware
    known = Hardware(hardware, offer.node.gpus, offer.resource.name if offer.live else "this node")
    if available:
        given = amounts("--available", available, known)
        free = {at: amount.of(hardware[at].ids) for at, amount in given.items()}
    else:
        gone = amounts("--taken", taken, known)
        free = {at: each.ids for at, each in enumerate(hardware) if each.healthy}
        free |= {at: amount.left_of(free[at]) for at, amount in gone.items() if at in free}
    free = {at: ids for at, ids in free.items() if ids}
    required = _required(amounts("--must", must, known), free, offer.resource)
    left_out = () if available else offer.left_out
    _check(size, sum(map(len, free.values())), sum(map(len, required.values())), _noun(offer.resource, free), left_out)
    return Request(free, required, size)


def _required(wanted: Mapping[int, Amount], free: Ids, resource: OfferedResource) -> Ids:
    hardware = resource.hardware
    gone = [hardware[at] for at, amount in wanted.items() if at not in free and amount.count != 0]
    if gone:
        missing = [each.name if each.healthy else f"{each.name} ({each.reason})" for each in gone]
        raise click.UsageError(f"--must: not available: {', '.join(missing)}")
    for at, amount in wanted.items():
        there, asked = len(free.get(at, ())), amount.count or len(amount.ids)
        if amount.ids and not {*amount.ids} <= {*free[at]}:
            raise click.UsageError(f"--must: not all of {', '.join(amount.ids)} are available")
        if asked > there:
            name = f"{hardware[at].name}, of which {there} {are(there)} available"
            raise click.UsageError(f"--must: {counted(asked, 'replica')} of {name}")
    required = {
        at: (amount if amount != Amount() else Amount(1)).of(free[at]) for at, amount in wanted.items() if at in free
    }
    return {at: ids for at, ids in required.items() if ids}


def _noun(resource: OfferedResource, free: Ids) -> str:
    if any(resource.hardware[at].shared for at in free):
        return "replicas"
    return "MIG devices" if any(resource.hardware[at].kind != GPU for at in free) else "GPUs"


def _check(size: int, available: int, required: int, noun: str, left_out: Sequence[Offered]) -> None:
    """Raise UsageError if no set of devices meets the request."""
    if size > available:
        more = f"; left out: {held_back_words(left_out)}" if left_out else ""
        asked = f"{size} {noun.removesuffix('s') if size == 1 else noun} {are(size)}"
        raise click.UsageError(f"--size: {asked} asked for, and {available} {are(available)} available{more}")
    if required > size:
        raise click.UsageError(f"--must: {required} {noun} are required, and --size asks for {size}")


class Answer(msgspec.Struct, frozen=True):
    """The devices that a container gets: `ids`, and `counts` of them by the place of their hardware in the resource.

    `gpus` are the positions of their GPUs in `topology` and `groups`. For whole GPUs `how` is the way in which they were found,
    and `runner_up` the second best set, None if that is not known or there is no other set.
    """

    asked: Request
    topology: Topology
    groups: LinkGroups
    ids: Sequence[str]
    counts: Mapping[int, int]
    gpus: Sequence[int]
    why: str
    how: str = ""
    exact: bool = True
    runner_up: Sequence[int] | None = None

    @property
    def shared(self) -> bool:
        """True if a policy chose, because there were shared GPUs or MIG devices to choose from."""
        return not self.how

    def not_offered(self, offer: Served) -> list[Offered]:
        """Return the hardware of the request's `available` that the kubelet would not offer."""
        asked = {offer.resource.hardware[at].visible_id for at in self.asked.available}
        return [each for each in offer.left_out if each.visible_id in asked]


def answer_to(offer: Served, asked: Request) -> Answer:
    """Return the daemon's answer to a request that can be met.

    Raises:
        UsageError: the links of an available GPU are not known.
    """
    hardware = offer.resource.hardware
    groups, topology = LinkGroups.of(offer.node), Topology.of(offer.node)
    for at in asked.available:
        if hardware[at].gpu not in topology.position:
            raise click.UsageError(f"--available: {hardware[at].name} is not on this node: {hardware[at].reason}")
    if all(hardware[at].kind == GPU and not hardware[at].shared for at in asked.available):
        return _whole(offer, asked, groups, topology)
    return _shared(offer, asked, groups, topology)


def _whole(offer: Served, asked: Request, groups: LinkGroups, topology: Topology) -> Answer:
    hardware = offer.resource.hardware
    places = {topology.position[hardware[at].gpu]: at for at in asked.available}
    must = [topology.position[hardware[at].gpu] for at in asked.must]
    trace = whole.Trace()
    found = whole.choose(Placement.of(topology), places, must, asked.size, trace=trace)
    counts = {places[gpu]: 1 for gpu in found.gpus}
    ids = [hardware[at].visible_id for at in counts]
    why, how = explain.why(trace), explain.how(trace)
    return Answer(asked, topology, groups, ids, counts, found.gpus, why, how, found.exact, trace.runner_up)


def _shared(offer: Served, asked: Request, groups: LinkGroups, topology: Topology) -> Answer:
    hardware, policy = offer.resource.hardware, offer.resource.policy
    devices = offer.resource.devices
    order = {device.id: at for at, device in enumerate(devices)}
    available, must = ([one for ids in part.values() for one in ids] for part in (asked.available, asked.must))
    trace = shared.Trace()
    placement = Placement.of(topology)
    ids = preferred(available, must, asked.size, devices, order, placement, policy, trace=trace)
    chosen = frozenset(ids)
    counts = {at: count for at, each in asked.available.items() if (count := len(chosen.intersection(each)))}
    gpus = sorted({topology.position[hardware[at].gpu] for at in counts})
    return Answer(asked, topology, groups, ids, counts, gpus, explain.policy_why(trace, devices, policy))
