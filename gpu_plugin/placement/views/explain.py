"""Explanations of choices, made of their traces.

For whole GPUs: the way in which they were found, and their advantage over the second best set. For shared GPUs and MIG devices:
the numbers that the policy compared, and the decision between GPUs of equal rank.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import comb

from gpu_plugin.config.words import are
from gpu_plugin.devices.device import Device
from gpu_plugin.placement import shared
from gpu_plugin.placement.shared import HAD, HAS, POLICIES, ROOM, Round, Stage
from gpu_plugin.placement.subsets import LARGEST, Criterion, Subsets, remainder_worths
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import called
from gpu_plugin.placement.whole import SEARCHED, How, Trace

FORCED: Mapping[How, str] = {
    How.ALL_AVAILABLE: "it is all that is available",
    How.ALL_REQUIRED: "it is all that must be included",
}
"""The reasons why there was no choice."""

_HOW: Mapping[How, str] = {
    **dict.fromkeys(FORCED, "there is no other"),
    How.FIRST_OF_EQUALS: "all pairs of GPUs are equal, so the first ones are taken",
    How.BEST: "the best of {sets} sets",
    How.NOT_JUDGED_YET: "a bounded search, since the sets of this node's GPUs are not judged yet",
    How.TOO_MANY_GPUS: f"a bounded search, since {{gpus}} GPUs are more than {LARGEST}",
    How.TOO_LATE: "a bounded search, since looking at every set took too long",
}


def how(trace: Trace) -> str:
    """Return words for the way in which the GPUs of a choice were found."""
    required = len(trace.required)
    sets = comb(len(trace.available) - required, len(trace.choice.gpus) - required)
    return _HOW[trace.choice.how].format(sets=sets, gpus=len(trace.placement.topology))


def why(trace: Trace) -> str:
    """Return the reason for these GPUs and no others, in a sentence. Takes up to 0.3 s for 16 GPUs."""
    if trace.choice.how in SEARCHED:
        return "a bounded search does not say what came second"
    if trace.runner_up is None:
        return FORCED[trace.choice.how]
    topology = trace.placement.topology
    score, less = topology.score(trace.choice.gpus), topology.score(trace.runner_up)
    if score != less:
        return f"a total score of {score}, {score - less} more than the runner-up's"
    equal = f"both score {score}; " if len(trace.choice.gpus) > 1 else ""
    return equal + _finer_difference(trace)


def _finer_difference(trace: Trace) -> str:
    """Return the advantage of the chosen set over a runner-up of equal score."""
    topology, subsets = trace.placement.topology, trace.placement.subsets
    assert trace.runner_up is not None
    assert subsets is not None
    left, instead = (subsets.mask(trace.available.difference(gpus)) for gpus in (trace.choice.gpus, trace.runner_up))
    if trace.criterion is Criterion.WEIGHT:
        near, far = topology.distance(trace.choice.gpus), topology.distance(trace.runner_up)
        return f"on nearer NUMA nodes, with distances of {near} in all instead of {far}"
    if trace.criterion is Criterion.REMAINDER:
        return _better_remainder(topology, subsets, left, instead)
    if trace.criterion is Criterion.EVENNESS:
        squares, more = (len(subsets.bits) ** 2 - subsets.evenness[mask] for mask in (left, instead))
        return (
            f"what stays free lies more evenly on NUMA nodes: the squares of their counts add up to {squares} "
            f"instead of {more}"
        )
    lower = "the lower index is" if len(trace.choice.gpus) == 1 else "the lower indices are"
    return f"the two are equal in links, distance and what they leave; {lower} taken"


def _better_remainder(topology: Topology, subsets: Subsets, left: int, instead: int) -> str:
    values = ((size, worth[left], worth[instead]) for size, worth in remainder_worths(len(topology), subsets.weight))
    size, *differing = next(each for each in values if each[1] != each[2])
    (score, near), (less, far) = map(topology.parts, differing)
    if score != less:
        gives, pairs = f"a total score of {score} instead of {less}", f"score {score} in all instead of {less}"
    else:
        gives, pairs = (
            f"distances of {near} in all instead of {far}",
            f"have distances of {near} in all instead of {far}",
        )
    return f"what stays free gives pods of {size} {gives}" if size else f"the pairs that stay free {pairs}"


def policy_why(trace: shared.Trace, devices: Sequence[Device], policy: str) -> str:
    """Return the reason why a policy took devices of this list, in a sentence or two."""
    if trace.forced is not None:
        return FORCED[trace.forced]
    before = ""
    last = trace.rounds[-1]
    if POLICIES[policy].fewest:
        before = f"as few GPUs as have room for {sum(last.gave)}; " if sum(last.gave) > 1 else ""
    elif len(trace.rounds) > 1:
        which = "GPU" if last.stage is Stage.NEW_HARDWARE else "GPU or MIG device"
        before = f"each {which} with any free gives one before any gives a second one; then, "
    elif last.passed_over:
        before = "what the container does not have yet comes first; there, "
    # A device without an index is gone, and is never dealt
    names = {device.gpu: int(index) for device in devices if (index := device.index.partition(":")[0])}
    return before + _ranked(last, policy, names) + _between_equals(last, names)


def _open(last: Round) -> list[int]:
    """Return the places of the GPUs that had devices to give."""
    return [at for at, gpu in enumerate(last.gpus) if gpu.room]


def _even(last: Round) -> bool:
    """Return True if several GPUs had devices to give, all of the same rank and the same number of given out devices."""
    places = _open(last)
    return len(places) > 1 and len({(last.ranks[at], last.gpus[at].load) for at in places}) == 1


def _ranked(last: Round, policy: str, names: Mapping[str, int]) -> str:
    """Return the criteria of the policy, and the GPUs that gave devices in the order of their ranks, with their numbers."""
    if _even(last):
        places = _open(last)
        load, counts = last.gpus[places[0]].load, {last.totals[at] for at in places}
        of_all = f"{load} of {counts.pop()} given out" if len(counts) == 1 else f"{load} given out of each"
        return f"{_listed(last, places, names)} are equally used, {of_all}"
    looks_at = POLICIES[policy].looks_at
    # The container's former GPUs count only while one of them has room.
    unused = looks_at.keys() & ({HAD} if not any(last.gpus[at].picked for at in _open(last)) else ())
    rules = [rule for rule in looks_at.items() if rule[0] not in unused][: max(1, _depth(last) - len(unused))]
    first, *others = (words for _, words in rules)
    subjects = [subject for subject, _ in rules]
    ordered = [at for at in sorted(_open(last), key=last.ranks.__getitem__) if last.gave[at]]
    numbers = {at: ", ".join(_numbers(last, at, subjects)) for at in ordered}
    groups = [list(group) for _, group in groupby(ordered, numbers.__getitem__)]
    shown = ", then ".join(f"{_listed(last, group, names)} ({numbers[group[0]]})" for group in groups)
    return f"{', then '.join([f'{first} first', *others])}: {shown}"


def _depth(last: Round) -> int:
    """Return how many numbers of a rank distinguish the GPUs that gave devices from each other and from the next GPU."""
    ranks = sorted({last.ranks[at] for at in _open(last)})
    worst = max(last.ranks[at] for at, count in enumerate(last.gave) if count)
    considered = ranks[: ranks.index(worst) + 2]
    return max(
        (1 + [one != other for one, other in zip(*two, strict=True)].index(True) for two in pairwise(considered)),
        default=1,
    )


def _numbers(last: Round, at: int, subjects: Collection[str]) -> Iterator[str]:
    gpu = last.gpus[at]
    yield f"{gpu.load} of {last.totals[at]} given out"
    if {HAS, HAD}.intersection(subjects) and any(last.gpus[one].picked for one in _open(last)):
        yield f"the container has {gpu.picked}"
    if ROOM in subjects:
        yield f"room for {gpu.room}"


def _between_equals(last: Round, names: Mapping[str, int]) -> str:
    """Return the decision between GPUs of equal rank; empty if all of them were needed."""
    equals, taken, links = list(last.equal), last.taken, last.links
    if len(taken) == len(equals):
        return ""
    among = (
        "of these" if _even(last) and equals == _open(last) else f"of {_listed(last, equals, names)}, which rank equal"
    )
    equal = f"; {among}, {_listed(last, taken, names)} {are(len(taken))}"
    if not links.choice.gpus:
        return f"{equal} taken, first in the list"
    if links.runner_up is None:
        return f"{equal} taken: {how(links)}"
    topology = links.placement.topology
    had, over = (
        called(sorted(names[topology.uuids[gpu]] for gpu in gpus))
        for gpus in (links.required, links.required.symmetric_difference(links.runner_up))
    )
    with_ = f" with {had}" if links.required else ""
    score, less = topology.score(links.choice.gpus), topology.score(links.runner_up)
    if score != less:
        return f"{equal} linked best{with_}: a score of {score}, {less} with {over}"
    return f"{equal} taken rather than {over}, linked as well{with_}: {_finer_difference(links)}"


def _listed(last: Round, places: Sequence[int], names: Mapping[str, int]) -> str:
    return called(sorted(names[last.gpus[at].uuid] for at in places))
