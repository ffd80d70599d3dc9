"""`gpu-plugin simulate-allocation`: which GPUs a container would get, and why."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_plugin.cli.gpu_list import counted, listed
from gpu_plugin.cli.running_daemon import state_dir_option
from gpu_plugin.cli.topology_source import node_from, simulate_option
from gpu_plugin.devices.node import Node

if TYPE_CHECKING:
    from gpu_plugin.devices.device import Device
    from gpu_plugin.placement.explain import Explanation
    from gpu_plugin.placement.groups import LinkGroups
    from gpu_plugin.placement.topology import Topology
    from gpu_plugin.placement.whole import Choice

_LIST = "GPUs by index, range or uuid (or how one begins), such as 0,2-5"


@click.command(
    "simulate-allocation",
    help="Which GPUs a container that asks for some would get, and why: what the running daemon would answer the kubelet "
    "(GetPreferredAllocation), were these available. Changes nothing.",
    epilog="With --replicas, GPUs that are shared by time-slicing or MPS, N times each: --available then says how many "
    "replicas of a GPU are free, such as 0:3,1:5; without a number, all. Exit status 2 for what cannot be had.",
)
@simulate_option
@state_dir_option
@click.option("--available", multiple=True, metavar="LIST", help=f"What is free: {_LIST}.  [default: all]")
@click.option("--size", type=int, required=True, metavar="N", help="How many the container asks for.")
@click.option("--must", multiple=True, metavar="LIST", help="What it must get, of what is free.")
@click.option("--replicas", type=click.IntRange(2, 10000), metavar="N", help="How often each GPU is given out.")
@click.option(
    "--policy", help="Which GPUs replicas are taken from: distributed, packed or spread.  [default: distributed]"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    simulate: str | None,
    state_dir: Path,
    available: tuple[str, ...],
    size: int,
    must: tuple[str, ...],
    replicas: int | None,
    policy: str | None,
    as_json: bool,  # noqa: FBT001 - click hands it over so
) -> None:
    """Prints the choice."""
    if size < 1:
        raise click.UsageError(f"--size: {size}: a container asks for at least one")
    if policy is not None and replicas is None:
        raise click.UsageError("--policy goes with --replicas: whole GPUs are taken by their links alone")
    node = node_from(simulate, state_dir)
    if replicas is None:
        told, text = _whole(node, available or ("all",), size, must)
    else:
        told, text = _shared(node, available or ("all",), size, must, replicas, policy)
    click.echo(json.dumps(told, indent=2) if as_json else "\n".join(text))


# Whole GPUs


def _whole(
    node: Node, available: Sequence[str], size: int, must: Sequence[str]
) -> tuple[Mapping[str, object], Iterable[str]]:
    """What GPUs that are given out once are chosen, for programs and for people."""
    from gpu_plugin.placement.explain import explain  # noqa: PLC0415 - usage and help need none of it
    from gpu_plugin.placement.groups import LinkGroups  # noqa: PLC0415
    from gpu_plugin.placement.prepared import Placement  # noqa: PLC0415
    from gpu_plugin.placement.topology import Topology  # noqa: PLC0415

    groups = LinkGroups.of(node)
    pool, required = listed("--available", available, groups.gpus), listed("--must", must, groups.gpus)
    missing = [at for at in required if at not in pool]
    if missing:
        raise click.UsageError(f"--must: not among the available GPUs: {groups.names(missing)}")
    _check(size, len(pool), len(required), "GPUs")
    topology = Topology.of(node)
    explained = explain(Placement.of(topology), pool, required, size)
    told = {
        "size": size,
        "available": [groups.gpus[at].index for at in pool],
        "must": [groups.gpus[at].index for at in required],
        "choice": _choice_json(groups, explained.choice),
        "runner_up": explained.runner_up and _choice_json(groups, explained.runner_up),
        "why": explained.why,
    }
    return told, _whole_text(groups, topology, explained)


def _choice_json(groups: "LinkGroups", choice: "Choice") -> Mapping[str, object]:
    return {
        "gpus": [groups.gpus[at].index for at in choice.gpus],
        "uuids": [groups.gpus[at].uuid for at in choice.gpus],
        "score": choice.score,
        "exact": choice.exact,
        "how": choice.why,
    }


def _whole_text(groups: "LinkGroups", topology: "Topology", explained: "Explanation") -> Iterator[str]:
    choice, other = explained.choice, explained.runner_up
    yield f"choice     {_choice_line(groups, choice)}"
    yield f"how        {'exactly' if choice.exact else 'not exactly'}: {choice.why}"
    yield f"runner-up  {_choice_line(groups, other) if other else 'none'}"
    yield f"why        {explained.why}"
    yield ""
    yield from (f"GPU {groups.gpus[at].index}  {groups.gpus[at].uuid}" for at in choice.gpus)
    if len(choice.gpus) > 1:
        yield ""
        yield from _pairs(groups, topology, choice.gpus)


def _choice_line(groups: "LinkGroups", choice: "Choice") -> str:
    noun = "GPU" if len(choice.gpus) == 1 else "GPUs"
    return f"{noun} {groups.names(choice.gpus)}" + (f", score {choice.score}" if len(choice.gpus) > 1 else "")


def _pairs(groups: "LinkGroups", topology: "Topology", gpus: Sequence[int]) -> Iterator[str]:
    """A line for each pair of a choice: how it is linked, and its score."""
    from gpu_plugin.placement.matrix import word  # noqa: PLC0415

    pairs = [
        (f"{groups.gpus[a].index}-{groups.gpus[b].index}", word(groups.links[a][b]), str(topology.scores[a][b]))
        for a, b in combinations(gpus, 2)
    ]
    widths = [max(map(len, column)) for column in zip(*pairs, strict=True)]
    for name, link, score in pairs:
        yield f"{name:<{widths[0]}}  {link:<{widths[1]}}  {score:>{widths[2]}}"


# Shared GPUs


def _shared(
    node: Node, available: Sequence[str], size: int, must: Sequence[str], replicas: int, policy: str | None
) -> tuple[Mapping[str, object], Iterable[str]]:
    """Which GPUs the replicas come from that a container gets, for programs and for people."""
    from gpu_plugin.placement.groups import LinkGroups  # noqa: PLC0415
    from gpu_plugin.placement.preferred import preferred  # noqa: PLC0415
    from gpu_plugin.placement.prepared import Placement  # noqa: PLC0415
    from gpu_plugin.placement.shared import DISTRIBUTED, POLICIES  # noqa: PLC0415
    from gpu_plugin.placement.topology import Topology  # noqa: PLC0415

    policy = DISTRIBUTED if policy is None else policy
    if policy not in POLICIES:
        raise click.UsageError(f"--policy: {policy!r} is none of {', '.join(POLICIES)}")
    groups, topology = LinkGroups.of(node), Topology.of(node)
    free = counted("--available", available, groups.gpus, replicas)
    required = counted("--must", must, groups.gpus, 1)
    for at, count in free.items():
        if count > replicas:
            raise click.UsageError(
                f"--available: GPU {groups.gpus[at].index} has {replicas} replicas, {count} are given"
            )
    for at, count in required.items():
        if count > free.get(at, 0):
            name = f"GPU {groups.gpus[at].index}"
            raise click.UsageError(f"--must: {count} replicas of {name}, of which {free.get(at, 0)} are available")
    _check(size, sum(free.values()), sum(required.values()), "replicas")
    devices = _replicas(groups, replicas)
    order = {device.id: at for at, device in enumerate(devices)}
    # Which of a GPU's replicas are given out makes no difference: the first ones are.
    ids = {at: [device.id for device in devices if device.gpu == groups.gpus[at].uuid] for at in free}
    chosen = preferred(
        [one for at, count in free.items() for one in ids[at][replicas - count :]],
        [one for at, count in required.items() for one in ids[at][replicas - count :]],
        size,
        devices,
        order,
        Placement.of(topology),
        policy,
    )
    taken = {at: sum(one in ids[at] for one in chosen) for at in free}
    told = {
        "size": size,
        "replicas": replicas,
        "policy": policy,
        "available": [{"gpu": groups.gpus[at].index, "free": count} for at, count in free.items()],
        "must": [{"gpu": groups.gpus[at].index, "count": count} for at, count in required.items()],
        "choice": {
            "gpus": [
                {"gpu": groups.gpus[at].index, "uuid": groups.gpus[at].uuid, "count": count}
                for at, count in taken.items()
                if count
            ],
            "ids": list(chosen),
            "score": topology.score(at for at, count in taken.items() if count),
        },
    }
    return told, _shared_text(groups, topology, taken, free, policy)


def _replicas(groups: "LinkGroups", replicas: int) -> Sequence["Device"]:
    """The devices of a resource whose GPUs are all shared so, as the daemon makes them."""
    from gpu_plugin.config.sharing import SharedResource  # noqa: PLC0415
    from gpu_plugin.devices.device import whole_gpu  # noqa: PLC0415
    from gpu_plugin.devices.plan import GPU_RESOURCE  # noqa: PLC0415
    from gpu_plugin.devices.sharing import Named, share  # noqa: PLC0415

    named = [Named(GPU_RESOURCE, whole_gpu(gpu), ()) for gpu in groups.gpus]
    offered, _ = share({GPU_RESOURCE: named}, [SharedResource(GPU_RESOURCE, GPU_RESOURCE, replicas)])
    return offered[GPU_RESOURCE]


def _shared_text(
    groups: "LinkGroups", topology: "Topology", taken: Mapping[int, int], free: Mapping[int, int], policy: str
) -> Iterator[str]:
    gpus = [at for at, count in taken.items() if count]
    score = f", score {topology.score(gpus)}" if len(gpus) > 1 else ""
    yield f"choice  {'GPU' if len(gpus) == 1 else 'GPUs'} {groups.names(gpus)}{score}"
    yield f"policy  {policy}"
    yield ""
    for at in gpus:
        yield f"GPU {groups.gpus[at].index}  {groups.gpus[at].uuid}  {taken[at]} of its {free[at]} free replicas"
    if len(gpus) > 1:
        yield ""
        yield from _pairs(groups, topology, gpus)


def _check(size: int, available: int, required: int, what: str) -> None:
    """Raises UsageError where there is no such set at all."""
    if size > available:
        there = "1 is" if available == 1 else f"{available} are"
        raise click.UsageError(f"--size: {size} {what} are asked for, and {there} available")
    if required > size:
        raise click.UsageError(f"--must: {required} {what} must be had, and --size asks for {size}")
