"""The answer to GetPreferredAllocation: which of the available devices a container should get."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

from gpu_plugin.devices.device import GPU, Device
from gpu_plugin.placement import shared
from gpu_plugin.placement.scores import Scores

EXHAUSTIVE = 256
"""Up to this many candidate sets each is looked at (8 GPUs never have more than 70): 0.3 ms at most."""


def preferred(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    devices: Sequence[Device],
    order: Mapping[str, int],
    scores: Scores,
    policy: str = shared.DISTRIBUTED,
) -> tuple[str, ...]:
    """`size` distinct ids out of `available` that hold all of `must_include` and suit a container best.

    Whole GPUs that are given out once are those best linked to each other. Where there are MIG devices or shared ones to
    choose from, the policy says which GPUs they are taken from.

    Args:
        available: ids the kubelet may still hand out, in any order.
        must_include: ids that the answer must hold.
        size: how many ids the answer has.
        devices: the resource's list.
        order: the position of each id in that list; the answer is in this order.
        scores: how well two GPUs are linked.
        policy: which GPUs shared devices and MIG devices are taken from, a name of `shared.POLICIES`.

    Returns:
        The ids, or nothing where no such answer exists (the kubelet then chooses): an impossible size, an id that is
        none of ours, a required one that is not available. The same question always gets the same answer.
    """
    pool, must = set(available), set(must_include)
    if size <= 0 or size > len(pool) or len(must) > size or not must <= pool or not all(i in order for i in pool):
        return ()
    if size == len(pool):
        return tuple(sorted(pool, key=order.__getitem__))
    required = sorted(order[i] for i in must)
    free = sorted(order[i] for i in pool - must)
    missing = size - len(required)
    if missing == 0:
        chosen = required
    elif any(_part_of_a_gpu(devices[order[i]]) for i in pool):
        chosen = shared.taken(required, free, missing, devices, policy)
    elif comb(len(free), missing) <= EXHAUSTIVE:
        chosen = _best(required, free, missing, devices, scores)
    elif len(pool) <= 64:
        chosen = _grown(required, free, missing, devices, scores)
    else:
        chosen = _near(required, free, missing, devices)
    return tuple(devices[at].id for at in sorted(chosen))


def _part_of_a_gpu(device: Device) -> bool:
    return device.kind != GPU or device.sharing is not None


def _best(required: list[int], free: list[int], missing: int, devices: Sequence[Device], scores: Scores) -> list[int]:
    """Every set looked at: the greatest sum of pair scores, and among equals the lowest positions."""
    gpus = [devices[at].gpu for at in (*required, *free)]
    matrix = [[row.get(g, 0) for g in gpus] for row in (scores.rows.get(g, {}) for g in gpus)]
    fixed = range(len(required))
    to_required = [sum(row[r] for r in fixed) for row in matrix]
    best: tuple[int, ...] = ()
    best_score = -1
    for candidate in combinations(range(len(required), len(gpus)), missing):
        score = 0
        for at, one in enumerate(candidate):
            row = matrix[one]
            score += to_required[one]
            for other in candidate[:at]:
                score += row[other]
        if score > best_score:
            best, best_score = candidate, score
    return required + [free[at - len(required)] for at in best]


def _grown(required: list[int], free: list[int], missing: int, devices: Sequence[Device], scores: Scores) -> list[int]:
    """Grown one device at a time from the required ones, or from each free one in turn; the best outcome of all."""
    best: list[int] = []
    best_score = -1
    for seed in [None] if required else free:
        chosen = [*required] if seed is None else [seed]
        left = [at for at in free if at != seed]
        gain = {at: sum(scores.of(devices[at].gpu, devices[c].gpu) for c in chosen) for at in left}
        score = 0
        while len(chosen) < len(required) + missing:
            pick = max(left, key=gain.__getitem__)  # the first of equals: the lowest position
            score += gain.pop(pick)
            left.remove(pick)
            chosen.append(pick)
            row = scores.rows.get(devices[pick].gpu, {})
            for at in left:
                gain[at] += row.get(devices[at].gpu, 0)
        if score > best_score:
            best, best_score = chosen, score
    return best


def _near(required: list[int], free: list[int], missing: int, devices: Sequence[Device]) -> list[int]:
    """For long lists: the first ones, those on the required ones' NUMA nodes (or on the first with room) before others."""
    wanted = {node for at in required for node in devices[at].numa}
    if not wanted:
        room: dict[tuple[int, ...], int] = {}
        for at in free:
            room[devices[at].numa] = room.get(devices[at].numa, 0) + 1
        wanted = set(next((numa for numa, count in room.items() if count >= missing), ()))
    near = [at for at in free if wanted.intersection(devices[at].numa)]
    if len(near) < missing:
        taken = set(near)
        near += [at for at in free if at not in taken]
    return required + near[:missing]
