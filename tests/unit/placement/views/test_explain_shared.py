"""Explanations of a policy's choice among shared GPUs and MIG devices."""

from collections import Counter

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import MIG, Device
from gpu_plugin.placement import shared
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import explain
from tests.unit.placement.nodes import dgx1

DGX = Placement.of(Topology.of(dgx1()))


def replicas(count: int, number: int = 8) -> list[Device]:
    """The replicas of as many GPUs, GPU by GPU."""
    sharing = SharedResource("nvidia.com/gpu", "nvidia.com/gpu", count)
    uuids = DGX.topology.uuids[:number]
    return [
        Device(f"{uuid}::{at}", uuid, uuid, str(gpu), sharing=sharing)
        for gpu, uuid in enumerate(uuids)
        for at in range(count)
    ]


def slices(*counts: int) -> list[Device]:
    """This number of MIG devices of each GPU."""
    return [
        Device(f"MIG-{gpu}-{at}", uuid, f"MIG-{gpu}-{at}", f"{gpu}:{at}", kind=MIG)
        for gpu, (uuid, count) in enumerate(zip(DGX.topology.uuids, counts, strict=False))
        for at in range(count)
    ]


def told(devices, free, size, policy, must=()) -> str:
    """The explanation. `free` and `must` have a number of devices of each GPU, the last in the list."""
    at = {
        gpu: [place for place, device in enumerate(devices) if device.index.split(":")[0] == str(gpu)] for gpu in free
    }
    pool = [place for gpu, count in free.items() for place in at[gpu][len(at[gpu]) - count :]]
    required = sorted(place for gpu, count in dict(must).items() for place in at[gpu][len(at[gpu]) - count :])
    others = sorted(set(pool).difference(required))
    return explain.policy_why(traced(required, others, size, devices, policy), devices, policy)


def traced(required, others, size, devices, policy) -> shared.Trace:
    """The trace of a choice. The answer is the same without a trace."""
    trace = shared.Trace()
    ids, must = ([devices[at].id for at in places] for places in ([*others, *required], required))
    asked = ids, must, size, devices, {device.id: at for at, device in enumerate(devices)}, DGX, policy
    chosen = preferred(*asked, trace=trace)
    assert chosen == preferred(*asked)
    gave = Counter(device.gpu for device in devices if device.id in chosen and device.id not in must)
    if trace.forced is None:
        dealt: Counter[str] = Counter()
        for each in trace.rounds:
            dealt.update(dict(zip([gpu.uuid for gpu in each.gpus], each.gave, strict=True)))
        assert +dealt == gave
    return trace


def test_the_rank_of_shared_gpus_is_told_and_then_their_links():
    free = {0: 1, 1: 3, 2: 4, 3: 3}
    assert told(replicas(4), free, 5, "packed") == (
        "as few GPUs as have room for 5; the most used GPU first: GPU 0 (3 of 4 given out), then GPU 2 (0 of 4 given out)"
    )
    assert told(replicas(4), free, 2, "packed", {0: 1}) == (
        "the most used GPU first: GPU 3 (1 of 4 given out); of GPUs 1,3, which rank equal, "
        "GPU 3 is linked best with GPU 0: a score of 230, 130 with GPU 1"
    )
    assert told(replicas(4), free, 1, "distributed") == "the least used GPU first: GPU 2 (0 of 4 given out)"
    assert told(replicas(4), free, 3, "spread") == (
        "what the container has least of first, then the least used GPU: GPU 2 (0 of 4 given out), then GPUs 1,3 "
        "(1 of 4 given out)"
    )


def test_of_gpus_that_are_equally_used_those_linked_best_are_taken():
    for policy, size, before in (
        ("distributed", 2, ""),
        ("spread", 2, ""),
        ("packed", 8, "as few GPUs as have room for 8; "),
    ):
        assert told(replicas(4), {0: 4, 1: 4, 3: 4}, size, policy) == (
            f"{before}GPUs 0-1,3 are equally used, 0 of 4 given out; of these, GPUs 0,3 are linked best: a score of 230, "
            "130 with GPUs 0-1"
        )
    assert told(replicas(4), {0: 2, 1: 2, 3: 2}, 1, "packed") == (
        "GPUs 0-1,3 are equally used, 2 of 4 given out; of these, GPU 1 is taken rather than GPU 0, linked as well: "
        "what stays free gives pods of 2 a total score of 230 instead of 130"
    )


def test_what_the_container_has_comes_last_or_with_the_fewest_gpus_first():
    free, must = {0: 1, 5: 4}, {5: 1}
    assert told(replicas(4), free, 2, "packed", must) == (
        "what the container has already first: GPU 5 (1 of 4 given out, the container has 1)"
    )
    assert told(replicas(4), free, 2, "distributed", must) == (
        "what the container does not have yet comes first; there, the least used GPU first: GPU 0 (3 of 4 given out)"
    )
    assert told(replicas(4), {0: 1, 1: 3}, 3, "distributed") == (
        "each GPU or MIG device with any free gives one before any gives a second one; then, "
        "the least used GPU first: GPU 1 (2 of 4 given out)"
    )
    assert told(replicas(4), {0: 4, 1: 4}, 3, "distributed").endswith("GPU 0 is taken, first in the list")


def test_mig_devices_are_ranked_by_their_gpu():
    assert told(slices(7, 7, 7), {0: 5, 1: 7, 2: 7}, 2, "packed") == (
        "as few GPUs as have room for 2; the most used GPU first: GPU 0 (2 of 7 given out)"
    )
    assert told(slices(7, 7), {0: 5, 1: 7}, 3, "distributed") == (
        "each GPU with any free gives one before any gives a second one; then, "
        "the least used GPU first: GPU 1 (1 of 7 given out)"
    )
    assert "GPU 1 (0 of 7 given out), then GPU 0 (2 of 7 given out)" in told(slices(7, 7), {0: 5, 1: 7}, 2, "spread")


def test_where_gpus_are_equally_used_it_is_told_what_else_the_policy_looked_at():
    assert told(slices(7, 1), {0: 7, 1: 1}, 1, "packed") == (
        "the most used GPU first, then the least room: GPU 1 (0 of 1 given out, room for 1)"
    )
    assert told(slices(7, 7), {0: 7, 1: 6}, 2, "packed", {0: 1}) == (
        "what the container has already first: GPU 0 (1 of 7 given out, the container has 1)"
    )
    assert told(slices(7, 7), {0: 7, 1: 6}, 4, "distributed", {0: 2}) == (
        "each GPU with any free gives one before any gives a second one; then, the least used GPU first, then what the "
        "container has least of: GPU 1 (2 of 7 given out, the container has 1)"
    )


def test_spread_turns_last_to_what_the_container_has():
    assert told(slices(7, 7, 7), {0: 7, 1: 5, 2: 4}, 4, "spread", {0: 1}) == (
        "each GPU with any free gives one before any gives a second one; then, what the container has least of first, "
        "then the least used GPU: GPU 0 (1 of 7 given out, the container has 1)"
    )


def test_where_there_is_nothing_that_the_container_does_not_have_nothing_is_said_of_it():
    assert told(replicas(4), {0: 4}, 3, "distributed", {0: 1}) == "the least used GPU first: GPU 0 (1 of 4 given out)"


def test_no_choice_of_shared_gpus_is_said_to_be_none():
    assert told(replicas(2), {0: 2, 1: 1}, 3, "packed") == "it is all that is available"
    assert told(replicas(2), {0: 2, 1: 1}, 2, "packed", {0: 1, 1: 1}) == "it is all that must be included"
