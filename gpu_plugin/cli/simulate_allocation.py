"""`gpu-plugin simulate-allocation`: which GPUs a container would get, and why."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from operator import attrgetter
from pathlib import Path

import click
import msgspec

from gpu_plugin.cli.gpu_list import Amount, Hardware, amounts
from gpu_plugin.cli.output import DATA, output_options, structured
from gpu_plugin.cli.running_daemon import state_dir_option
from gpu_plugin.cli.topology_source import daemons_node, simulate_option, simulated_node
from gpu_plugin.config.choices import ALLOCATION_POLICIES
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
from gpu_plugin.placement.views.matrix import held_back_words, word
from gpu_plugin.placement.views.report import Offered, OfferedResource, left_out

# Device ids by the place of their hardware in a resource. Hardware without ids has no entry.
Ids = Mapping[int, Sequence[str]]


class Served(msgspec.Struct, frozen=True):
    """A resource of a node. `left_out` is its hardware that pods do not get now; `live` is True if a running daemon serves it."""

    node: Node
    resource: OfferedResource
    left_out: Sequence[Offered] = ()
    live: bool = False


class Request(msgspec.Struct, frozen=True):
    """A container's request: `size` devices of `available`, including all of `must`.

    `named` is True if the user named the available devices.
    """

    available: Ids
    must: Ids
    size: int
    named: bool


class Answer(msgspec.Struct, frozen=True):
    """The devices that a container gets: `ids`, and `counts` of them by the place of their hardware in the resource.

    `gpus` are the positions of their GPUs in `topology` and `groups`. For whole GPUs `how` is the way in which they were found,
    and `runner_up` the second best set, None if it is unknown or does not exist.
    """

    offer: Served
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

    @property
    def hardware(self) -> Sequence[Offered]:
        """The hardware of the resource."""
        return self.offer.resource.hardware

    @property
    def left_out(self) -> Sequence[Offered]:
        """The hardware that pods do not get now, if the user named no available devices."""
        return () if self.asked.named else self.offer.left_out

    @property
    def not_offered(self) -> list[Offered]:
        """The hardware of the request's `available` that the kubelet would not offer."""
        asked = {self.hardware[at].visible_id for at in self.asked.available}
        return [each for each in self.offer.left_out if each.visible_id in asked]


_LIST = "GPUs or MIG devices by index, range, uuid (or how one begins) or PCI bus id, such as 0,2-5"


@click.command(
    "simulate-allocation",
    help="Which GPUs a container that asks for some would get, and why: what the running daemon would answer the kubelet "
    "(GetPreferredAllocation), were these available. Changes nothing.",
    epilog="Example: gpu-plugin simulate-allocation --simulate dgx1-v100 --taken 5,7 --size 2. Where GPUs are shared, "
    "lists say how many replicas of each are meant, such as 0:3,1-2:5; without a number, all (--must: one). Exit "
    "status 2 for what cannot be had, 3 where no daemon answers.",
)
@click.option("--size", type=int, required=True, metavar="N", help="How many the container asks for.")
@click.option(
    "--available",
    multiple=True,
    metavar="LIST",
    help=f"What is free: {_LIST}, or all. [default: all that is fit for pods, also what pods hold]",
)
@click.option("--taken", multiple=True, metavar="LIST", help="What of that is not free, instead of --available.")
@click.option("--must", multiple=True, metavar="LIST", help="What the container must get, of what is free.")
@click.option(
    "--resource",
    metavar="NAME",
    help="Which of the daemon's resources it asks for. [default: nvidia.com/gpu, or the only one]",
)
@click.option(
    "--replicas",
    type=click.IntRange(2, 10000),
    metavar="N",
    help="How often everything is given out. [default: as the daemon does; with --simulate, once]",
)
@click.option(
    "--policy",
    metavar=f"[{'|'.join(ALLOCATION_POLICIES)}]",
    help="Which GPUs replicas and MIG devices are taken from. [default: the daemon's; with --simulate, distributed]",
)
@output_options
@simulate_option
@state_dir_option
def command(
    simulate: str | None,
    state_dir: Path,
    available: tuple[str, ...],
    taken: tuple[str, ...],
    size: int,
    must: tuple[str, ...],
    resource: str | None,
    replicas: int | None,
    policy: str | None,
    output: str,
) -> None:
    """Print the choice."""
    if size < 1:
        raise click.UsageError(f"--size: {size}: a container asks for at least one device")
    if available and taken:
        raise click.UsageError("--taken: this option already determines the free devices: leave out --available")
    if policy is not None and policy not in ALLOCATION_POLICIES:
        raise click.UsageError(f"--policy: {policy!r} is unknown; there are {', '.join(ALLOCATION_POLICIES)}")
    if resource is not None and simulate is not None:
        raise click.UsageError("--resource: a simulated node serves no resource: leave out --resource or --simulate")
    offer = (
        simulated(simulate, replicas, policy) if simulate is not None else served(state_dir, resource, replicas, policy)
    )
    answer = answer_to(offer, request(offer, available, taken, must, size))
    if policy is not None and not answer.shared:
        raise click.UsageError("--policy goes with --replicas: whole GPUs are chosen by their links")
    click.echo(structured(_json(answer), output) if output in DATA else "\n".join(_text(answer)))


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
        UsageError: the daemon does not serve the resource, or serves several and there is no `name`.
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
    """Return the request of the options. Without `available`, all healthy hardware except `taken` is free.

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
    return Request(free, required, size, bool(available))


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
    return Answer(offer, asked, topology, groups, ids, counts, found.gpus, why, how, found.exact, trace.runner_up)


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
    return Answer(offer, asked, topology, groups, ids, counts, gpus, explain.policy_why(trace, devices, policy))


def _json(answer: Answer) -> Mapping[str, object]:
    """Return the answer for programs."""
    hardware, asked, live = answer.hardware, answer.asked, answer.offer.live
    data: dict[str, object] = {"resource": answer.offer.resource.name} if live else {}
    if answer.shared:
        data["policy"] = answer.offer.resource.policy
    replicas = {len(hardware[at].ids) if hardware[at].shared else 0 for at in asked.available}
    if len(replicas) == 1 and (count := replicas.pop()):
        data["replicas"] = count
    data["size"] = asked.size
    for name, ids in (("available", asked.available), ("must", asked.must)):
        data[name] = [_index(hardware[at]) for at in ids]
        if answer.shared:
            data[f"{name}_counts"] = {hardware[at].index: len(each) for at, each in ids.items()}
    data["choice"] = _choice_json(answer, answer.gpus) | (
        {"counts": {hardware[at].index: count for at, count in answer.counts.items()}, "ids": list(answer.ids)}
        if answer.shared
        else {"exact": answer.exact, "how": answer.how}
    )
    data["runner_up"] = _choice_json(answer, answer.runner_up) if answer.runner_up else None
    data["why"] = answer.why
    for name, entries in (("left_out", answer.left_out), ("not_offered", answer.not_offered)) if live else ():
        data[name] = [{"index": _index(each), "uuid": each.visible_id, "reason": each.reason} for each in entries]
    return data


def _choice_json(answer: Answer, gpus: Sequence[int]) -> dict[str, object]:
    return {
        "gpus": [answer.groups.gpus[at].index for at in gpus],
        "uuids": [answer.groups.gpus[at].uuid for at in gpus],
        "score": answer.topology.score(gpus),
    }


def _index(each: Offered) -> int | str:
    return int(each.index) if each.index.isdecimal() else each.index


def _text(answer: Answer) -> Iterator[str]:
    """Yield the lines of the answer for people."""
    yield f"choice     {_gpus(answer, answer.gpus)}"
    if answer.offer.live:
        yield f"resource   {answer.offer.resource.name}"
    if answer.shared:
        yield f"policy     {answer.offer.resource.policy}"
    else:
        yield f"how        {'exact' if answer.exact else 'not exact'}: {answer.how}"
        yield f"runner-up  {_gpus(answer, answer.runner_up) if answer.runner_up else 'none'}"
    yield f"why        {answer.why}"
    if answer.left_out:
        yield f"left out   {held_back_words(answer.left_out)}"
    if answer.not_offered:
        yield f"note       the kubelet would not offer {held_back_words(answer.not_offered)}"
    yield ""
    width = max(len(answer.hardware[at].name) for at in answer.counts)
    for at, count in answer.counts.items():
        each, free = answer.hardware[at], len(answer.asked.available[at])
        replicas = f"  {count} of {counted(free, 'free replica')}" if each.shared else ""
        yield f"{each.name:<{width}}  {each.visible_id}{replicas}"
    if len(answer.gpus) > 1:
        yield ""
        yield from _pairs(answer.groups, answer.topology, answer.gpus)


def _gpus(answer: Answer, gpus: Sequence[int]) -> str:
    score = f"  score {answer.topology.score(gpus)}" if len(gpus) > 1 else ""
    return f"{answer.groups.called(gpus)}{score}"


def _pairs(groups: LinkGroups, topology: Topology, gpus: Sequence[int]) -> Iterator[str]:
    """Yield a line for each pair of a choice: its links, and its score."""
    pairs = [
        (f"{groups.gpus[a].index}-{groups.gpus[b].index}", word(groups.links[a][b]), str(topology.scores[a][b]))
        for a, b in combinations(gpus, 2)
    ]
    widths = [max(map(len, column)) for column in zip(*pairs, strict=True)]
    for name, link, score in pairs:
        yield f"{name:<{widths[0]}}  {link:<{widths[1]}}  {score:>{widths[2]}}"
