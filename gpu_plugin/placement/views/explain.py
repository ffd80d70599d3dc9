"""A choice of whole GPUs explained by what it weighed: how it was found, and what it has over the one that came second."""

from collections.abc import Mapping
from math import comb

from gpu_plugin.placement.subsets import LARGEST, Criterion, Subsets, remainder_worths
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import SEARCHED, How, Trace

FORCED: Mapping[How, str] = {
    How.ALL_AVAILABLE: "it is all that is available",
    How.ALL_REQUIRED: "it is all that must be included",
}
"""Why there was nothing to choose."""


_HOW: Mapping[How, str] = {
    **dict.fromkeys(FORCED, "there is no other"),
    How.FIRST_OF_EQUALS: "all pairs of GPUs are equal, so the first ones are taken",
    How.BEST: "the best of {sets} sets",
    How.NOT_JUDGED_YET: "a bounded search, since the sets of this node's GPUs are not judged yet",
    How.TOO_MANY_GPUS: f"a bounded search, since {{gpus}} GPUs are more than {LARGEST}",
    How.TOO_LATE: "a bounded search, since looking at every set took too long",
}


def how(trace: Trace) -> str:
    """How the GPUs of a possible choice were found."""
    required = len(trace.required)
    sets = comb(len(trace.available) - required, len(trace.choice.gpus) - required)
    return _HOW[trace.choice.how].format(sets=sets, gpus=len(trace.placement.topology))


def why(trace: Trace) -> str:
    """Why these GPUs and no others, in a sentence. Takes up to 0.3 s for 16 GPUs."""
    if trace.choice.how in SEARCHED:
        return "a bounded search does not say what came second"
    if trace.runner_up is None:
        return FORCED[trace.choice.how]
    scores = trace.placement.topology.score(trace.choice.gpus), trace.placement.topology.score(trace.runner_up)
    if trace.criterion is Criterion.SCORE:
        return f"a total score of {scores[0]}, {scores[0] - scores[1]} more than the runner-up's"
    equal = f"both score {scores[0]}; " if len(trace.choice.gpus) > 1 else ""
    return equal + finer_difference(trace)


def finer_difference(trace: Trace) -> str:
    """What the chosen one of two sets of one score has over the runner-up."""
    topology, subsets = trace.placement.topology, trace.placement.subsets
    assert trace.runner_up is not None
    assert subsets is not None
    left, instead = (subsets.mask(trace.available.difference(gpus)) for gpus in (trace.choice.gpus, trace.runner_up))
    if trace.criterion is Criterion.REMAINDER:
        return _better_remainder(topology, subsets, left, instead)
    if trace.criterion is Criterion.DISTANCE:
        near, far = topology.distance(trace.choice.gpus), topology.distance(trace.runner_up)
        return f"on nearer NUMA nodes, with distances of {near} in all instead of {far}"
    if trace.criterion is Criterion.EVENNESS:
        squares, more = (subsets.count**2 - subsets.evenness[mask] for mask in (left, instead))
        return (
            f"what stays free lies more evenly on NUMA nodes: the squares of their counts add up to {squares} "
            f"instead of {more}"
        )
    lower = "the lower index is" if len(trace.choice.gpus) == 1 else "the lower indices are"
    return f"the two are equal in links, distance and what they leave; {lower} taken"


def _better_remainder(topology: Topology, subsets: Subsets, left: int, instead: int) -> str:
    worths = ((size, worth[left], worth[instead]) for size, worth in remainder_worths(topology, subsets.score))
    size, ours, theirs = next((size, ours, theirs) for size, ours, theirs in worths if ours != theirs)
    if not size:
        return f"the pairs that stay free score {ours} in all instead of {theirs}"
    return f"what stays free gives pods of {size} a total score of {ours} instead of {theirs}"
