"""The answer to GetPreferredAllocation: the available devices that a container should get."""

from collections.abc import Mapping, Sequence

from gpu_plugin.config.sharing import DISTRIBUTED
from gpu_plugin.devices.device import GPU, Device
from gpu_plugin.placement import shared
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.whole import Budget, How, choose, possible


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
    """Return the best `size` distinct ids out of `available` for a container, including all of `must_include`.

    `whole.choose` chooses whole GPUs that are given out once. If there are MIG devices or shared devices to choose from, the
    policy chooses their GPUs.

    Args:
        available: ids that the kubelet may still allocate, in any order.
        must_include: ids that the answer must contain.
        size: the number of ids in the answer.
        devices: the resource's list.
        order: the position of each id in that list; the answer is in this order.
        placement: the links of the node's GPUs.
        policy: the policy for the GPUs of shared devices and MIG devices, a name of `shared.POLICIES`.
        budget: the time that an exact choice may take.
        trace: receives a record of the choice among shared devices and MIG devices.

    Returns:
        The ids, of healthy devices if there are enough. Nothing for an impossible size, an unknown id, or a required id that is
        not available; the kubelet then chooses. The same question always gets the same answer.
    """
    pool, must = set(available), set(must_include)
    if not possible(pool, must, size) or not all(map(order.__contains__, pool)):
        return ()
    # A device may have become unhealthy since the kubelet's list, and Allocate would refuse it: it comes last
    healthy = pool - {i for i in pool - must if devices[order[i]].reason}
    if len(healthy) >= size:
        pool = healthy
    else:
        must = healthy
    if trace is not None:
        trace.forced = How.ALL_AVAILABLE if size == len(pool) else How.ALL_REQUIRED if size == len(must) else None
    if size == len(pool):
        return tuple(sorted(pool, key=order.__getitem__))
    required = sorted(map(order.__getitem__, must))
    free = sorted(map(order.__getitem__, pool - must))
    if size == len(required):
        chosen = required
    elif any(device.kind != GPU or device.sharing for device in map(devices.__getitem__, (*required, *free))):
        chosen = shared.taken(required, free, size - len(required), devices, policy, placement, budget, trace)
    else:
        chosen = _whole(required, free, size, devices, placement, budget)
    return tuple([devices[at].id for at in sorted(chosen)])


def _whole(
    required: list[int],
    free: list[int],
    size: int,
    devices: Sequence[Device],
    placement: Placement,
    budget: Budget | None,
) -> list[int]:
    """Return the required GPUs and the GPUs that `choose` adds; GPUs that are no longer in the topology come last."""
    position = placement.topology.position
    known = {position[uuid]: at for at in (*free, *required) if (uuid := devices[at].gpu) in position}
    had = {position[uuid] for at in required if (uuid := devices[at].gpu) in position}
    count = min(size - len(required), len(known) - len(had))
    found = choose(placement, known, had, len(had) + count, budget)
    chosen = [known[gpu] for gpu in found.gpus if gpu not in had]
    taken = {*known.values()}
    return [*required, *chosen, *(at for at in free if at not in taken)][:size]
