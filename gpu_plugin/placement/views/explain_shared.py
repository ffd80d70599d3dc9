"""What a policy took explained by what it weighed: what it looked at, and what told GPUs of one rank apart."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from gpu_plugin.devices.device import Device
from gpu_plugin.placement.dealing import HAS, ROOM
from gpu_plugin.placement.shared import POLICIES, Round, Trace
from gpu_plugin.placement.views import explain
from gpu_plugin.placement.views.groups import called


def why(trace: Trace, devices: Sequence[Device], policy: str) -> str:
    """Why a policy took devices of this list, in a sentence or two."""
    if trace.forced is not None:
        return explain.FORCED[trace.forced]
    before = ""
    if len(trace.rounds) > 1:
        before = "each GPU or MIG device with any free gives one before any gives a second one; then, "
    elif trace.rounds[0].passed_over:
        before = "what the container does not have yet comes first; there, "
    # What is gone and has no index is never dealt.
    names = {device.gpu: int(index) for device in devices if (index := device.index.partition(":")[0])}
    last = trace.rounds[-1]
    return before + _ranked(last, policy, names) + _told_apart(last, names)


def _open(last: Round) -> list[int]:
    """The places of the GPUs that had any to give."""
    return [at for at, gpu in enumerate(last.gpus) if gpu.room]


def _even(last: Round) -> bool:
    """Whether several GPUs had any to give, all ranked equal, and as much was given out of each."""
    places = _open(last)
    return len(places) > 1 and len({(last.gpus[at].rank, last.gpus[at].load) for at in places}) == 1


def _ranked(last: Round, policy: str, names: Mapping[str, int]) -> str:
    """What the policy looked at, and that of the GPUs that gave, in the order in which it turned to them."""
    if _even(last):
        places = _open(last)
        load, counts = last.gpus[places[0]].load, {last.gpus[at].total for at in places}
        of_all = f"{load} of {counts.pop()} given out" if len(counts) == 1 else f"{load} given out of each"
        return f"{_listed(last, places, names)} are equally used, {of_all}"
    rules = list(POLICIES[policy].looks_at.items())[: _depth(last)]
    first, *others = (words for _, words in rules)
    looked_at = [about for about, _ in rules]
    ordered = [at for at in sorted(_open(last), key=lambda at: last.gpus[at].rank) if last.gave[at]]
    seen = {at: ", ".join(_seen(last, at, looked_at)) for at in ordered}
    groups = [list(group) for _, group in groupby(ordered, seen.__getitem__)]
    shown = ", then ".join(f"{_listed(last, group, names)} ({seen[group[0]]})" for group in groups)
    return f"{', then '.join([f'{first} first', *others])}: {shown}"


def _depth(last: Round) -> int:
    """How many numbers of a rank it took to tell the GPUs that gave any from each other and from the next one."""
    ranks = sorted({last.gpus[at].rank for at in _open(last)})
    worst = max(last.gpus[at].rank for at, count in enumerate(last.gave) if count)
    considered = ranks[: ranks.index(worst) + 2]
    return max(
        (1 + [one != other for one, other in zip(*two, strict=True)].index(True) for two in pairwise(considered)),
        default=1,
    )


def _seen(last: Round, at: int, looked_at: Collection[str]) -> Iterator[str]:
    gpu = last.gpus[at]
    yield f"{gpu.load} of {gpu.total} given out"
    if HAS in looked_at and any(last.gpus[one].picked for one in _open(last)):
        yield f"the container has {gpu.picked}"
    if ROOM in looked_at:
        yield f"room for {gpu.room}"


def _told_apart(last: Round, names: Mapping[str, int]) -> str:
    """What told GPUs of one rank apart, where not all of them were needed."""
    equals, taken, links = list(last.equal), last.taken, last.links
    if len(taken) == len(equals):
        return ""
    among = (
        "of these" if _even(last) and equals == _open(last) else f"of {_listed(last, equals, names)}, which rank equal"
    )
    equal = f"; {among}, {_listed(last, taken, names)} {'is' if len(taken) == 1 else 'are'}"
    if not links.choice.gpus:
        return f"{equal} taken, first in the list"
    if links.runner_up is None:
        return f"{equal} taken: {explain.how(links)}"
    topology = links.placement.topology
    had, over = (
        called(sorted(names[topology.uuids[gpu]] for gpu in gpus))
        for gpus in (links.required, links.required.symmetric_difference(links.runner_up))
    )
    with_ = f" with {had}" if links.required else ""
    score, less = topology.score(links.choice.gpus), topology.score(links.runner_up)
    if score != less:
        return f"{equal} linked best{with_}: a score of {score}, {less} with {over}"
    return f"{equal} taken rather than {over}, linked as well{with_}: {explain.finer_difference(links)}"


def _listed(last: Round, places: Sequence[int], names: Mapping[str, int]) -> str:
    return called(sorted(names[last.gpus[at].uuid] for at in places))
