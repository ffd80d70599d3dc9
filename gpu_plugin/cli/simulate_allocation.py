"""`gpu-plugin simulate-allocation`: which GPUs a container would get, and why."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import click

from gpu_plugin.cli.allocation import Answer, Served, answer_to, request, served, simulated
from gpu_plugin.cli.running_daemon import state_dir_option
from gpu_plugin.cli.topology_source import simulate_option
from gpu_plugin.config.choices import ALLOCATION_POLICIES
from gpu_plugin.config.words import counted
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.matrix import held_back_words, word
from gpu_plugin.placement.views.report import Offered

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
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
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
    as_json: bool,  # noqa: FBT001 - click hands it over so
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
    named = bool(available)
    shown = (
        json.dumps(_json(offer, answer, named=named), indent=2)
        if as_json
        else "\n".join(_text(offer, answer, named=named))
    )
    click.echo(shown)


def _json(offer: Served, answer: Answer, *, named: bool) -> Mapping[str, object]:
    """Return the answer for programs."""
    hardware, asked = offer.resource.hardware, answer.asked
    data: dict[str, object] = {"resource": offer.resource.name} if offer.live else {}
    if answer.shared:
        data["policy"] = offer.resource.policy
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
    if offer.live:
        for name, entries in (
            ("left_out", [] if named else offer.left_out),
            ("not_offered", answer.not_offered(offer)),
        ):
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


def _text(offer: Served, answer: Answer, *, named: bool) -> Iterator[str]:
    """Yield the lines of the answer for people."""
    yield f"choice     {_gpus(answer, answer.gpus)}"
    if offer.live:
        yield f"resource   {offer.resource.name}"
    if answer.shared:
        yield f"policy     {offer.resource.policy}"
    else:
        yield f"how        {'exact' if answer.exact else 'not exact'}: {answer.how}"
        yield f"runner-up  {_gpus(answer, answer.runner_up) if answer.runner_up else 'none'}"
    yield f"why        {answer.why}"
    if offer.left_out and not named:
        yield f"left out   {held_back_words(offer.left_out)}"
    if not_offered := answer.not_offered(offer):
        yield f"note       the kubelet would not offer {held_back_words(not_offered)}"
    yield ""
    yield from _devices(offer.resource.hardware, answer)
    if len(answer.gpus) > 1:
        yield ""
        yield from _pairs(answer.groups, answer.topology, answer.gpus)


def _gpus(answer: Answer, gpus: Sequence[int]) -> str:
    score = f"  score {answer.topology.score(gpus)}" if len(gpus) > 1 else ""
    return f"{answer.groups.called(gpus)}{score}"


def _devices(hardware: Sequence[Offered], answer: Answer) -> Iterator[str]:
    """Yield a line for each GPU or MIG device that the container gets."""
    width = max(len(hardware[at].name) for at in answer.counts)
    for at, count in answer.counts.items():
        free = len(answer.asked.available[at])
        replicas = f"  {count} of {counted(free, 'free replica')}" if hardware[at].shared else ""
        yield f"{hardware[at].name:<{width}}  {hardware[at].visible_id}{replicas}"


def _pairs(groups: LinkGroups, topology: Topology, gpus: Sequence[int]) -> Iterator[str]:
    """Yield a line for each pair of a choice: its links, and its score."""
    pairs = [
        (f"{groups.gpus[a].index}-{groups.gpus[b].index}", word(groups.links[a][b]), str(topology.scores[a][b]))
        for a, b in combinations(gpus, 2)
    ]
    widths = [max(map(len, column)) for column in zip(*pairs, strict=True)]
    for name, link, score in pairs:
        yield f"{name:<{widths[0]}}  {link:<{widths[1]}}  {score:>{widths[2]}}"
