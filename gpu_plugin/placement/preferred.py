"""The answer to GetPreferredAllocation: which of the available devices a container should get."""

from collections.abc import Mapping, Sequence

from gpu_plugin.config.sharing import DISTRIBUTED
from gpu_plugin.devices.device import GPU, Device
from gpu_plugin.placement import shared
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.whole import Budget, How, choose, pair_weights, possible, search

SEARCHED = 64
"""The longest list of whole GPUs, not all of them known, that is searched; beyond, nearness to a NUMA node decides."""


def preferred(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    devices: Sequence[Device],
    order: Mapping[str, int],
    placement: Placement,
    policy: str = DISTRIBUTED,
    budget: Budget | None = None,
    trace: shared.Trace | None = None,
) -> tuple[str, ...]:
    """`size` distinct ids out of `available` that hold all of `must_include` and suit a container best.

    Whole GPUs that are given out once are those that `whole.choose` chooses. Where there are MIG devices or shared ones to
    choose from, the policy says which GPUs they are taken from.

    Args:
        available: ids the kubelet may still hand out, in any order.
        must_include: ids that the answer must hold.
        size: how many ids the answer has.
        devices: the resource's list.
        order: the position of each id in that list; the answer is in this order.
        placement: how the node's GPUs are linked.
        policy: which GPUs shared devices and MIG devices are taken from, a name of `shared.POLICIES`.
        budget: the time that an exact choice may take.
        trace: where to write down what was weighed among shared devices and MIG devices.

    Returns:
        The ids, of healthy devices as far as there are enough, or nothing where no such answer exists (the kubelet then
        chooses): an impossible size, an id that is none of ours, a required one that is not available. The same question
        always gets the same answer.
    """
    pool, must = set(available), set(must_include)
    if not possible(pool, must, size) or not all(map(order.__contains__, pool)):
        return ()
    # What was listed as healthy a moment ago may be so no more, and Allocate would refuse it: it comes last.
    sound = pool - {i for i in pool - must if devices[order[i]].reason}
    if len(sound) >= size:
        pool = sound
    else:
        must = sound
    if trace is not None:
        trace.forced = How.ALL_AVAILABLE if size == len(pool) else How.ALL_REQUIRED if size == len(must) else None
    if size == len(pool):
        return tuple(sorted(pool, key=order.__getitem__))
    required = sorted(map(order.__getitem__, must))
    free = sorted(map(order.__getitem__, pool - must))
    if size == len(required):
        chosen = required
    elif any(map(_part_of_a_gpu, map(devices.__getitem__, (*required, *free)))):
        chosen = shared.taken(required, free, size - len(required), devices, policy, placement, budget, trace)
    else:
        chosen = _whole(required, free, size, devices, placement, budget)
    return tuple([devices[at].id for at in sorted(chosen)])


def _part_of_a_gpu(device: Device) -> bool:
    return device.kind != GPU or device.sharing is not None


def _whole(
    required: list[int],
    free: list[int],
    size: int,
    devices: Sequence[Device],
    placement: Placement,
    budget: Budget | None,
) -> list[int]:
    position = placement.topology.position
    gpus = {position[devices[at].gpu]: at for at in (*required, *free) if devices[at].gpu in position}
    if len(gpus) == len(required) + len(free):
        found = choose(placement, gpus, [position[devices[at].gpu] for at in required], size, budget)
        return [gpus[gpu] for gpu in found.gpus]
    return _among_unknown(required, free, size, devices, placement)


def _among_unknown(
    required: list[int], free: list[int], size: int, devices: Sequence[Device], placement: Placement
) -> list[int]:
    """Where a GPU is not one of the topology's, or has several devices: such pairs count for nothing."""
    missing = size - len(required)
    listed = [*required, *free]
    if len(listed) > SEARCHED:
        return _near(required, free, missing, devices)
    worth, position = pair_weights(placement.topology), placement.topology.position
    at = [position.get(devices[one].gpu) for one in listed]
    rows = [[0 if a is None or b is None else worth[a][b] for b in at] for a in at]
    fixed = len(required)
    found = search(rows, range(fixed), range(fixed, len(listed)), missing)
    return [listed[one] for one in found]


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
