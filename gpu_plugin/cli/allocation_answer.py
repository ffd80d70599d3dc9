"""What `simulate-allocation` answers: what a container gets, and why."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from gpu_plugin.cli.allocation_request import Request, Served
from gpu_plugin.devices.device import GPU

if TYPE_CHECKING:
    from gpu_plugin.placement.topology import Topology
    from gpu_plugin.placement.views.groups import LinkGroups
    from gpu_plugin.placement.views.report import HeldBack


class Answer(msgspec.Struct, frozen=True):
    """What a container gets: `ids`, and `counts` of them by the place of their hardware in the resource.

    `gpus` are the positions in `topology` and `groups` of the GPUs that these are on. Of whole GPUs `how` says how they were
    found, and `runner_up` which ones came second, None where that is not known or there is no other set.
    """

    asked: Request
    topology: "Topology"
    groups: "LinkGroups"
    ids: Sequence[str]
    counts: Mapping[int, int]
    gpus: Sequence[int]
    why: str
    how: str = ""
    exact: bool = True
    runner_up: Sequence[int] | None = None

    @property
    def shared(self) -> bool:
        """Whether a policy chose, since there were shared GPUs or MIG devices to choose from."""
        return not self.how

    def not_offered(self, what: Served) -> list["HeldBack"]:
        """What was taken to be available although the kubelet would not offer it."""
        asked = {what.resource.hardware[at].visible_id for at in self.asked.available}
        return [each for each in what.left_out if each.uuid in asked]


def answer_to(what: Served, asked: Request) -> Answer:
    """What the daemon would answer to a request that can be met.

    Raises:
        UsageError: a GPU is available whose links are not known.
    """
    from gpu_plugin.placement.topology import Topology  # noqa: PLC0415
    from gpu_plugin.placement.views.groups import LinkGroups  # noqa: PLC0415 - usage and help need none of it

    hardware = what.resource.hardware
    groups, topology = LinkGroups.of(what.node), Topology.of(what.node)
    for at in asked.available:
        if hardware[at].gpu not in topology.position:
            raise click.UsageError(f"--available: {hardware[at].name} is not on this node: {hardware[at].reason}")
    if all(hardware[at].kind == GPU and not hardware[at].shared for at in asked.available):
        return _whole(what, asked, groups, topology)
    return _shared(what, asked, groups, topology)


def _whole(what: Served, asked: Request, groups: "LinkGroups", topology: "Topology") -> Answer:
    from gpu_plugin.placement.prepared import Placement  # noqa: PLC0415
    from gpu_plugin.placement.views import explain  # noqa: PLC0415
    from gpu_plugin.placement.whole import Trace, choose  # noqa: PLC0415

    hardware = what.resource.hardware
    places = {topology.position[hardware[at].gpu]: at for at in asked.available}
    must = [topology.position[hardware[at].gpu] for at in asked.must]
    trace = Trace()
    found = choose(Placement.of(topology), places, must, asked.size, trace=trace)
    counts = {places[gpu]: 1 for gpu in found.gpus}
    ids = [hardware[at].visible_id for at in counts]
    why, how = explain.why(trace), explain.how(trace)
    return Answer(asked, topology, groups, ids, counts, found.gpus, why, how, found.exact, trace.runner_up)


def _shared(what: Served, asked: Request, groups: "LinkGroups", topology: "Topology") -> Answer:
    from gpu_plugin.placement.preferred import preferred  # noqa: PLC0415
    from gpu_plugin.placement.prepared import Placement  # noqa: PLC0415
    from gpu_plugin.placement.shared import Trace  # noqa: PLC0415
    from gpu_plugin.placement.views import explain  # noqa: PLC0415

    hardware, policy = what.resource.hardware, what.resource.policy
    devices = what.resource.devices
    order = {device.id: at for at, device in enumerate(devices)}
    available, must = ([one for ids in part.values() for one in ids] for part in (asked.available, asked.must))
    trace = Trace()
    placement = Placement.of(topology)
    ids = preferred(available, must, asked.size, devices, order, placement, policy, trace=trace)
    chosen = frozenset(ids)
    counts = {at: count for at, each in asked.available.items() if (count := len(chosen.intersection(each)))}
    gpus = sorted({topology.position[hardware[at].gpu] for at in counts})
    return Answer(asked, topology, groups, ids, counts, gpus, explain.policy_why(trace, devices, policy))
