"""What a policy took explained: what it looked at, and what told GPUs of one rank apart. For people, as `explain` is."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from gpu_plugin.config.sharing import DISTRIBUTED, PACKED, SPREAD
from gpu_plugin.devices.device import Device
from gpu_plugin.placement.dealing import Rank, Share
from gpu_plugin.placement.explain import ALL_AVAILABLE, ALL_REQUIRED, explain, finer_difference
from gpu_plugin.placement.groups import called
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.shared import POLICIES, SharedGpu, counted

_USE, _HAS, _ROOM = "use", "has", "room"

_RULES: Mapping[str, Mapping[str, str]] = {
    DISTRIBUTED: {_USE: "the least used GPU", _HAS: "what the container has least of"},
    PACKED: {_USE: "the most used GPU", _HAS: "what the container has already", _ROOM: "the least room"},
    SPREAD: {_HAS: "what the container has least of", _USE: "the least used GPU"},
}
"""What each number of a policy's rank is about, and what comes first by it, in words."""


class _Round(msgspec.Struct):
    """One of the two rounds in which devices are dealt: first of hardware that the container does not have, then of all.

    `gpus` are as they are after the round, in the order of the list; `before` is what a policy saw of them at its beginning,
    `totals` how many there are in all, `gave` what each gave in the round.
    """

    gpus: Sequence[SharedGpu]
    before: Sequence[Share]
    totals: Sequence[int]
    gave: Sequence[int]
    policy: str

    @classmethod
    def of(cls, gpus: Sequence[SharedGpu], gave: Sequence[int], policy: str) -> "_Round":
        """The round in which GPUs that are open gave so many devices. They count these as picked from now on."""
        before = [Share(gpu.load, gpu.picked, gpu.room) for gpu in gpus]
        totals = [gpu.load + sum([len(part.free) for part in gpu.parts]) for gpu in gpus]
        for gpu, count in zip(gpus, gave, strict=True):
            gpu.taken(count, POLICIES[policy])
            gpu.take(count)
        return cls(gpus, before, totals, gave, policy)

    @property
    def open(self) -> list[int]:
        """The places of the GPUs that had any to give."""
        return [at for at, share in enumerate(self.before) if share.room]

    @property
    def ranks(self) -> Mapping[int, Rank]:
        """What these ranked when the round began, the first ones first."""
        ranked = ((at, POLICIES[self.policy].rank(self.before[at])) for at in self.open)
        return dict(sorted(ranked, key=lambda each: (each[1], each[0])))

    @property
    def even(self) -> bool:
        """Whether several GPUs had any to give, and all ranked equal."""
        return len(self.open) > 1 and len({*self.ranks.values()}) == 1

    @property
    def givers(self) -> list[int]:
        """The places of the GPUs that gave any."""
        return [at for at, count in enumerate(self.gave) if count]

    @property
    def equals(self) -> tuple[list[int], list[int]]:
        """The places of the GPUs that were of one rank and not all needed: those that were taken, and those that were not."""
        rank = max(self._last_rank(at) for at in self.givers)
        over = [at for at, gpu in enumerate(self.gpus) if gpu.room and POLICIES[self.policy].rank(gpu) == rank]
        return [at for at in self.givers if self._last_rank(at) == rank] if over else [], over

    def picked_before(self, at: int) -> int:
        """How many devices of a GPU that gave any the container had when the GPU was turned to last."""
        return self.gpus[at].picked - self._last_gift(at)

    def _last_gift(self, at: int) -> int:
        """Where the policy fills, a GPU is turned to once, else for each device."""
        return self.gave[at] if POLICIES[self.policy].fills else 1

    def _last_rank(self, at: int) -> Rank:
        gpu, gift = self.gpus[at], self._last_gift(at)
        return POLICIES[self.policy].rank(Share(gpu.load - gift, gpu.picked - gift, gpu.room + gift))


def explain_shared(
    required: Sequence[int],
    free: Sequence[int],
    chosen: Collection[int],
    devices: Sequence[Device],
    policy: str,
    placement: Placement,
) -> str:
    """Why `shared.taken` takes these positions of the list, the required ones among them, in a sentence or two."""
    missing = len(chosen) - len(required)
    if missing == len(free):
        return ALL_AVAILABLE
    if not missing:
        return ALL_REQUIRED
    gpus = counted(required, free, devices)
    names = _indices(devices)
    gave = Counter(devices[at].gpu for at in chosen) - Counter(devices[at].gpu for at in required)
    had = any(part.picked and part.free for gpu in gpus for part in gpu.parts)
    for gpu in gpus:
        gpu.open(new=True)
    rooms = [gpu.room for gpu in gpus]
    if missing <= sum(rooms):
        before = "what the container does not have yet comes first; there, " if had else ""
        last = _Round.of(gpus, [gave[gpu.uuid] for gpu in gpus], policy)
    else:
        one_each = "each GPU or MIG device with any free gives one before any gives a second one; then, "
        before = one_each if any(rooms) else ""
        _Round.of(gpus, rooms, policy)
        for gpu in gpus:
            gpu.open(new=False)
        last = _Round.of(gpus, [gave[gpu.uuid] - room for gpu, room in zip(gpus, rooms, strict=True)], policy)
    return before + _ranked(last, names) + _told_apart(last, names, placement)


def _indices(devices: Sequence[Device]) -> Mapping[str, int]:
    """The index of each GPU by uuid; what is gone and has none is never dealt."""
    return {device.gpu: int(index) for device in devices if (index := device.index.partition(":")[0])}


def _ranked(last: _Round, names: Mapping[str, int]) -> str:
    """What the policy looked at, and that of the GPUs that gave, in the order in which it turned to them."""
    if last.even:
        load, counts = last.before[last.open[0]].load, {last.totals[at] for at in last.open}
        of_all = f"{load} of {counts.pop()} given out" if len(counts) == 1 else f"{load} given out of each"
        return f"{_listed(last, last.open, names)} are equally used, {of_all}"
    rules = list(_RULES[last.policy].items())[: _depth(last)]
    first, *others = (words for _, words in rules)
    looked_at = [about for about, _ in rules]
    ordered = [at for at in last.ranks if last.gave[at]]
    seen = {at: ", ".join(_seen(last, at, looked_at)) for at in ordered}
    groups = [list(group) for _, group in groupby(ordered, seen.__getitem__)]
    shown = ", then ".join(f"{_listed(last, group, names)} ({seen[group[0]]})" for group in groups)
    return f"{', then '.join([f'{first} first', *others])}: {shown}"


def _depth(last: _Round) -> int:
    """How many numbers of a rank it took to tell the GPUs that gave any from each other and from the next one."""
    ranks = last.ranks
    worst = max(ranks[at] for at in last.givers)
    beyond = [rank for rank in ranks.values() if rank > worst][:1]
    considered = sorted({rank for rank in ranks.values() if rank <= worst}) + beyond
    return max(
        (1 + [one != other for one, other in zip(*two, strict=True)].index(True) for two in pairwise(considered)),
        default=1,
    )


def _seen(last: _Round, at: int, looked_at: Collection[str]) -> Iterator[str]:
    share = last.before[at]
    yield f"{share.load} of {last.totals[at]} given out"
    if _HAS in looked_at and any(last.before[one].picked for one in last.open):
        yield f"the container has {share.picked}"
    if _ROOM in looked_at:
        yield f"room for {share.room}"


def _told_apart(last: _Round, names: Mapping[str, int], placement: Placement) -> str:
    """What told GPUs of one rank apart, where not all of them were needed."""
    taken, over = last.equals
    if not taken:
        return ""
    equals = sorted({*taken, *over})
    among = "of these" if last.even and equals == last.open else f"of {_listed(last, equals, names)}, which rank equal"
    equal = f"; {among}, {_listed(last, taken, names)} {'is' if len(taken) == 1 else 'are'}"
    position = placement.topology.position
    known = {position[last.gpus[at].uuid] for at in (*taken, *over) if last.gpus[at].uuid in position}
    if last.picked_before(taken[0]) or len(known) <= len(taken):
        return f"{equal} taken, first in the list"
    had = [gpu.uuid for at, gpu in enumerate(last.gpus) if gpu.picked and at not in taken and gpu.uuid in position]
    must = [position[uuid] for uuid in had]
    told = explain(placement, {*known, *must}, must, len(must) + len(taken))
    if told.runner_up is None:
        return f"{equal} taken: {told.choice.why}"
    by = {position[uuid]: index for uuid, index in names.items() if uuid in position}
    with_ = f" with {called(sorted(names[uuid] for uuid in had))}" if had else ""
    other = called(sorted(by[gpu] for gpu in told.runner_up.gpus if gpu not in must))
    if told.choice.score != told.runner_up.score:
        return f"{equal} linked best{with_}: a score of {told.choice.score}, {told.runner_up.score} with {other}"
    why = finer_difference(placement.topology, frozenset({*known, *must}), told.choice, told.runner_up)
    return f"{equal} taken rather than {other}, linked as well{with_}: {why}"


def _listed(last: _Round, places: Sequence[int], names: Mapping[str, int]) -> str:
    return called(sorted(names[last.gpus[at].uuid] for at in places))
