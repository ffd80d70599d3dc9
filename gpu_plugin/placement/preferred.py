"""The answer to GetPreferredAllocation: which of the available devices a container should get."""

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
    """The required ones and those that `choose` adds to them; GPUs that are gone from the topology come last."""
    position = placement.topology.position
    known = {position[uuid]: at for at in (*free, *required) if (uuid := devices[at].gpu) in position}
    had = {position[uuid] for at in required if (uuid := devices[at].gpu) in position}
    count = min(size - len(required), len(known) - len(had))
    found = choose(placement, known, had, len(had) + count, budget)
    chosen = [known[gpu] for gpu in found.gpus if gpu not in had]
    taken = {*known.values()}
    return [*required, *chosen, *(at for at in free if at not in taken)][:size]
